"""Columns of samples, and the bytes of their values, for `DatasetWriter`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastrack._sealed.contexts import MessageContext
from fastrack._sealed.file_header import ABOUT
from fastrack._sealed.indexing import Indices
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes
from fastrack._util.locations import Location
from fastrack._util.shown import list_names, shown
from fastrack.errors import FormatError

RECORDS = ".records"
"""Ending of the name of the tensor that holds the records of a column. It is authenticated, as all names are."""
OFFSETS = ".offsets"
"""Ending of the name of the tensor with their offsets."""
LENGTHS = ".lengths"
"""Ending of the name under which a sample has the length of its record."""
PATH, LABEL = "path", "label"
"""Names of the columns with the path of the file of a sample, and the number of its class."""
VALID = ".valid"
"""Ending of the name of the column (BOOL, one value a sample) that is False where its column has a null.

The null itself is NaN among floats, 0 or False among other numbers, and empty among records.
"""


@dataclass(frozen=True, slots=True)
class Column:
    """Dtype and shape of the values of a column; records, of one dimension and any length, have None for a shape.

    type : what the bytes mean, where dtype and shape do not tell: "text", or as `_samples.tables` says
    """

    dtype: str
    shape: tuple[int, ...] | None
    type: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"records of {self.dtype}" if self.shape is None else f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Block:
    """Values of a column in several samples, one after the other.

    ends : int64 (count + 1,), the start of each record in bytes, and the end of the last; None if there is a shape
    """

    column: Column
    data: Bytes
    count: int
    ends: Indices | None = None

    @classmethod
    def of(cls, values: Any, *, are_records: bool = False, empty: Column | None = None) -> Block:
        """Encode an array of values, or a sequence of values; `empty` is the column if there is none.

        Raise TypeError or ValueError if they cannot be stored, or are not all of one dtype and shape.
        """
        if not are_records and arrays.framework_of(values) is not None:
            dtype, shape = arrays.dtype_and_shape(values)
            if not shape:
                raise TypeError("expected an array of one dimension or more, got none")
            return cls(Column(dtype, shape[1:]), arrays.bytes_of(values), shape[0])
        if isinstance(values, (str, bytes, bytearray, memoryview, Mapping)) or not hasattr(values, "__len__"):
            raise TypeError(f"expected a sequence of values, got {type(values).__name__}")
        encoded = [encode(value, is_record=are_records) for value in values]
        columns = {column for column, _ in encoded} or {empty or Column("U8", None)}
        if len(columns) > 1:
            got = ", ".join(sorted(map(str, columns)))
            raise ValueError(f"expected one dtype and shape, got {got:.200}{advise(columns, '. ')}")
        column = columns.pop()
        if column.type and any(other.type != column.type for other, _ in encoded):
            column = Column(column.dtype, column.shape)  # bytes among texts
        parts = [part for _, part in encoded]
        data = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])
        if column.shape is not None:
            return cls(column, data, len(parts))
        return cls(column, data, len(parts), np.cumsum([0, *(part.size for part in parts)], dtype=np.int64))

    def sizes(self) -> Indices | int:
        """Return the bytes that each sample takes in a shard: an array, or a number if it is the same for all."""
        if self.ends is None:
            return dtypes.nbytes(self.column.dtype, self.column.shape or ())
        return np.diff(self.ends) + np.int64().itemsize

    def part(self, start: int, stop: int) -> Block:
        """Return some of the values."""
        ends = None if self.ends is None else self.ends[start : stop + 1] - self.ends[start]
        return Block(self.column, self.between(start, stop), stop - start, ends)

    def between(self, start: int, stop: int) -> Bytes:
        """Return the bytes of some values."""
        if self.ends is not None:
            return self.data[self.ends[start] : self.ends[stop]]
        size = dtypes.nbytes(self.column.dtype, self.column.shape or ())
        return self.data[start * size : stop * size]


def is_value(value: Any) -> bool:
    """Return whether `encode` may store a value, by its type."""
    types = (str, bytes, bytearray, memoryview, bool, int, float, np.generic)
    return isinstance(value, types) or arrays.framework_of(value) is not None


def encode(value: Any, *, is_record: bool = False) -> tuple[Column, Bytes]:
    """Return the column of a value, and its bytes; raise TypeError or ValueError if it cannot be stored."""
    meaning = "text" if isinstance(value, str) else ""
    if isinstance(value, str):
        require_unicode(value)
        value = value.encode()
    if isinstance(value, memoryview) and not value.c_contiguous:
        value = value.tobytes()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Column("U8", None, meaning), np.frombuffer(value, np.uint8)
    if isinstance(value, (bool, int, float)):
        try:
            kind = np.bool_ if isinstance(value, bool) else np.int64 if isinstance(value, int) else np.float64
            value = np.array(value, kind)
        except OverflowError:
            raise ValueError("expected an integer of 64 bits with a sign, got a longer one") from None
    elif isinstance(value, np.generic):
        value = np.asarray(value)
    if arrays.framework_of(value) is None:
        raise TypeError(
            f"expected bytes, text, a number or an array, got {type(value).__name__}. Make a list an array by "
            "numpy.asarray, or give import_samples a list of samples: with PyArrow it stores lists, nulls and dates"
        )
    dtype, shape = arrays.dtype_and_shape(value)
    if is_record and len(shape) != 1:
        raise ValueError(
            f"expected records of one dimension, got shape {list(shape)}. Leave the column out of records="
        )
    return Column(dtype, None if is_record else shape), arrays.bytes_of(value)


def advise(columns: Collection[Column], before: str = "") -> str:
    """Return what to do with arrays of one dtype that differ in shape; "" for other columns."""
    if len({column.dtype for column in columns}) > 1 or not all(column.shape for column in columns):
        return ""
    if {len(column.shape or ()) for column in columns} == {1}:
        return f"{before}Name a column of arrays that differ in length in records="
    return f"{before}Pad or crop them to one shape, or store them encoded as bytes, such as images as PNG"


def require_unicode(text: str, what: str = "", errors: str = "strict") -> None:
    """Raise ValueError for text that is not encoded as UTF-8, by an error handler of Python."""
    try:
        text.encode("utf-8", errors)
    except UnicodeEncodeError:
        raise ValueError(f"{what}expected Unicode text, got lone surrogates in it") from None


def require_names(columns: Iterable[str]) -> None:
    """Refuse names of columns that are no text, or that records may have for their tensors and lengths."""
    for name in columns:
        if not isinstance(name, str):
            raise TypeError(f"name of a column: expected text, got {shown(name)}")
        require_unicode(name, "name of a column: ")
        if name == ABOUT:
            raise ValueError(f"name of a column: expected another than {ABOUT}, which shards have for themselves")
        if name.endswith((RECORDS, OFFSETS, LENGTHS)):
            raise ValueError(
                f"name of a column: expected no {RECORDS}, {OFFSETS} or {LENGTHS} at its end, got {shown(name)}, as "
                "columns of records are stored under such names. Rename it"
            )


def source_columns(names: Iterable[str], chosen: Sequence[str] | None, where: object) -> list[str]:
    """Return the columns to take of a source that has columns of these names; raise FormatError if one cannot be.

    Names of columns that are left out may be any.
    """
    names = list(names)
    taken = None if chosen is None else set(chosen)
    numbered = [(number, name) for number, name in enumerate(names, 1) if taken is None or name in taken]
    for number, name in numbered:
        if not name:
            raise FormatError(f"{where}: expected a name for each column, got none for column {number}. Name it")
        try:
            require_unicode(name, f"{where}: name of column {number}: ")
        except ValueError as error:
            raise FormatError(f"{error}. Rename it") from None
        if name == ABOUT or name.endswith((RECORDS, OFFSETS, LENGTHS, VALID)):
            raise FormatError(
                f"{where}: column {name!r:.80}: expected a name other than {ABOUT} that does not end in {RECORDS}, "
                f"{OFFSETS}, {LENGTHS} or {VALID}, as fastrack has such columns of its own. Rename it"
            )
    numbers: dict[str, int] = {}
    for number, name in numbered:
        if numbers.setdefault(name, number) != number:  # in a file without a header the name would be a value
            raise FormatError(
                f"{where}: column {number}: expected a name of its own, got that of column {numbers[name]}. Rename one"
            )
    for name in chosen or ():
        if name not in numbers:
            raise FormatError(
                f"{where}: columns=: the source has no column {shown(name, 80)}; {list_names(name, names)}"
            )
    return names if chosen is None else list(chosen)


def columns_of(contexts: Sequence[MessageContext], path: Location) -> tuple[int, dict[str, Column]]:
    """Return the number of samples and the columns that sealed tensors hold; raise FormatError if these disagree."""
    named = {context.name: context for context in contexts if context.name != ABOUT}
    counts, columns = {}, {}
    for name, context in named.items():
        if name.endswith(OFFSETS):
            continue
        offsets = named.get(name.removesuffix(RECORDS) + OFFSETS) if name.endswith(RECORDS) else None
        if offsets is not None and len(context.shape) == len(offsets.shape) == 1 and offsets.dtype == "I64":
            columns[name.removesuffix(RECORDS)] = Column(context.dtype, None)
            counts[name] = offsets.shape[0] - 1
        elif context.shape:
            columns[name] = Column(context.dtype, context.shape[1:])
            counts[name] = context.shape[0]
        else:
            counts[name] = -1
    if len(set(counts.values())) != 1 or min(counts.values()) < 0:
        raise FormatError(f"{path}: expected columns of as many samples each, got {counts!s:.300}")
    return next(iter(counts.values())), columns
