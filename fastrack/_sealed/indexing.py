"""Which chunks hold the rows that were asked for, and where their bytes go: index arithmetic, nothing else."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastrack._crypto.base import GatherPlan
from fastrack._util.pickles import unpickle

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of a message's plaintext and their places in a result.

    starts, sizes, places : int64 (n,); range `i` has `sizes[i]` bytes from `starts[i]` on, and goes to `places[i]`
    """

    starts: Indices
    sizes: Indices
    places: Indices

    @classmethod
    def even(cls, starts: Indices, size: int) -> Ranges:
        """Ranges of one size, one after the other in the result."""
        count = starts.size
        return cls(starts, np.full(count, size, np.int64), np.arange(0, count * size, size) if size else starts)

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("Ranges", self.starts, self.sizes, self.places)

    def ranges(self) -> Ranges:
        """These."""
        return self

    def pieces(self) -> GatherPlan:
        """The gather: each chunk once, in ascending order."""
        from fastrack._crypto import gather as plans  # imports numba, a third of a second: when first used

        return GatherPlan(*plans.make_plan(self.starts, self.sizes, self.places))


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Rows of a tensor, as the first dimension's indices.

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

    def ranges(self) -> Ranges:
        """Which bytes they are."""
        rows = self.rows
        if not isinstance(rows, range):
            return Ranges.even(rows * self.row_bytes, self.row_bytes)
        if rows.step == 1:
            return Ranges.even(np.array([rows.start * self.row_bytes]), self.nbytes)
        return Ranges.even(np.arange(rows.start, rows.stop, rows.step) * self.row_bytes, self.row_bytes)

    def pieces(self) -> GatherPlan:
        """The gather of their bytes."""
        return self.ranges().pieces()


def plan_rows(rows: Any, shape: tuple[int, ...], nbytes: int) -> RowPlan:
    """Resolve an index along the first dimension, as NumPy would.

    Raises
    ------
    IndexError
        If a row is out of range, or a mask is of another length.
    TypeError
        If it is no integer, slice, one-dimensional integer array or boolean mask.
    """
    if not shape:
        raise IndexError("a tensor without dimensions has no rows")
    count = shape[0]
    row_bytes, rest = divmod(nbytes, count) if count else (0, 0)
    if rest:
        raise TypeError("the rows of this tensor do not fill whole bytes; open it whole")
    if type(rows) is int:
        return _one_row(rows, shape, row_bytes)
    if isinstance(rows, slice):
        chosen = range(*rows.indices(count))
        return RowPlan((len(chosen), *shape[1:]), row_bytes, chosen)
    if hasattr(rows, "__array__"):
        # torch takes any tensor of one element for an integer, and NumPy only what has no dimensions.
        rows = np.asarray(rows)
    if not isinstance(rows, bool):
        try:
            row = operator.index(rows)
        except TypeError:
            pass
        else:
            return _one_row(row, shape, row_bytes)
    indices = as_indices(rows, count)
    return RowPlan((indices.size, *shape[1:]), row_bytes, indices)


def _one_row(row: int, shape: tuple[int, ...], row_bytes: int) -> RowPlan:
    count = shape[0]
    if not -count <= row < count:
        raise IndexError(f"row {row} is out of range: the tensor has {count} rows")
    return RowPlan(shape[1:], row_bytes, range(row % count, row % count + 1))


def as_indices(rows: Any, count: int) -> Indices:
    """A vector of integers or a mask, as the numbers of rows, from 0 on. Raises as `plan_rows` does."""
    array = np.asarray(rows)
    if array.size == 0 and not isinstance(rows, np.ndarray):
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub" or isinstance(rows, tuple):
        raise TypeError(
            "rows are chosen along the first dimension, by an integer, a slice, a vector of integers or a boolean "
            f"mask; not by {rows!r:.80}"
        )
    if array.dtype.kind == "b":
        if array.size != count:
            raise IndexError(f"a mask of {array.size} does not fit {count} rows")
        return np.flatnonzero(array)
    if array.dtype.kind == "u" and array.size and int(array.max()) >= count:
        raise IndexError(f"row {int(array.max())} is out of range: the tensor has {count} rows")
    indices = array.astype(np.int64)
    if not indices.size:
        return indices
    lowest, highest = int(indices.min()), int(indices.max())
    if lowest < -count or highest >= count:
        wrong = indices[(indices < -count) | (indices >= count)]
        raise IndexError(f"row {wrong[0]} is out of range: the tensor has {count} rows")
    return indices if lowest >= 0 else np.where(indices < 0, indices + count, indices)
