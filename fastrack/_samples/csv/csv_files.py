"""CSV and TSV: columns of numbers and text, by what all of their cells are."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fastrack._samples.blocks import Block, Column, source_columns
from fastrack._samples.csv.cell_types import (
    EXPECTED,
    INTEGER,
    LONG,
    LONGEST_CELL,
    NULL,
    NUMBER,
    NUMBER_CELL,
    POINTS,
    TEXT,
    Cells,
    Schema,
    TextCells,
    blocks_of,
    fits,
    has_comma,
    is_like_number,
    judge_cell,
    judge_typed,
    kind_of,
    reason_of,
)
from fastrack._samples.csv.csv_arrow import ArrowCells, Unsure, read_columns
from fastrack._samples.text_lines import open_text
from fastrack._util.shown import list_names, shown
from fastrack.errors import FormatError

_ROWS = 1024  # of a batch, at most: more are slower, as processors keep less
_SIZE = 4 << 20  # bytes of a batch, but for its last rows
_KEPT = 64 << 20  # bytes of cells that are kept from the first pass to the second
_NOTES = 100  # about columns, at most
_FIRST = 64  # cells that tell whether a column of text was to be one of numbers


def read_files(
    paths: Iterable[Path],
    chosen: Sequence[str] | None = None,
    notes: list[str] | None = None,
    stored: Mapping[str, Column] | None = None,
    schema: Schema | None = None,
) -> Iterator[Mapping[str, Block]]:
    """Return the batches of files of one header, after a first pass that finds the types of their columns.

    notes : takes which columns became text by a cell among numbers
    stored : columns that the cells are added to, whose types they get if they can
    schema : nulls, and types of columns
    """
    schema, found, room = schema or Schema(), dict[str, _Found](), _KEPT
    kept: dict[Path, list[Sequence[Cells]]] = {}
    for path in paths:
        names, batches = _open(path, chosen, schema, list(found), notes)
        found = found or {name: _Found(_what_was((stored or {}).get(name))) for name in names}
        for column in found.values():
            column.earlier = column.what
        row, kept[path] = 0, []
        for batch in batches:
            _find(found, schema, path, row, batch)
            row += len(batch[0].cells)
            room -= sum(cells.cells.nbytes if isinstance(cells, ArrowCells) else _KEPT for cells in batch)
            if room >= 0:
                kept[path].append(batch)
            else:
                kept.pop(path, None)
            del batch  # or its rows stay in memory while the next ones are read
    kinds = {name: schema.types.get(name) or kind_of(column.what) for name, column in found.items()}
    if notes is not None:
        notes += _notes_of({name: found[name] for name, kind in kinds.items() if kind == "text"}, schema.nulls)
    for path in paths:
        again = kept.pop(path, None)
        for batch in _open(path, chosen, schema)[1] if again is None else again:
            blocks: dict[str, Block] = {}
            try:
                for (name, column), cells in zip(found.items(), batch, strict=True):
                    blocks |= blocks_of(name, cells, kinds[name], column.what, schema.nulls)
            except (LookupError, ValueError, OverflowError):  # their errors have the cells
                raise _changed(path) from None
            del batch, cells
            yield blocks


@dataclass(slots=True)
class _Found:
    """Findings about the cells of a column.

    what : flags of what they are
    earlier : those of the files before the one that is read
    odd : the file and row of the first cell of text, or else of the first long integer
    """

    what: int
    earlier: int = 0
    odd: tuple[Path, int] | None = None


def _find(found: Mapping[str, _Found], schema: Schema, path: Path, start: int, batch: Sequence[Cells]) -> None:
    """Add the cells of the next rows to what was found. Raise FormatError if the type of a column does not take one."""
    for (name, column), given in zip(found.items(), batch, strict=True):
        cells, valid = given.without(schema.nulls)
        kind = schema.types.get(name)
        what = judge_typed(cells, kind) if kind else column.what & TEXT or cells.judge()
        if kind and what & TEXT:
            index, cell = next((index, cell) for index, cell in enumerate(cells.texts()) if not fits(cell, kind))
            advice = POINTS if has_comma(cell) else "Name it in nulls= if it is a null, or give another type"
            raise FormatError(
                f"{path}, line {_line_of(path, start + index)}: column {name!r:.80}: expected {EXPECTED[kind]}, as "
                f"types= says, got another cell. {advice}"
            )
        new = what & ~column.what
        if not kind and (odd := new & TEXT or new & LONG):
            column.odd = path, start + next(i for i, cell in enumerate(cells.texts()) if judge_cell(cell) & odd)
        column.what |= what | (0 if valid is None else NULL)


def _notes_of(found: Mapping[str, _Found], nulls: frozenset[str]) -> list[str]:
    """Return which columns of text would be numbers but for a cell, unless it is one of many that are none."""
    notes: list[str] = []
    odd = {name: column.odd for name, column in found.items() if column.odd}
    for path in dict.fromkeys(path for path, _ in odd.values()):
        row_of = {name: row for name, (where, row) in odd.items() if where == path}
        first: dict[str, list[bool]] = {name: [] for name in row_of}
        told = {}
        rows = _rows_of(path)
        place_of = {name: place for place, name in enumerate(next(rows)[1])}
        for number, (line, row, _) in enumerate(islice(rows, max(_FIRST, *row_of.values()) + 1)):
            for name, odd_row in row_of.items():
                cell = row[place_of[name]]
                if cell and cell not in nulls and len(first[name]) < _FIRST:
                    first[name].append(is_like_number(cell))
                if number == odd_row:
                    told[name] = f"{name:.80} is text, as line {line} of {path.name} {reason_of(cell)}"
        for name, note in told.items():
            if found[name].earlier & (INTEGER | NUMBER) or sum(first[name]) * 2 >= len(first[name]):
                notes.append(note)
    return notes[:_NOTES] + ([f"{len(notes) - _NOTES} more columns are text"] if len(notes) > _NOTES else [])


def _open(
    path: Path,
    chosen: Sequence[str] | None,
    schema: Schema,
    expected: Sequence[str] = (),
    notes: list[str] | None = None,
) -> tuple[list[str], Iterator[Sequence[Cells]]]:
    """Return the names of the columns to take of a file, as expected, and their cells in batches."""
    rows = _rows_of(path, notes)
    header = next(rows)[1]
    place_of = {name: place for place, name in enumerate(header)}
    if len(header) == 1 and "|" in header[0] and notes is not None:
        notes.append(f"{path.name} has one column, as its header has no commas, semicolons or tabs")
    if expected and (list(expected) != header if chosen is None else not place_of.keys() >= set(expected)):
        raise FormatError(  # without what is in their place: in a file without a header it would be values
            f"{path}, line 1: expected the columns {list(expected)!s:.200} of the first file, got others. Give all "
            "files the same header"
        )
    names = source_columns(header, chosen, f"{path}, line 1")
    for name in schema.types:
        if name not in place_of:
            raise FormatError(
                f"{path}, line 1: types=: the source has no column {shown(name, 80)}; {list_names(name, header)}"
            )
    return names, _batches_of(path, rows, len(header), [place_of[name] for name in names])


def _batches_of(
    path: Path, rows: Iterator[tuple[int, list[str], int]], width: int, places: list[int]
) -> Iterator[Sequence[Cells]]:
    """Return the cells of columns in batches, by PyArrow up to where the csv module may read another table."""
    count = 0
    with suppress(Unsure):
        for cells in read_columns(path, _delimiter_of(path), width, places):
            yield cells
            count += len(cells[0].cells)
        return
    taken, size = list[list[str]](), 0
    try:
        for _, row, nbytes in islice(rows, count, None):
            taken.append(row)
            size += nbytes
            if len(taken) == _ROWS or size >= _SIZE:
                yield _columns_of(taken, places)
                taken, size = [], 0
    except FormatError:  # told after those of the cells before it, as with PyArrow
        if taken:
            yield _columns_of(taken, places)
        raise
    if taken:
        yield _columns_of(taken, places)


def _columns_of(rows: list[list[str]], places: list[int]) -> Sequence[Cells]:
    columns = list(zip(*rows, strict=True))
    return [TextCells(columns[place]) for place in places]


def _rows_of(path: Path, notes: list[str] | None = None) -> Iterator[tuple[int, list[str], int]]:
    """Return the header and the rows of a file: the line on which each begins, its cells, and about its bytes.

    Empty lines are left out. Of one column they are rows of an empty cell, as other programs write nulls, but for those
    at the end.
    """
    with open_text(path) as (lines, tell):
        reader = _csv.reader(lines, delimiter=_delimiter_of(path), strict=True)
        line, blank, start, end = 1, 0, 0, 0
        try:
            header = _named(next(reader, []), path)
            yield line, header, 0
            line = reader.line_num + 1
            for number, row in enumerate(reader):
                if not row:
                    blank += 1
                elif len(row) != len(header):
                    advice = "Fix the row, or remove it"
                    if len(header) == 1:
                        advice = "Separate cells by commas, semicolons or tabs, in the header too"
                    raise FormatError(
                        f"{path}, line {line}: expected {len(header)} cells, as in the header, got {len(row)}. {advice}"
                    )
                else:
                    if blank and len(header) == 1:
                        yield from ((each, [""], 0) for each in range(line - blank, line))
                    yield line, row, end - start
                    blank, start = 0, end
                if number % 8 == 0:  # as it takes as long as reading a row
                    end = tell()
                line = reader.line_num + 1
        except _csv.Error as error:
            if "limit" in str(error):
                raise FormatError(
                    f"{path}, line {line}: expected cells of up to {_csv.field_size_limit()} characters, got a longer "
                    "one. Close its quotes if they are open, or save the table as Parquet"
                ) from None
            raise FormatError(
                f"{path}, line {line}: expected CSV, got a row that is none ({error!s:.100}). Fix its quotes, or "
                "save the table as Parquet"
            ) from None
        if blank and len(header) == 1 and notes is not None:
            notes.append(f"{path.name} has {blank} empty lines at its end, which are left out")


def _line_of(path: Path, row: int) -> int:
    """Return the line on which a row begins; the first one after the header is row 0."""
    for line, _, _ in islice(_rows_of(path), row + 1, None):
        return line
    raise _changed(path)


def _own_csv() -> Any:
    """Load the csv module of Python once more: its limit of a cell is the module's, and another's may be any."""
    spec = importlib.util.find_spec("_csv")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.field_size_limit(LONGEST_CELL)
    return module


_csv = _own_csv()


def _delimiter_of(path: Path) -> str:
    """Return the delimiter: a comma, semicolon or tab, whichever the header has; a tab for .tsv."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    with open_text(path) as (lines, _):
        outside = re.sub(r'"[^"]*(?:"|$)', "", next(lines, ""))
    found = [delimiter for delimiter in ",;\t" if delimiter in outside]
    if len(found) > 1:
        raise FormatError(
            f"{path}, line 1: expected names with one delimiter between them, got two or more of comma, semicolon and "
            "tab. Quote the names that have one"
        )
    return found[0] if found else ","


def _named(header: list[str], path: Path) -> list[str]:
    """Return the names of a header, in which pandas has none for an index without one. Refuse what is no header."""
    levels = next((place for place, name in enumerate(header) if name), len(header))
    names = header[levels:]
    is_of_pandas = levels > 0 and names == list(map(str, range(len(names))))
    if not names or (all(map(NUMBER_CELL.fullmatch, names)) and not is_of_pandas):
        got = "numbers" if names else "none"
        raise FormatError(
            f"{path}, line 1: expected a header with the names of the columns, got {got}. Put one above the rows"
        )
    if levels == 1 and "index" not in names:
        return ["index", *names]
    return [f"level_{level}" for level in range(levels)] + names  # as its reset_index() says


def _changed(path: Path) -> FormatError:
    return FormatError(f"{path}: expected a file that stays as it is, got one that changed. Try again")


def _what_was(column: Column | None) -> int:
    """Return what the cells of a stored column were."""
    if column is None or (column.shape is None and column.type != "text"):
        return 0
    return TEXT if column.type == "text" else {"I64": INTEGER, "F64": NUMBER}.get(column.dtype, 0)
