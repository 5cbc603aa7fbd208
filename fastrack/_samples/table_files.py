"""Write columns of samples into files of tables and of text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from fastrack._samples import arrow_types
from fastrack._samples.blocks import Block, Column
from fastrack._samples.csv.cell_types import LONGEST_CELL
from fastrack._samples.text_lines import MARKS
from fastrack._tensors import arrays, dtypes
from fastrack.errors import FormatError

_ROWS = 4096  # of a batch, which limits the memory for objects of Python


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a column in several samples, and which of them are no nulls; None if all are."""

    block: Block
    valid: Block | None

    @property
    def mask(self) -> Any:
        """One value a sample, False for a null; None if there is none."""
        return None if self.valid is None else self.valid.data.view(np.bool_)

    def between(self, start: int, stop: int) -> Values:
        """Return the values of some samples."""
        return Values(self.block.part(start, stop), None if self.valid is None else self.valid.part(start, stop))


Batches = Iterable[dict[str, Values]]


def records_of(block: Block) -> Iterator[bytes]:
    """Return the bytes of each record."""
    return (block.between(index, index + 1).tobytes() for index in range(block.count))


def _pieces(batches: Batches) -> Iterator[tuple[int, dict[str, Values]]]:
    """Return batches of few samples, each with the number of its first sample."""
    first = 0
    for batch in batches:
        count = next(iter(batch.values())).block.count
        for start in range(0, count, _ROWS):
            stop = min(start + _ROWS, count)
            yield first + start, {name: values.between(start, stop) for name, values in batch.items()}
        first += count


# Text.


def _write_lines(file: Any, columns: dict[str, Column], batches: Batches) -> None:
    [(name, column), *others] = columns.items()
    if others or column.shape is not None or column.dtype != "U8":
        got = f"{len(columns)} columns" if others else f"{column}"
        raise FormatError(
            f"exporting lines: expected one column of text, got {got}. Choose one (columns=, --columns), or a target "
            "that ends with .jsonl or .parquet"
        )

    def odd(index: int, expected: str, got: str) -> FormatError:
        advice = "Choose a target that ends with .jsonl or .parquet"
        return FormatError(f"sample {index}: {name!r:.80}: expected {expected}, got {got}. {advice}")

    first = 0
    for batch in batches:
        lines, mask = list(records_of(batch[name].block)), batch[name].mask
        if mask is not None and not mask.all():
            raise odd(first + int(mask.argmin()), "a text", "a null, which a line cannot tell")
        if not first and lines and lines[0].startswith(MARKS):
            raise odd(0, "a text", "a byte-order mark before it, which a file of text has for itself")
        for index, line in enumerate(lines, first):
            if b"\n" in line or line.endswith(b"\r"):
                raise odd(index, "a text of one line", "an end of a line in it")
        file.write(b"".join(line + b"\n" for line in lines))
        first += len(lines)


def _write_csv(file: Any, columns: dict[str, Column], batches: Batches, delimiter: str = ",") -> None:
    for name, column in columns.items():
        if not (column.shape == () or (column.shape is None and column.dtype == "U8") or _is_arrow(column)):
            raise FormatError(
                f"column {name!r:.80}: expected numbers or text for a cell, got {column}. Choose a target that ends "
                "with .jsonl or .parquet, or leave the column out (columns=, --columns)"
            )
    end, rows = "\r\n", list[str]()  # with this end a cell with either of its characters is quoted, on any Python
    make = partial(csv.writer, SimpleNamespace(write=rows.append), delimiter=delimiter, lineterminator=end)
    # In a header a mark or another delimiter outside of quotes would have its meaning.
    has_marks = any(name.startswith("\ufeff") or set(name) & set(";\t") for name in columns)
    make(quoting=csv.QUOTE_ALL if has_marks else csv.QUOTE_MINIMAL).writerow(columns)
    writer = make()
    for first, piece in _pieces(batches):
        cells = [_cells(name, columns[name], values, first) for name, values in piece.items()]
        writer.writerows(zip(*cells, strict=True))
        file.write("".join(row.removesuffix(end) + "\n" for row in rows).encode())
        rows.clear()


def _cells(name: str, column: Column, values: Values, first: int) -> list[str]:
    """Return values as the text of cells; a null is empty."""
    if column.shape is None and column.dtype == "U8":
        cells = _texts(name, values.block, first)
        for index, cell in enumerate(cells, first):
            if "\0" in cell or len(cell) > LONGEST_CELL:
                got = "a NUL" if "\0" in cell else f"more than {LONGEST_CELL} characters"
                raise FormatError(f"sample {index}: {name!r:.80}: expected text for a cell, got {got}. {_OTHER}")
    elif _is_arrow(column):
        cells = [cell or "" for cell in _texts_of_arrow(name, values)]
    else:
        array = _array(name, column, values.block)
        shortest = map(str, array) if column.dtype in {"F16", "F32"} else map(repr, array.tolist())
        cells = [str(cell).lower() for cell in array.tolist()] if column.dtype == "BOOL" else list(shortest)
    mask = values.mask
    return cells if mask is None else [cell if valid else "" for cell, valid in zip(cells, mask, strict=True)]


def _write_objects(file: Any, columns: dict[str, Column], batches: Batches) -> None:
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    for first, piece in _pieces(batches):
        members = [_members(name, columns[name], values, first) for name, values in piece.items()]
        for index, row in enumerate(zip(*members, strict=True), first):
            try:
                line = encode(dict(zip(columns, row, strict=True)))
            except ValueError:
                raise FormatError(
                    f"sample {index}: expected numbers that JSON has, got an infinity or no number. Choose a target "
                    "that ends with .csv or .parquet"
                ) from None
            file.write(f"{line}\n".encode())


def _members(name: str, column: Column, values: Values, first: int) -> list[Any]:
    """Return values as JSON has them; text for those that it lacks."""
    members: list[Any]
    mask = values.mask
    if column.shape is None and column.dtype == "U8" and not _is_list(column):
        members = list(_texts(name, values.block, first))
        if column.type == "json" or (_is_arrow(column) and arrow_types.kind_of(column)[1]):
            valid = [True] * len(members) if mask is None else mask
            try:
                members = [json.loads(text) if there else None for text, there in zip(members, valid, strict=True)]
            except (ValueError, RecursionError):
                raise FormatError(f"column {name!r:.80}: expected JSON, got other text. {_OTHER}") from None
    elif _is_arrow(column) and not _is_list(column):
        members = _texts_of_arrow(name, values)
    else:
        members = _array_or_lists(name, column, values.block)
    return members if mask is None else [m if valid else None for m, valid in zip(members, mask, strict=True)]


def _array_or_lists(name: str, column: Column, block: Block) -> list[Any]:
    if column.shape is not None:
        return list(_array(name, column, block).tolist())
    flat = _array(name, Column(column.dtype, ()), block)
    assert block.ends is not None
    width = dtypes.nbytes(column.dtype, ())
    starts = (block.ends // width).tolist()
    return [flat[start:stop].tolist() for start, stop in pairwise(starts)]


def _texts(name: str, block: Block, first: int) -> list[str]:
    texts = []
    for index, record in enumerate(records_of(block), first):
        try:
            texts.append(record.decode())
        except UnicodeDecodeError:
            raise FormatError(
                f"sample {index}: {name!r:.80}: expected text in UTF-8, got other bytes. {_OTHER}"
            ) from None
    return texts


_EPOCH = date(1970, 1, 1).toordinal()
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_OTHER = "Choose a target that ends with .parquet, or leave the column out (columns=, --columns)"


def _texts_of_arrow(name: str, values: Values) -> list[str | None]:
    """Return values of one of Arrow's types, such as dates, as Arrow writes them."""
    pa = arrow_types.pyarrow()
    array = arrow_types.to_arrow(name, values.block, values.mask)
    _require_years(name, values.block)
    try:
        return list(array.cast(pa.string()).to_pylist())
    except pa.ArrowException:
        raise FormatError(f"column {name!r:.80}: expected values that have a text, got others. {_OTHER}") from None


def _require_years(name: str, block: Block) -> None:
    """Refuse dates and times of years outside of 1 to 9999, which Arrow writes as others."""
    types, kind = arrow_types.pyarrow().types, arrow_types.plain_kind(arrow_types.kind_of(block.column)[0])
    is_time = types.is_timestamp(kind)
    if not (is_time or types.is_date(kind)) or not block.count:
        return
    day = 86_400 * _PER_SECOND[kind.unit] if is_time else 86_400_000 if types.is_date64(kind) else 1
    first, stop = (date.min.toordinal() - _EPOCH) * day, (date.max.toordinal() - _EPOCH + 1) * day
    margin = day if is_time and kind.tz else 0  # of zones of time
    array = _array(name, block.column, block)
    if int(array.min()) < first + margin or int(array.max()) >= stop - margin:
        raise FormatError(f"column {name!r:.80}: expected years from 1 to 9999, got others. {_OTHER}")


def _array(name: str, column: Column, block: Block) -> Any:
    if column.dtype not in dtypes.NUMPY or column.dtype == "C64":
        raise FormatError(f"column {name!r:.80}: expected numbers that have a text, got {column}. {_OTHER}")
    return arrays.from_bytes(block.data, column.dtype, (-1, *(column.shape or ())), "numpy")


def _is_arrow(column: Column) -> bool:
    """Return whether values have a type of Arrow, other than one of numbers, which its categories may be."""
    if not column.type.startswith(arrow_types.ARROW):
        return False
    types, kind = arrow_types.pyarrow().types, arrow_types.plain_kind(arrow_types.kind_of(column)[0])
    is_number = (types.is_boolean, types.is_integer, types.is_floating, types.is_duration)
    return not any(is_one(kind) for is_one in is_number)


def _is_list(column: Column) -> bool:
    """Return whether records or rows are numbers of Arrow's lists."""
    if not _is_arrow(column):
        return False
    kind, as_json = arrow_types.kind_of(column)
    return not as_json and bool(arrow_types.pyarrow().types.is_nested(kind))


# Tables of Arrow.


def _write_parquet(file: Any, columns: dict[str, Column], batches: Batches) -> None:
    arrow_types.pyarrow()
    from pyarrow import parquet

    _write_table(file, columns, batches, parquet.ParquetWriter, "a target that ends with .arrow")


def _write_arrow(file: Any, columns: dict[str, Column], batches: Batches) -> None:
    pa = arrow_types.pyarrow()
    _write_table(file, columns, batches, pa.ipc.new_file, "a target that ends with .parquet")


def _write_table(
    file: Any, columns: dict[str, Column], batches: Batches, make: Callable[[Any, Any], Any], other: str
) -> None:
    pa = arrow_types.pyarrow()
    stream, table = _Stream(file), None
    writer: Any = None
    try:
        for batch in batches:
            parts = [
                pa.RecordBatch.from_arrays(
                    [arrow_types.to_arrow(name, values.block, values.mask) for name, values in piece.items()],
                    names=list(columns),
                )
                for _, piece in _pieces([batch])
            ]
            table = pa.Table.from_batches(parts)
            if writer is None:
                writer = make(pa.PythonFile(stream, mode="w"), table.schema)
            writer.write_table(table)
        writer.close()
    except BaseException as error:
        with suppress(Exception):  # the end that it writes is thrown away
            writer.close()
        if not isinstance(error, (pa.ArrowException, OSError)) or getattr(error, "errno", None) is not None:
            raise
        # In the place of PyArrow's errors, whose text may have values.
        raise FormatError(
            f"exporting a table: {_unfit(table, make)}: expected types and values that the format has, got others. "
            f"Choose {other}, or leave the column out (columns=, --columns)"
        ) from None


def _unfit(table: Any, make: Callable[[Any, Any], Any]) -> str:
    """Return which column of a table cannot be written by itself."""
    pa = arrow_types.pyarrow()
    for name in [] if table is None else table.column_names:
        alone = table.select([name])
        try:
            with make(pa.BufferOutputStream(), alone.schema) as writer:
                writer.write_table(alone)
        except (pa.ArrowException, OSError):
            return f"column {name!r:.80}"
    return "a column"


class _Stream(io.RawIOBase):
    """A new file, as PyArrow writes to it."""

    def __init__(self, file: Any) -> None:
        self._file, self._size = file, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        self._size += len(memoryview(data))
        return int(self._file.write(data))


FORMS: dict[str, Callable[[Any, dict[str, Column], Batches], None]] = {
    ".parquet": _write_parquet,
    ".arrow": _write_arrow,
    ".feather": _write_arrow,
    ".csv": _write_csv,
    ".tsv": lambda file, columns, batches: _write_csv(file, columns, batches, "\t"),
    ".jsonl": _write_objects,
    ".txt": _write_lines,
}
"""Functions that write columns into a new file, by the suffix of its name."""
