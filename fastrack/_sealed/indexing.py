"""Index arithmetic: from rows of a tensor to byte ranges of its message."""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from fastrack._crypto.gather import EvenRanges
from fastrack._util.pickles import unpickle
from fastrack._util.shown import shown

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Rows of a tensor, as indices of its first dimension. It needs no memory for a range of rows.

    shape : the result's shape
    row_bytes : bytes of one row
    rows : a range, or int64 (n,) in the order of the result
    """

    shape: tuple[int, ...]
    row_bytes: int
    rows: range | Indices

    @property
    def nbytes(self) -> int:
        return len(self.rows) * self.row_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("RowPlan", self.shape, self.row_bytes, self.rows)

    def select(self, index: Any) -> RowSelection:
        """Resolve an index along the first dimension of the result, like `plan_rows`."""
        inner = plan_rows(index, self.shape, self.nbytes)
        outer = self.rows
        if len(outer) != self.shape[0]:  # select rows within a single row
            first = int(outer[0]) * self.shape[0]
            outer = range(first, first + self.shape[0])
        return RowSelection(inner.shape, inner.row_bytes, _compose(outer, inner.rows))

    def ranges(self) -> EvenRanges:
        """Return the byte ranges of the rows."""
        rows = self.rows
        if not isinstance(rows, range):
            return EvenRanges(rows, self.row_bytes, self.row_bytes)
        if rows.step == 1:
            return EvenRanges(np.array([rows.start]), self.row_bytes, self.nbytes)
        return EvenRanges(np.arange(rows.start, rows.stop, rows.step), self.row_bytes, self.row_bytes)


@dataclass(frozen=True, slots=True)
class Box:
    """Offsets and sizes of a box in a tensor of shape `whole`, of elements of `itemsize` bytes.

    shape : the result's shape: `sizes`, or a reshape of it
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    itemsize: int
    shape: tuple[int, ...]

    def ranges(self) -> EvenRanges:
        """Return the byte ranges of the box, each as long as the contiguous bytes of the tensor allow."""
        if 0 in self.sizes:
            return EvenRanges(np.empty(0, np.int64), 0, 0)
        inner = len(self.whole)  # dimensions from this on are one range
        while inner and self.sizes[inner - 1] == self.whole[inner - 1]:
            inner -= 1
        inner = max(inner - 1, 0)
        starts = np.zeros(1, np.int64)
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            stride = math.prod(self.whole[dimension + 1 :]) * self.itemsize
            indices = np.arange(offset, offset + size) if dimension < inner else np.array([offset])
            starts = (starts[:, None] + indices * stride).reshape(-1)
        return EvenRanges(starts, 1, math.prod(self.sizes[inner:]) * self.itemsize)

    def select(self, index: Any) -> NoReturn:
        """Refuse to select rows of a box."""
        raise TypeError("rows of a sealed tensor: expected a tensor or rows of it, got a box. Select both at once")


def _compose(outer: range | Indices, inner: range | Indices) -> range | Indices:
    """Return the elements of `outer` at indices `inner`."""
    if not isinstance(outer, range):
        return outer[np.arange(inner.start, inner.stop, inner.step) if isinstance(inner, range) else inner]
    if isinstance(inner, range):
        start, step = outer.start, outer.step
        return range(start + inner.start * step, start + inner.stop * step, step * inner.step)
    return outer.start + inner * outer.step


def plan_rows(rows: Any, shape: tuple[int, ...], nbytes: int) -> RowSelection:
    """Resolve an index along the first dimension, with NumPy's semantics, IndexError and TypeError."""
    if not shape:
        raise IndexError("rows of a sealed tensor: expected one dimension or more, got none. Open it whole")
    count = shape[0]
    row_bytes, rest = divmod(nbytes, count) if count else (0, 0)
    if rest:
        raise TypeError("rows of a sealed tensor: expected rows of whole bytes, got elements of less. Open it whole")
    if type(rows) is int:
        return _one_row(rows, shape, row_bytes)
    if isinstance(rows, slice):
        chosen = range(*rows.indices(count))
        return RowSelection((len(chosen), *shape[1:]), row_bytes, chosen)
    if hasattr(rows, "__array__"):
        # torch takes any tensor of one element for an integer, NumPy only an array without dimensions.
        rows = np.asarray(rows)
    if not isinstance(rows, bool):
        with suppress(TypeError):
            return _one_row(operator.index(rows), shape, row_bytes)
    indices = as_indices(rows, count)
    return RowSelection((indices.size, *shape[1:]), row_bytes, indices)


def _one_row(row: int, shape: tuple[int, ...], row_bytes: int) -> RowSelection:
    count = shape[0]
    if not -count <= row < count:
        raise IndexError(f"row {row} is out of range: the tensor has {count} rows")
    return RowSelection(shape[1:], row_bytes, range(row % count, row % count + 1))


def as_indices(rows: Any, count: int) -> Indices:
    """Return a vector of integers, or a mask, as row numbers from 0 on. Errors as for `plan_rows`."""
    array = np.asarray(rows)
    if array.size == 0 and not isinstance(rows, np.ndarray):
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub" or isinstance(rows, tuple):
        raise TypeError(
            "index of the first dimension: expected an integer, a slice, a vector of integers or a boolean mask, got "
            f"{shown(rows)}"
        )
    if array.dtype == np.int64 and (not array.size or highest_unsigned(array) < count):
        return array if type(rows) is list else array.copy()
    if array.dtype.kind == "b":
        if array.size != count:
            raise IndexError(f"boolean mask: expected {count} elements, one for each row, got {array.size}")
        return np.flatnonzero(array)
    if not array.size:
        return array.astype(np.int64)
    lowest, highest = int(array.min()), int(array.max())
    if lowest < -count or highest >= count:
        wrong = array[(array < -count) | (array >= count)]
        raise IndexError(f"row {wrong[0]} is out of range: the tensor has {count} rows")
    indices = array.astype(np.int64)
    return indices if lowest >= 0 else np.where(indices < 0, indices + count, indices)


def highest_unsigned(array: Indices) -> int:
    """Return the highest row number, taken as unsigned: any negative number is higher than all others."""
    return int(np.maximum.reduce(array.view(np.uint64), axis=None))
