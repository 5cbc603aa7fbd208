"""Layouts: the bytes of sealed files that the samples of a data set are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from fastrack._crypto.gather import ByteRanges, EvenRanges
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._sealed.contexts import MessageContext
from fastrack._sealed.headers import authenticate_remote, prefetch
from fastrack._sealed.indexing import Indices
from fastrack._sealed.seal import unseal
from fastrack._sealed.tensor import SealedTensor, TensorSlice
from fastrack._tensors import dtypes
from fastrack._training.shards import Shards
from fastrack._util.pickles import unpickle
from fastrack.errors import FormatError, UnknownKeyError


@dataclass(frozen=True, slots=True)
class EvenColumn:
    """Column of samples of one size: rows or windows of tensor `index`, `stride` bytes apart."""

    index: int
    dtype: str
    sample: tuple[int, ...]
    stride: int
    size: int

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("EvenColumn", self.index, self.dtype, self.sample, self.stride, self.size)


@dataclass(frozen=True, slots=True)
class EvenLayout:
    """Layout of samples of one shape at equal distances: rows, or windows.

    ends : int64, the number of samples in each file and those before it
    """

    shards: Shards
    names: tuple[str, ...]
    columns: tuple[EvenColumn, ...]
    ends: Indices

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("EvenLayout", self.shards, self.names, self.columns, self.ends)

    def dtype(self, column: int) -> str:
        return self.columns[column].dtype

    def shape(self, column: int, rows: int | Indices) -> tuple[int, ...]:
        """Return the shape of one sample, or of several stacked ones."""
        sample = self.columns[column].sample
        return sample if isinstance(rows, int) else (*rows.shape, *sample)

    def shape_tensors(self, column: int) -> Sequence[SealedTensor]:
        """Return the tensors whose shapes determine how many samples of a column each file has."""
        spec = self.columns[column]
        return [self.shards.tensor(shard, spec.index) for shard in range(len(self.shards))]

    def slices(self, column: int, rows: int | Indices) -> Sequence[TensorSlice]:
        spec = self.columns[column]
        if self.ends.size == 1:  # nothing to look up
            flat = np.array([rows]) if isinstance(rows, int) else rows.reshape(-1)
            opened = self.shards.opened[0]
            tensor = self.shards.tensor(0, spec.index) if opened is None else opened[spec.index]
            return (TensorSlice(tensor, EvenRanges(flat, spec.stride, spec.size)),)
        return [
            TensorSlice(
                self.shards.tensor(shard, spec.index),
                EvenRanges(local, spec.stride, spec.size, order),
            )
            for shard, local, order in _by_shard(self.ends, rows)
        ]


@dataclass(slots=True)
class RecordLayout:
    """Layout of samples of any length, one after the other. The second column is their lengths.

    offsets : int64 for each file, the starts of its records and the end of the last one; None in other processes
    """

    shards: Shards
    names: tuple[str, ...]
    ends: Indices
    offsets: list[Indices] | None = field(repr=False)

    def dtype(self, column: int) -> str:
        return self.shards.contexts[0][0].dtype

    def shape(self, column: int, rows: int | Indices) -> tuple[int, ...]:
        lengths = self.lengths(rows)
        return (int(lengths[0]),) if isinstance(rows, int) else (*rows.shape, int(lengths.max(initial=0)))

    def shape_tensors(self, column: int) -> Sequence[SealedTensor]:
        return ()  # the offsets were unsealed

    def slices(self, column: int, rows: int | Indices) -> Sequence[TensorSlice]:
        width = dtypes.nbytes(self.dtype(column), (1,))
        pitch = self.shape(column, rows)[-1] * width
        return [
            TensorSlice(
                self.shards.tensor(shard, 0),
                partial(
                    ByteRanges, offsets[local] * width, (offsets[local + 1] - offsets[local]) * width, order * pitch
                ),
            )
            for shard, local, order in _by_shard(self.ends, rows)
            for offsets in [self._offsets_of(shard)]
        ]

    def packed_slices(self, rows: Indices) -> Sequence[TensorSlice]:
        """Return the slices of these records, one after the other, without padding between them."""
        width = dtypes.nbytes(self.dtype(0), (1,))
        sizes = self.lengths(rows) * width
        places = np.cumsum(sizes) - sizes
        return [
            TensorSlice(
                self.shards.tensor(shard, 0),
                partial(ByteRanges, self._offsets_of(shard)[local] * width, sizes[order], places[order]),
            )
            for shard, local, order in _by_shard(self.ends, rows)
        ]

    def open_offsets(self, keys: KeySource | None) -> None:
        """Unseal the offsets in a process that lacks them."""
        if self.offsets is None:
            self.offsets = record_layout(self.shards, keys).offsets

    def lengths(self, rows: int | Indices) -> Indices:
        """Return the number of elements of each of these records."""
        lengths = np.zeros(1 if isinstance(rows, int) else rows.size, np.int64)
        for shard, local, order in _by_shard(self.ends, rows):
            offsets = self._offsets_of(shard)
            lengths[order] = offsets[local + 1] - offsets[local]
        return lengths if isinstance(rows, int) else lengths.reshape(rows.shape)

    def _offsets_of(self, shard: int) -> Indices:
        if self.offsets is None:
            raise TypeError("lengths of records are known only in the process that made the data set. Use them there")
        return self.offsets[shard]

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("RecordLayout", self.shards, self.names, self.ends, None)


Layout = EvenLayout | RecordLayout
"""Map from sample numbers, counted through all files, to bytes of sealed tensors."""


def row_layout(shards: Shards) -> EvenLayout:
    """Lay out samples that are the rows of tensors of equal length."""
    ends = np.zeros(len(shards), np.int64)
    for shard, contexts in enumerate(shards.contexts):
        most = Counter(context.shape[0] for context in contexts if context.shape).most_common(1)
        for context in contexts:
            if not context.shape or context.shape[0] != most[0][0]:
                raise ValueError(
                    f"{shards.paths[shard]}: expected columns that share their first dimension, got "
                    f"{context.name!r:.200} of shape {list(context.shape)}. Name the others in columns="
                )
        ends[shard] = most[0][0]
    columns = tuple(_column(index, context, (), 1) for index, context in enumerate(shards.contexts[0]))
    return EvenLayout(shards, shards.names, columns, np.cumsum(ends))


def window_layout(shards: Shards, names: tuple[str, ...], size: int, step: int) -> EvenLayout:
    """Lay out samples that are `size` neighbouring rows of the tensors, each `step` rows after the one before.

    names : those of the columns
    """
    if size < 1 or step < 1:
        raise ValueError(f"window: expected a size and a step of 1 or more, got {size} and {step}")
    rows = row_layout(shards)
    lengths = np.diff(rows.ends, prepend=0)
    ends = np.cumsum(np.maximum(0, (lengths - size) // step + 1), dtype=np.int64)
    windows = [_column(index, context, (size,), step) for index, context in enumerate(shards.contexts[0])]
    return EvenLayout(shards, names, tuple(windows), ends)


def record_layout(
    shards: Shards, keys: KeySource | None, names: tuple[str, str] = ("records", "lengths")
) -> RecordLayout:
    """Lay out samples that are records of the first tensor, at the offsets that the second one holds.

    names : those of the records and of their lengths in a sample
    """
    try:
        offsets, ring = [], KeyRing.resolve(keys)
    except UnknownKeyError as error:
        error.add_note("records are found by their offsets, which are opened when the data set is made: give it keys=")
        raise
    indices = [shards.tensor(shard, 1) for shard in range(len(shards))]
    if authenticate_remote(indices, ring):
        prefetch((index, None) for index in indices)
    for shard, (data, index) in enumerate(shards.contexts):
        label = f"{shards.paths[shard]}: {index.name!r:.200}"
        if index.dtype != "I64" or len(index.shape) != 1 or index.shape[0] < 1:
            raise FormatError(
                f"{label}: expected n + 1 offsets, I64 in one dimension, got {index.dtype} {list(index.shape)}"
            )
        if len(data.shape) != 1:
            raise FormatError(
                f"{shards.paths[shard]}: {data.name!r:.200}: expected records in one dimension, got shape "
                f"{list(data.shape)}"
            )
        opened = unseal(indices[shard], ring, framework="numpy")
        if opened[0] < 0 or opened[-1] > data.shape[0] or bool((opened[1:] < opened[:-1]).any()):
            raise FormatError(
                f"{label}: expected offsets that ascend, from 0 to at most the {data.shape[0]} elements of "
                f"{data.name!r:.200}, got others"
            )
        offsets.append(opened)
    ends = np.cumsum([opened.size - 1 for opened in offsets], dtype=np.int64)
    return RecordLayout(shards, names, ends, offsets)


def _column(index: int, context: MessageContext, window: tuple[int, ...], step: int) -> EvenColumn:
    """Return a column of rows, or of windows of rows, of whole bytes."""
    row, rest = divmod(dtypes.BITS[context.dtype] * math.prod(context.shape[1:]), 8)
    if rest:
        raise TypeError(f"{context.name!r:.200}: expected rows of whole bytes, got elements of less. Open it whole")
    return EvenColumn(index, context.dtype, (*window, *context.shape[1:]), step * row, math.prod(window) * row)


def _by_shard(ends: Indices, rows: int | Indices) -> list[tuple[int, Indices, Indices]]:
    """Return, for each file with some of the rows, its index, the rows counted in it, and their positions in `rows`."""
    flat = np.array([rows]) if isinstance(rows, int) else rows.reshape(-1)
    if ends.size == 1:
        return [(0, flat, np.arange(flat.size))]
    shards = np.searchsorted(ends, flat, side="right")
    order = np.argsort(shards, kind="stable")
    shards = shards[order]
    local = flat[order] - np.concatenate([[0], ends])[shards]
    bounds = [0, *(np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist(), flat.size]
    parts = [(local[first:stop], order[first:stop]) for first, stop in pairwise(bounds) if first < stop]
    return [(shard, *part) for shard, part in zip(np.unique(shards).tolist(), parts, strict=True)]
