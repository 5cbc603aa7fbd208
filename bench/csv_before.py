"""The reader of CSV of version 0.2, which `bench_csv` compares the present one with: all by Python's csv module."""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from fastrack._samples.blocks import VALID, Block, Column, source_columns
from fastrack._samples.text_lines import open_text
from fastrack.errors import FormatError

Rows = list[list[str]]

_ROWS = 4096  # of a batch, at most
_NOTES = 5  # about columns, at most
_CHARACTERS = 4 << 20  # of a batch, about

# What a cell is. A column of integers holds 64 bits, one of numbers floats of as many, which have no integer above
# 2**53 exactly. Text is never taken for a number if its digits would not come back: 007, +1, 1_000.
_EMPTY, _INTEGER, _LONG, _NUMBER, _TEXT = 1, 2, 4, 8, 16
_INTEGER_CELL = re.compile(r"0|-?[1-9][0-9]*")
_NUMBER_CELL = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|nan|NaN|-?(?:inf|Inf|Infinity)"
)
# Many cells at once, with integers that both types hold, 15 digits of numbers, and exponents that fit.
_INTEGER_CELLS = re.compile(r"(?:(?:0|-?[1-9][0-9]{0,13})?\n)*+")
_NUMBER_CELLS = re.compile(r"(?:(?=.{0,16}\n)(?:-?(?:0|[1-9][0-9]{0,13})(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?)?\n)*+")


def read_files(
    paths: Iterable[Path],
    chosen: Sequence[str] | None = None,
    notes: list[str] | None = None,
    stored: Mapping[str, Column] | None = None,
    schema: object = None,  # noqa: ARG001
) -> Iterator[Mapping[str, Block]]:
    """Return the batches of files of one header, after a first pass that finds the types of their columns.

    notes : takes which columns became text by a cell among numbers
    stored : columns that the cells are added to, whose types they get if they can
    """
    found: dict[str, int] = {}
    for path in paths:
        with _open(path, chosen, list(found)) as (names, places, batches):
            found, read = found or {name: _what_was((stored or {}).get(name)) for name in names}, 0
            for rows in batches:
                for name, cells in zip(names, _cells(rows, places), strict=True):
                    before = found[name]
                    found[name] |= _TEXT if before & _TEXT else _what(cells)
                    if notes is not None and found[name] & ~before & _TEXT and len(notes) < _NOTES:
                        notes += _notes_of(name, cells, before, read, path)
                read += len(rows)
    for path in paths:
        with _open(path, chosen) as (names, places, batches):
            for rows in batches:
                columns: dict[str, Block] = {}
                try:
                    for name, cells in zip(names, _cells(rows, places), strict=True):
                        columns |= _blocks_of(name, cells, found[name])
                except (LookupError, ValueError, OverflowError):  # their errors have the cells
                    raise _changed(path) from None
                yield columns


def _cells(rows: Rows, places: list[int]) -> list[Sequence[str]]:
    columns = list(zip(*rows, strict=True))
    return [columns[place] for place in places]


@contextmanager
def _open(
    path: Path, chosen: Sequence[str] | None, expected: Sequence[str] = ()
) -> Iterator[tuple[list[str], list[int], Iterator[Rows]]]:
    """Open a file. Return the names and places of the columns to take, as expected, and batches of rows."""
    with _open_rows(path) as reader:
        try:
            header: list[str] = next(reader, [])
        except csv.Error:
            raise _fault_of(path) from None
        _require_names(header, path)
        given = set(header)
        if expected and (list(expected) != header if chosen is None else not given.issuperset(expected)):
            raise FormatError(  # without what is in their place: in a file without a header it would be values
                f"{path}, line 1: expected the columns {list(expected)!s:.200} of the first file, got others. Give all "
                "files the same header"
            )
        names = source_columns(header, chosen, f"{path}, line 1")
        batches = _batches_of(reader, len(header), path)
        place_of = {name: place for place, name in enumerate(header)}
        yield names, [place_of[name] for name in names], batches


@contextmanager
def _open_rows(path: Path) -> Iterator[Any]:
    with open_text(path) as (lines, _):
        first = list(islice(lines, 1))
        delimiter = _delimiter_of("".join(first), path)
        yield csv.reader(chain(first, lines), delimiter=delimiter, strict=True)


def _delimiter_of(header: str, path: Path) -> str:
    """Return the delimiter: a comma, semicolon or tab, whichever the header has; a tab for .tsv."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    outside = re.sub(r'"[^"]*(?:"|$)', "", header)
    found = [delimiter for delimiter in ",;\t" if delimiter in outside]
    if len(found) > 1:
        raise FormatError(
            f"{path}, line 1: expected names with one delimiter between them, got two or more of comma, semicolon and "
            "tab. Quote the names that have one"
        )
    return found[0] if found else ","


def _require_names(header: list[str], path: Path) -> None:
    """Refuse a header that is none."""
    if len(header) > 1 and not header[0] and all(header[1:]):
        raise FormatError(
            f"{path}, line 1: expected a name for each column, got none for column 1. If it is the index of pandas, "
            "write the file by to_csv(index=False); else name it"
        )
    if not header or ("" not in header and all(_NUMBER_CELL.fullmatch(cell) for cell in header)):
        got = "numbers" if header else "none"
        raise FormatError(
            f"{path}, line 1: expected a header with the names of the columns, got {got}. Put one above the rows"
        )


def _batches_of(reader: Any, width: int, path: Path) -> Iterator[Rows]:
    """Return batches of rows, each of as many cells as the header. Empty lines may be only at the end."""
    count, at_end = 64, False
    while True:
        try:
            rows = list(islice(reader, count))
        except csv.Error:
            raise _fault_of(path) from None
        if not rows:
            return
        was_at_end = at_end
        while rows and not rows[-1]:
            at_end = True
            rows.pop()
        if rows and (was_at_end or set(map(len, rows)) != {width}):
            raise _fault_of(path)
        if rows:
            yield rows
            some = rows[:64]
            size = sum(map(len, chain.from_iterable(some))) // len(some)
            count = max(1, min(_ROWS, _CHARACTERS // max(size, 1)))


def _fault_of(path: Path) -> FormatError:
    """Return an error with the line on which the first row that cannot be taken begins: slower than reading rows."""
    with _open_rows(path) as reader:
        width = blank = 0
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                return FormatError(
                    f"{path}, line {line}: expected CSV, got a row that is none ({error!s:.100}). Mend its quotes, or "
                    "save the table as Parquet"
                )
            if row is None:
                return _changed(path)
            width = width or len(row)
            if row and (blank or len(row) != width):
                line, got = (blank, "an empty line") if blank else (line, str(len(row)))
                return FormatError(
                    f"{path}, line {line}: expected {width} cells, as in the header, got {got}. Mend the row, or "
                    "remove it"
                )
            blank = blank or (0 if row else line)


def _changed(path: Path) -> FormatError:
    return FormatError(f"{path}: expected a file that stays as it is, got one that changed. Try again")


def _what_was(column: Column | None) -> int:
    """Return what the cells of a stored column were."""
    if column is None or (column.shape is None and column.type != "text"):
        return 0
    return _TEXT if column.type == "text" else {"I64": _INTEGER, "F64": _NUMBER}.get(column.dtype, 0)


def _what(cells: Sequence[str]) -> int:
    """Return what the cells of a column are, as a sum of flags."""
    joined = "\n".join(cells) + "\n"
    if len(joined) == len(cells):
        return _EMPTY
    if joined.count("\n") == len(cells):
        empty = _EMPTY if joined[0] == "\n" or "\n\n" in joined else 0
        if _INTEGER_CELLS.fullmatch(joined):
            return _INTEGER | empty
        if _NUMBER_CELLS.fullmatch(joined):
            return _NUMBER | empty
    what = 0
    for cell in cells:
        what |= _what_is(cell)
        if what & _TEXT:
            break
    return what


def _what_is(cell: str) -> int:
    if not cell:
        return _EMPTY
    if _INTEGER_CELL.fullmatch(cell):
        if len(cell) > 20 or not -(2**63) <= int(cell) < 2**63:
            return _TEXT
        return _INTEGER if abs(int(cell)) <= 2**53 else _INTEGER | _LONG
    if not _NUMBER_CELL.fullmatch(cell):
        return _TEXT
    return _NUMBER if "n" in cell.lower() or _is_held(cell) else _TEXT


def _is_held(cell: str) -> bool:
    """Return whether a float gives the digits of a number back: all that there are, or its shortest ones."""
    value = float(cell)
    if repr(value) == cell:
        return True
    digits = cell.lower().partition("e")[0].lstrip("-0.").replace(".", "")
    if not digits or not value or math.isinf(value):
        return not digits
    if len(digits) <= 15 and abs(value) >= sys.float_info.min:
        return True
    return Decimal(cell) in (Decimal(repr(value)), Decimal(f"{value:.{len(digits) - 1}e}"))


def _notes_of(name: str, cells: Sequence[str], before: int, read: int, path: Path) -> list[str]:
    """Return that a column became text, unless its cells are no numbers anyway."""
    are_numbers = [bool(_what_is(cell) & (_INTEGER | _NUMBER)) for cell in cells if cell]
    if not before & (_INTEGER | _NUMBER) and sum(are_numbers) * 2 <= len(are_numbers):
        return []
    row = read + 1 + next(index for index, cell in enumerate(cells) if _what_is(cell) & _TEXT)
    return [f"{name:.80} is text, as row {row} of {path.name} is no number"]


def _blocks_of(name: str, cells: Sequence[str], what: int) -> dict[str, Block]:
    """Return the values of a column, and which of them are there if cells are empty in a column of numbers."""
    if what & _TEXT or (what & _NUMBER and what & _LONG) or not what & (_INTEGER | _NUMBER):
        return {name: _text_block(cells)}
    kind, dtype = (float, np.float64) if what & _NUMBER else (int, np.int64)
    if not what & _EMPTY:
        return {name: Block.of(np.array(list(map(kind, cells)), dtype))}
    null = math.nan if kind is float else 0
    values = np.array([kind(cell) if cell else null for cell in cells], dtype)
    return {name: Block.of(values), name + VALID: Block.of(np.array(list(map(bool, cells)), np.bool_))}


def _text_block(cells: Sequence[str]) -> Block:
    text = "".join(cells)
    sizes = map(len, cells) if text.isascii() else (len(cell.encode()) for cell in cells)
    ends = np.zeros(len(cells) + 1, np.int64)
    ends[1:] = np.cumsum(np.fromiter(sizes, np.int64, len(cells)))
    return Block(Column("U8", None, "text"), np.frombuffer(text.encode(), np.uint8), len(cells), ends)
