"""CSV and TSV: columns of numbers and text, by what all of their cells are."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fastrack._samples.blocks import Block, Column, source_columns
from fastrack._samples.csv.cells import (
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

Rows = list[list[str]]

_ROWS = 4096  # of a batch, at most
_STEP = 64  # rows that are read at once, at most
_SIZE = 4 << 20  # bytes of a batch, but for its last step
_KEPT = 64 << 20  # bytes of cells that are kept from the first pass to the second
_NOTES = 100  # about columns, at most
_FIRST = 64  # rows that tell whether a column of text was to be one of numbers
_NUMBERS = INTEGER | NUMBER


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
    survey = _Survey(schema or Schema(), stored or {})
    for path in paths:
        with _open(path, chosen, survey.schema, list(survey.found), notes) as (names, batches):
            survey.begin(path, names)
            # By `map`, as rows that a variable refers to would keep their memory while the next ones are read.
            for _ in map(survey.add, batches):
                pass
    kinds = {name: survey.schema.types.get(name) or kind_of(column.what) for name, column in survey.found.items()}
    if notes is not None:
        texts = {name: column for name, column in survey.found.items() if kinds[name] == "text"}
        notes += _notes_of(texts, survey.schema.nulls)
    for path in paths:
        with survey.open_again(path, chosen) as batches:
            yield from map(partial(_blocks_of, survey, kinds, path), batches)


def _blocks_of(survey: _Survey, kinds: Mapping[str, str], path: Path, batch: Sequence[Cells]) -> dict[str, Block]:
    columns: dict[str, Block] = {}
    try:
        for (name, column), cells in zip(survey.found.items(), batch, strict=True):
            columns |= blocks_of(name, cells, kinds[name], column.what, survey.schema.nulls)
    except (LookupError, ValueError, OverflowError):  # their errors have the cells
        raise _changed(path) from None
    return columns


@dataclass(slots=True)
class _Found:
    """Findings about the cells of a column.

    what : flags of what they are
    earlier : those of the files before the one that is read
    first : the file and row of the first cell of a flag, and whether there are numbers before it
    """

    what: int
    earlier: int = 0
    first: dict[int, tuple[Path, int, bool]] = field(default_factory=dict)


class _Survey:
    """The first pass, which finds what the cells of columns are, in all files. Cells of few bytes are kept."""

    def __init__(self, schema: Schema, stored: Mapping[str, Column]) -> None:
        self.schema, self._stored = schema, stored
        self.found: dict[str, _Found] = {}
        self._kept: dict[Path, list[Sequence[Cells]]] = {}
        self._room = _KEPT

    def begin(self, path: Path, names: Iterable[str]) -> None:
        """Begin a file of these columns."""
        self.found = self.found or {name: _Found(_what_was(self._stored.get(name))) for name in names}
        for column in self.found.values():
            column.earlier = column.what
        self._path, self._row, self._kept[path] = path, 0, []

    def add(self, batch: Sequence[Cells]) -> None:
        """Add the next rows of the file. Raise FormatError if the type of a column does not take a cell."""
        for (name, column), cells in zip(self.found.items(), batch, strict=True):
            self._judge(name, column, cells)
        self._row += len(batch[0].cells)
        for cells in batch:
            self._room -= cells.cells.nbytes if isinstance(cells, ArrowCells) else _KEPT  # as texts of Python
        if self._room >= 0:
            self._kept[self._path].append(batch)
        else:
            self._kept.pop(self._path, None)

    @contextmanager
    def open_again(self, path: Path, chosen: Sequence[str] | None) -> Iterator[Iterator[Sequence[Cells]]]:
        """Return the batches of a file, for the second pass."""
        if path in self._kept:
            yield iter(self._kept.pop(path))
            return
        with _open(path, chosen, self.schema) as (_, batches):
            yield batches

    def _judge(self, name: str, found: _Found, cells: Cells) -> None:
        before, kind, valid = found.what, self.schema.types.get(name), None
        if self.schema.nulls:
            cells, valid = cells.without(self.schema.nulls)
        if kind:
            what = judge_typed(cells, kind)
            if what & TEXT:
                index, cell = next((index, cell) for index, cell in enumerate(cells.texts()) if not fits(cell, kind))
                advice = POINTS if has_comma(cell) else "Name it in nulls= if it is a null, or give another type"
                raise FormatError(
                    f"{self._path}, line {_line_of(self._path, self._row + index)}: column {name!r:.80}: expected "
                    f"{EXPECTED[kind]}, as types= says, got another cell. {advice}"
                )
        else:
            what = TEXT if before & TEXT else cells.judge()
        found.what |= what | (NULL if valid is not None else 0)
        for flag in (TEXT, LONG) if not kind else ():
            if what & flag and not before & flag:
                texts = cells.texts()
                index = next(index for index, cell in enumerate(texts) if judge_cell(cell) & flag)
                row = self._row + index
                # By the place in the file, as batches differ with PyArrow.
                has_numbers = bool((before if row >= _FIRST else found.earlier) & _NUMBERS)
                if row >= _FIRST and not has_numbers:
                    has_numbers = any(judge_cell(cell) & _NUMBERS for cell in texts[:index])
                found.first[flag] = self._path, row, has_numbers


@contextmanager
def _open(
    path: Path,
    chosen: Sequence[str] | None,
    schema: Schema,
    expected: Sequence[str] = (),
    notes: list[str] | None = None,
) -> Iterator[tuple[list[str], Iterator[Sequence[Cells]]]]:
    """Open a file. Return the names of the columns to take, as expected, and their cells in batches."""
    with _open_rows(path) as (reader, tell, delimiter):
        try:
            header = _named(next(reader, []), path)
        except _csv.Error:
            raise _fault_of(path) from None
        given = set(header)
        if len(header) == 1 and "|" in header[0] and notes is not None:
            notes.append(f"{path.name} has one column, as its header has no commas, semicolons or tabs")
        if expected and (list(expected) != header if chosen is None else not given.issuperset(expected)):
            raise FormatError(  # without what is in their place: in a file without a header it would be values
                f"{path}, line 1: expected the columns {list(expected)!s:.200} of the first file, got others. Give all "
                "files the same header"
            )
        names = source_columns(header, chosen, f"{path}, line 1")
        for name in schema.types:
            if name not in given:
                raise FormatError(
                    f"{path}, line 1: types=: the source has no column {shown(name, 80)}; {list_names(name, header)}"
                )
        place_of = {name: place for place, name in enumerate(header)}
        places = [place_of[name] for name in names]
        yield names, _cells_of(path, reader, tell, delimiter, len(header), places, notes)


def _cells_of(
    path: Path,
    reader: Any,
    tell: Callable[[], int],
    delimiter: str,
    width: int,
    places: list[int],
    notes: list[str] | None,
) -> Iterator[Sequence[Cells]]:
    """Return the cells of columns in batches, by PyArrow up to where the csv module may read another table."""
    count = 0
    try:
        for cells in read_columns(path, delimiter, width, places):
            yield cells
            count += len(cells[0].cells)
    except Unsure:
        yield from map(partial(_columns_of, places), _batches_of(reader, tell, width, path, count, notes))


def _columns_of(places: list[int], rows: Rows) -> Sequence[Cells]:
    columns = list(zip(*rows, strict=True))
    return [TextCells(columns[place]) for place in places]


@contextmanager
def _open_rows(path: Path) -> Iterator[tuple[Any, Callable[[], int], str]]:
    """Open a file. Return its rows, a function that tells how many bytes were read so far, and the delimiter."""
    with open_text(path) as (lines, tell):
        first = list(islice(lines, 1))
        delimiter = _delimiter_of("".join(first), path)
        yield _csv.reader(chain(first, lines), delimiter=delimiter, strict=True), tell, delimiter


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


def _batches_of(
    reader: Any, tell: Callable[[], int], width: int, path: Path, skipped: int, notes: list[str] | None
) -> Iterator[Rows]:
    """Return batches of rows after the first ones, each of as many cells as the header.

    Empty lines are left out. Of one column they are rows of an empty cell, as other programs write nulls, but for those
    at the end.
    """
    blank, step = 0, _STEP
    rows = iter(reader) if width == 1 else filter(None, reader)
    try:
        next(islice(rows, skipped, skipped), None)
        while True:
            batch, start = Rows(), tell()
            while len(batch) < _ROWS and tell() - start < _SIZE:
                before = tell()
                batch += (some := list(islice(rows, step)))
                if not some:
                    break
                step = max(1, min(_STEP, step * _SIZE // max(tell() - before, 1)))
            if not batch:
                if blank and notes is not None:
                    notes.append(f"{path.name} has {blank} empty lines at its end, which are left out")
                return
            at_end = next((count for count, row in enumerate(reversed(batch)) if row), len(batch))
            if at_end < len(batch):
                for first in range(0, blank, _ROWS):
                    yield [[""]] * min(blank - first, _ROWS)
                blank = 0
                batch = [row or [""] for row in batch[: len(batch) - at_end]] if width == 1 else batch
                if set(map(len, batch)) != {width}:
                    raise _fault_of(path)
                yield batch
            blank += at_end
    except _csv.Error:
        raise _fault_of(path) from None


def _rows_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Return the header and the rows of a file, each with the line on which it begins: slower than in batches."""
    with _open_rows(path) as (reader, _, _):
        width = 0
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader, None)
            except _csv.Error as error:
                if "limit" in str(error):
                    raise FormatError(
                        f"{path}, line {line}: expected cells of up to {_csv.field_size_limit()} characters, got a "
                        "longer one. Close its quotes if they are open, or save the table as Parquet"
                    ) from None
                raise FormatError(
                    f"{path}, line {line}: expected CSV, got a row that is none ({error!s:.100}). Mend its quotes, or "
                    "save the table as Parquet"
                ) from None
            if row is None:
                return
            width = width or len(row)
            if row or width == 1:
                yield line, row or [""]


def _line_of(path: Path, row: int) -> int:
    """Return the line on which a row begins; the first one after the header is row 0."""
    for line, _ in islice(_rows_of(path), row + 1, None):
        return line
    raise _changed(path)


def _fault_of(path: Path) -> FormatError:
    """Return an error with the line on which the first row that cannot be taken begins."""
    width = 0
    try:
        for line, row in _rows_of(path):
            width = width or len(row)
            if len(row) != width:
                advice = "Mend the row, or remove it"
                if width == 1:
                    advice = "Separate cells by commas, semicolons or tabs, in the header too"
                return FormatError(
                    f"{path}, line {line}: expected {width} cells, as in the header, got {len(row)}. {advice}"
                )
    except FormatError as error:
        return error
    return _changed(path)


def _changed(path: Path) -> FormatError:
    return FormatError(f"{path}: expected a file that stays as it is, got one that changed. Try again")


def _what_was(column: Column | None) -> int:
    """Return what the cells of a stored column were."""
    if column is None or (column.shape is None and column.type != "text"):
        return 0
    return TEXT if column.type == "text" else {"I64": INTEGER, "F64": NUMBER}.get(column.dtype, 0)


def _notes_of(found: Mapping[str, _Found], nulls: frozenset[str]) -> list[str]:
    """Return which columns of text would be numbers but for a cell, unless it is one of many that are none."""
    where: dict[Path, dict[str, tuple[int, bool]]] = {}
    for name, column in found.items():
        for path, row, has_numbers in islice((column.first[flag] for flag in (TEXT, LONG) if flag in column.first), 1):
            where.setdefault(path, {})[name] = row, has_numbers
    notes = list[str]()
    for path, columns in where.items():
        rows = _rows_of(path)
        place_of = {name: place for place, name in enumerate(_named(next(rows)[1], path))}
        balance, told = Counter[str](), {}
        last = max(row for row, _ in columns.values())
        for row, (line, cells) in enumerate(islice(rows, max(last + 1, _FIRST))):
            for name, (at, _) in columns.items():
                cell = cells[place_of[name]]
                if row < _FIRST and cell and cell not in nulls:
                    balance[name] += 1 if is_like_number(cell) else -1
                if row == at:
                    told[name] = f"{name:.80} is text, as line {line} of {path.name} {reason_of(cell)}"
        notes += [told[name] for name, (_, has) in columns.items() if name in told and (has or balance[name] > 0)]
    return notes[:_NOTES] + ([f"{len(notes) - _NOTES} more columns are text"] if len(notes) > _NOTES else [])
