"""Which chunks hold the rows that were asked for, and where their bytes go: index arithmetic, nothing else."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastrack.aead import Pieces
from fastrack.cobblestone import CHUNK

__all__ = ["RowPlan", "plan_rows"]

Indices = npt.NDArray[np.int64]


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

    def pieces(self) -> Pieces:
        """The gather: each chunk once, in ascending order."""
        starts, lengths = self._stretches()
        targets = np.cumsum(lengths) - lengths
        return _cut_at_chunks(starts, lengths, targets)

    def _stretches(self) -> tuple[Indices, Indices]:
        """Byte ranges of the plaintext in the order of the result; neighbouring rows are one range."""
        if not self.nbytes:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if isinstance(self.rows, range) and self.rows.step == 1:
            return np.array([self.rows.start * self.row_bytes]), np.array([self.nbytes])
        rows = self.rows
        if isinstance(rows, range):
            rows = np.arange(rows.start, rows.stop, rows.step)
        heads = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
        counts = np.diff(heads, append=rows.size)
        return rows[heads] * self.row_bytes, counts * self.row_bytes


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
            if not -count <= row < count:
                raise IndexError(f"row {row} is out of range: the tensor has {count} rows")
            return RowPlan(shape[1:], row_bytes, range(row % count, row % count + 1))
    indices = _as_indices(rows, count)
    return RowPlan((indices.size, *shape[1:]), row_bytes, indices)


def _as_indices(rows: Any, count: int) -> Indices:
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
    indices = array.astype(np.int64)
    wrong = indices[(indices < -count) | (indices >= count)]
    if wrong.size:
        raise IndexError(f"row {wrong[0]} is out of range: the tensor has {count} rows")
    return np.where(indices < 0, indices + count, indices)


def _cut_at_chunks(starts: Indices, lengths: Indices, targets: Indices) -> Pieces:
    first = starts // CHUNK
    counts = (starts + lengths - 1) // CHUNK - first + 1
    which = np.repeat(np.arange(starts.size), counts)
    within = np.arange(which.size) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers = first[which] + within
    begin = np.maximum(starts[which], numbers * CHUNK)
    end = np.minimum((starts + lengths)[which], (numbers + 1) * CHUNK)
    order = np.argsort(numbers, kind="stable")
    table = np.stack([begin - numbers * CHUNK, targets[which] + begin - starts[which], end - begin], axis=1)[order]
    chunks, heads = np.unique(numbers[order], return_index=True)
    return Pieces(
        chunks.astype(np.int64),
        np.append(heads, which.size).astype(np.int64),
        np.ascontiguousarray(table, dtype=np.int64),
    )
