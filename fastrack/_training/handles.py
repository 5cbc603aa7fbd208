"""Handles on the samples of a dataset, their transfer between processes, and the layout of samples in files.

A handle pickles as the id of its dataset, its column and its row numbers. Worker processes send numbers only: no key,
no ciphertext and no plaintext ever reaches a worker.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload
from weakref import WeakValueDictionary, ref

import numpy as np

from fastrack._crypto.gather import ByteRanges, EvenRanges
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._sealed.contexts import MessageContext
from fastrack._sealed.indexing import Indices, highest_unsigned
from fastrack._sealed.message_headers import authenticate_headers, authenticate_remote, prefetch
from fastrack._sealed.seal import unseal
from fastrack._sealed.tensor import MessageRanges, SealedRows, SealedTensor
from fastrack._tensors import arrays, dtypes
from fastrack._training.plain_columns import PlainColumns
from fastrack._training.shards import Row, Shards, by_shard
from fastrack._util.pickles import unpickle
from fastrack.errors import ClosedError, FormatError, UnknownKeyError

Packed = int | bytes | tuple[bytes, tuple[int, ...]]


class DatasetHandle:
    """Dataset that handles refer to, by reference in its process and by id in a pickle.

    dataset_id : 8 random bytes
    labels : for each column, the name, dtype and key id of its handles
    checked : the columns whose shapes `check_contexts` has authenticated
    has_records : True if samples have any length, so that stacked samples are padded
    """

    plain: PlainColumns | None = None  # only a `CombinedDataset` may have them
    _given: tuple[Callable[[], Any], int] = (lambda: None), 0  # the `SealedDataset` with the keys, and its process

    def __init__(self, layout: Layout, dataset_id: bytes | None = None) -> None:
        self.layout = layout
        self.count = int(layout.ends[-1])
        self.labels = [(name, layout.dtype(column), layout.shards.key_id) for column, name in enumerate(layout.names)]
        self.dataset_id = dataset_id or os.urandom(8)
        self._packed_dtype = "<u4" if self.count <= 1 << 32 else "<u8"
        self.checked: set[int] = set()
        self.has_records = isinstance(layout, RecordLayout)
        refs[self.dataset_id] = self

    def sample(self, rows: Row) -> dict[str, Any]:
        """Check the numbers of samples, and return handles on one sample, or on several stacked ones, by column."""
        self.require(rows)
        return self.handles(rows)

    def handles(self, rows: Row) -> dict[str, Any]:
        """Return `sample`'s result for checked rows."""
        names = self.layout.names
        if isinstance(self.layout, RecordLayout):
            return {names[0]: DatasetRows(self, 0, rows), names[1]: Lengths(self, rows).resolve()}
        return {name: DatasetRows(self, column, rows) for column, name in enumerate(names)}

    def check_contexts(self, column: int, keys: KeyRing) -> None:
        """Authenticate, once, the shapes that determine how many samples each file has.

        A file that claims to have no samples would otherwise never be opened, and its samples be missing.
        """
        if column not in self.checked:
            authenticate_headers(self.layout.shape_tensors(column), keys)
            self.checked.add(column)

    def keep_keys_of(self, data: Any) -> None:
        """Open handles with the keys of a `SealedDataset` where a call names none, while that dataset lives."""
        self._given = ref(data), os.getpid()

    @property
    def own_keys(self) -> KeyRing | None:
        # A forked child opens nothing unasked: a worker would send plaintext to its parent.
        data = self._given[0]() if self._given[1] == os.getpid() else None
        return None if data is None else data._keys  # noqa: SLF001 - of this package

    @property
    def names(self) -> tuple[str, ...]:
        return self.layout.names

    @property
    def parts(self) -> tuple[DatasetHandle, ...]:
        """Datasets whose columns are combined: only this dataset."""
        return (self,)

    def authenticate(self, keys: KeyRing) -> None:
        """Authenticate the shapes of all columns."""
        for column in range(len(self.layout.names)):
            self.check_contexts(column, keys)

    def require(self, rows: Row, column: int = 0) -> None:
        """Check the numbers of samples and of a column, which may come from a worker process."""
        if isinstance(rows, int):
            is_inside = 0 <= rows < self.count
        else:
            is_inside = not rows.size or highest_unsigned(rows) < self.count
        if not is_inside:
            wrong = rows if isinstance(rows, int) else rows[(rows < 0) | (rows >= self.count)][0]
            raise FormatError(
                f"sample {wrong} of a dataset of {self.count}: expected 0 to {self.count - 1}; the process that sent "
                "this number has another dataset, or was compromised"
            )
        if not 0 <= column < len(self.layout.names):
            raise FormatError(
                f"column {column}: expected 0 to {len(self.layout.names) - 1}, the columns of the dataset"
            )

    def pack(self, rows: Row) -> Packed:
        """Return the row numbers packed in few bytes."""
        if isinstance(rows, int):
            return rows
        packed = rows.astype(self._packed_dtype).tobytes()
        return packed if rows.ndim == 1 else (packed, rows.shape)

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("DatasetRef", self.dataset_id, self.layout)

    def unpack(self, packed: Packed) -> Row:
        """Return the row numbers that `pack` packed."""
        if isinstance(packed, int):
            return packed
        packed, shape = packed if isinstance(packed, tuple) else (packed, (-1,))
        return np.frombuffer(packed, self._packed_dtype).astype(np.int64).reshape(shape)


class CombinedDataset:
    """Datasets of equal length, and unencrypted columns, combined into samples with the columns of all.

    A handle refers to the dataset of its column. `names` is the order of the columns.
    """

    __slots__ = ("__weakref__", "count", "dataset_id", "names", "parts", "plain")

    def __init__(
        self,
        parts: Sequence[DatasetHandle],
        names: tuple[str, ...],
        plain: PlainColumns | None = None,
        dataset_id: bytes | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self.names = names
        self.plain = plain
        self.count = self.parts[0].count
        self.dataset_id = dataset_id or os.urandom(8)
        refs[self.dataset_id] = self

    def sample(self, rows: Row) -> dict[str, Any]:
        """Check the sample numbers, and return the columns of one sample, or of several stacked ones."""
        self.parts[0].require(rows)
        return self.handles(rows)

    def handles(self, rows: Row) -> dict[str, Any]:
        """Return `sample`'s result for checked rows."""
        columns: dict[str, Any] = {}
        for part in self.parts:
            columns |= part.handles(rows)
        if self.plain is not None:
            columns |= self.plain.sample(rows)
        return {name: columns[name] for name in self.names}

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("JoinedRef", self.parts, self.names, self.plain, self.dataset_id)


class Samples(Sequence[dict[str, Any]]):
    """Sequence of samples of a dataset that were selected together."""

    __slots__ = ("_ref", "_rows")

    def __init__(self, ref: DatasetHandle | CombinedDataset, rows: Indices) -> None:
        self._ref = ref
        self._rows = rows  # already checked

    def stack(self) -> dict[str, Any]:
        """Return one handle on all of the samples for each column."""
        return self._ref.handles(self._rows)

    def __len__(self) -> int:
        return self._rows.size

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Samples:
        if isinstance(index, slice):
            return Samples(self._ref, self._rows[index])
        return self._ref.sample(int(self._rows[index]))

    def __reduce__(self) -> tuple[object, tuple[Any, ...]]:
        return unpickle, ("Samples", self._ref.dataset_id, self._ref.parts[0].pack(self._rows))


class DatasetRows(SealedRows):
    """Handle on samples of a dataset in one column. `rows` is an integer, or an array of one dimension or two.

    The numbers of the samples and of the column were checked, by `DatasetHandle.require` or by indexing.
    """

    __slots__ = ("_shape", "column", "needs_padding", "ref", "rows")

    def __init__(self, ref: DatasetHandle, column: int, rows: Row) -> None:
        self.name, self._dtype, self.key_id = ref.labels[column]
        self.ref = ref
        self.column = column
        self.rows = rows
        self.needs_padding = ref.has_records and not isinstance(rows, int)
        self._shape: tuple[int, ...] | None = None  # computed once, when it is first needed

    @property
    def shape(self) -> tuple[int, ...]:
        if self._shape is None:
            self._shape = self.ref.layout.shape(self.column, self.rows)
        return self._shape

    @property
    def _own_keys(self) -> KeyRing | None:  # type: ignore[override]
        return self.ref.own_keys

    def select(self, keys: KeyRing) -> Sequence[MessageRanges]:
        if self.column not in self.ref.checked:
            self.ref.check_contexts(self.column, keys)
        return self.ref.layout.slices(self.column, self.rows)

    def slices(self) -> Sequence[MessageRanges]:
        return self.ref.layout.slices(self.column, self.rows)

    def check_contexts(self, keys: KeyRing) -> None:
        self.ref.check_contexts(self.column, keys)

    def stack(self, handles: Sequence[object]) -> DatasetRows | None:
        """Return one handle on the rows of several; None if they differ in dataset, column or number of rows."""
        rows = []
        for handle in handles:
            if not isinstance(handle, DatasetRows) or (handle.ref, handle.column) != (self.ref, self.column):
                return None
            rows.append(handle.rows)
        alike = {np.shape(numbers) for numbers in rows} == {np.shape(self.rows)}
        return DatasetRows(self.ref, self.column, np.array(rows, np.int64)) if alike else None

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("DatasetRows", self.ref.dataset_id, self.column, self.ref.pack(self.rows))


# Collators and trackers of others put the name of a class that they do not know into their error.
DatasetRows.__name__ = (
    "DatasetRows, which is sealed: collate with fastrack.collate (data_collator= of a Trainer), and open batches with "
    "wrap (a Trainer opens them by itself, with keys= of the dataset or after fastrack.use_keys)"
)


class Lengths:
    """Lengths of records, in a process that lacks the offsets. They are resolved in the process that has them."""

    __slots__ = ("ref", "rows")

    def __init__(self, ref: DatasetHandle, rows: Row) -> None:
        ref.require(rows)
        self.ref = ref
        self.rows = rows

    def stack(self, others: Sequence[object]) -> Lengths:
        """Return the lengths of several records of one dataset."""
        rows = []
        for other in others:
            if not isinstance(other, Lengths) or other.ref is not self.ref:
                raise TypeError(
                    "lengths of records in a spawned worker process: expected records of one dataset, got several. "
                    "Use num_workers=0, or one dataset of several files"
                )
            rows.append(other.rows)
        return Lengths(self.ref, np.array(rows, np.int64))

    def resolve(self) -> Any:
        """Return the lengths, as an integer or an array, or this object if the offsets are unknown in this process."""
        layout = self.ref.layout
        assert isinstance(layout, RecordLayout)
        if layout.offsets is None:
            return self
        lengths = layout.lengths(self.rows)
        if isinstance(self.rows, int):
            return int(lengths[0])
        memory = lengths.reshape(-1).view(np.uint8)
        return arrays.from_bytes(memory, "I64", lengths.shape, arrays.default_framework())

    def __reduce__(self) -> tuple[object, tuple[Any, ...]]:
        return unpickle, ("Lengths", self.ref.dataset_id, self.ref.pack(self.rows))


# Pickles. Ids are looked up among the datasets of this process.

refs: WeakValueDictionary[bytes, Any] = WeakValueDictionary()


def _find(dataset_id: bytes, packed: Packed) -> tuple[Any, Row]:
    ref = refs.get(dataset_id)
    if ref is None:
        raise ClosedError(
            "unpickling samples: expected their dataset in this process, got none. Keep the SealedDataset that the "
            "DataLoader was made with, and use its samples in that process"
        )
    return ref, ref.parts[0].unpack(packed)


def restore_ref(dataset_id: bytes, layout: Layout) -> DatasetHandle:
    """Return the dataset of this process with that id, or else the pickled one."""
    return refs.get(dataset_id) or DatasetHandle(layout, dataset_id)


def restore_joined(
    parts: tuple[DatasetHandle, ...], names: tuple[str, ...], plain: PlainColumns | None, dataset_id: bytes
) -> CombinedDataset:
    """Return the dataset of this process with that id, or else the pickled one."""
    return refs.get(dataset_id) or CombinedDataset(parts, names, plain, dataset_id)


def restore_rows(dataset_id: bytes, column: int, packed: Packed) -> DatasetRows:
    """Return the handle that a pickle describes."""
    ref, rows = _find(dataset_id, packed)
    ref.require(rows, column)
    return DatasetRows(ref, column, rows)


def restore_samples(dataset_id: bytes, packed: Packed) -> Samples:
    """Return the samples that a pickle describes."""
    ref, rows = _find(dataset_id, packed)
    assert not isinstance(rows, int)
    ref.parts[0].require(rows)
    return Samples(ref, rows)


def restore_lengths(dataset_id: bytes, packed: Packed) -> Any:
    """Return the lengths that a pickle describes."""
    return Lengths(*_find(dataset_id, packed)).resolve()


# Layouts: the bytes of sealed files that hold the samples of a dataset.


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

    ends : int64, the cumulative number of samples, by file
    """

    shards: Shards
    names: tuple[str, ...]
    columns: tuple[EvenColumn, ...]
    ends: Indices

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("EvenLayout", self.shards, self.names, self.columns, self.ends)

    def dtype(self, column: int) -> str:
        return self.columns[column].dtype

    def shape(self, column: int, rows: Row) -> tuple[int, ...]:
        """Return the shape of one sample, or of several stacked ones."""
        sample = self.columns[column].sample
        return sample if isinstance(rows, int) else (*rows.shape, *sample)

    def shape_tensors(self, column: int) -> Sequence[SealedTensor]:
        """Return the tensors whose shapes determine how many samples of a column each file has."""
        if self.shards.index is not None:
            return ()  # their shapes are authentic
        spec = self.columns[column]
        return [self.shards.tensor(shard, spec.index) for shard in range(len(self.shards))]

    def slices(self, column: int, rows: Row) -> Sequence[MessageRanges]:
        spec = self.columns[column]
        if self.ends.size == 1:  # nothing to look up
            flat = np.array([rows]) if isinstance(rows, int) else rows.reshape(-1)
            opened = self.shards.opened[0]
            tensor = self.shards.tensor(0, spec.index) if opened is None else opened[spec.index]
            return (MessageRanges(tensor, EvenRanges(flat, spec.stride, spec.size)),)
        parts = by_shard(self.ends, rows)
        self.shards.require_open(shard for shard, _, _ in parts)
        return [
            MessageRanges(
                self.shards.tensor(shard, spec.index),
                EvenRanges(local, spec.stride, spec.size, order),
            )
            for shard, local, order in parts
        ]


@dataclass(slots=True)
class RecordLayout:
    """Layout of samples of any length, one after the other. The second column is their lengths.

    offsets : int64 for each file, the starts of its records and the end of the last one; None in other processes
    keys : open the offsets of shards that an index lists, when they are first needed
    """

    shards: Shards
    names: tuple[str, ...]
    ends: Indices
    offsets: dict[int, Indices] | None = field(repr=False)
    keys: KeyRing | None = field(default=None, repr=False)

    def dtype(self, column: int) -> str:
        return self.shards.contexts[0][0].dtype

    def shape(self, column: int, rows: Row) -> tuple[int, ...]:
        lengths = self.lengths(rows)
        return (int(lengths[0]),) if isinstance(rows, int) else (*rows.shape, int(lengths.max(initial=0)))

    def shape_tensors(self, column: int) -> Sequence[SealedTensor]:
        return ()  # the offsets were unsealed

    def slices(self, column: int, rows: Row) -> Sequence[MessageRanges]:
        return self.slices_at(rows, np.arange(np.size(rows)) * self.shape(column, rows)[-1])

    def slices_at(self, rows: Row, places: Indices) -> Sequence[MessageRanges]:
        """Return the slices of records that go to `places`, in elements, in the result."""
        width = dtypes.nbytes(self.dtype(0), (1,))
        parts = by_shard(self.ends, rows)
        self._require_offsets(parts)
        return [
            MessageRanges(
                self.shards.tensor(shard, 0),
                partial(
                    ByteRanges,
                    offsets[local] * width,
                    (offsets[local + 1] - offsets[local]) * width,
                    places[order] * width,
                ),
            )
            for shard, local, order in parts
            for offsets in [self._offsets_of(shard)]
        ]

    def open_offsets(self, keys: KeySource | None) -> None:
        """Unseal the offsets if this process lacks them."""
        if self.offsets is None:
            opened = record_layout(self.shards, keys)
            if not np.array_equal(opened.ends, self.ends):
                raise FormatError(
                    "records: expected the number of records in each file that the dataset had when made, got "
                    "another. Make the dataset again"
                )
            self.offsets, self.keys = opened.offsets, opened.keys

    def lengths(self, rows: Row) -> Indices:
        """Return the number of elements of each record."""
        lengths = np.zeros(1 if isinstance(rows, int) else rows.size, np.int64)
        parts = by_shard(self.ends, rows)
        self._require_offsets(parts)
        for shard, local, order in parts:
            offsets = self._offsets_of(shard)
            lengths[order] = offsets[local + 1] - offsets[local]
        return lengths if isinstance(rows, int) else lengths.reshape(rows.shape)

    def _require_offsets(self, parts: list[tuple[int, Indices, Indices]]) -> None:
        """Unseal the offsets of shards of an index that are used for the first time."""
        if self.keys is not None and self.offsets is not None:
            absent = [shard for shard, _, _ in parts if shard not in self.offsets]
            if absent:
                self.offsets |= _open_offsets(self.shards, absent, self.keys)

    def _offsets_of(self, shard: int) -> Indices:
        if self.offsets is None:
            raise TypeError("lengths of records are known only in the process that made the dataset. Use them there")
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
    """Lay out samples that are `size` neighbouring rows of the tensors, with starts that are `step` rows apart.

    names : the column names
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
    """Lay out samples that are records of the first tensor, at the offsets in the second tensor.

    names : names of the records and of their lengths in a sample
    """
    try:
        ring = KeyRing.resolve(keys)
    except UnknownKeyError as error:
        error.add_note("records are found by their offsets, which are opened when the dataset is made: give it keys=")
        raise
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
    ends = np.cumsum([index.shape[0] - 1 for _, index in shards.contexts], dtype=np.int64)
    if shards.index is not None:
        return RecordLayout(shards, names, ends, {}, ring)
    return RecordLayout(shards, names, ends, _open_offsets(shards, range(len(shards)), ring))


def _open_offsets(shards: Shards, chosen: Sequence[int], keys: KeyRing) -> dict[int, Indices]:
    """Unseal the offsets of some shards: the second tensor of each."""
    shards.require_open(chosen)
    indices = [shards.tensor(shard, 1) for shard in chosen]
    if authenticate_remote(indices, keys):
        prefetch((index, None) for index in indices)
    offsets = {}
    for shard, index in zip(chosen, indices, strict=True):
        data = shards.contexts[shard][0]
        opened = unseal(index, keys, framework="numpy")
        if opened[0] < 0 or opened[-1] > data.shape[0] or bool((opened[1:] < opened[:-1]).any()):
            raise FormatError(
                f"{shards.paths[shard]}: {index.name!r:.200}: expected offsets that ascend, from 0 to at most the "
                f"{data.shape[0]} elements of {data.name!r:.200}, got others"
            )
        offsets[shard] = opened
    return offsets


def _column(index: int, context: MessageContext, window: tuple[int, ...], step: int) -> EvenColumn:
    """Return a column of rows, or of windows of rows, of whole bytes."""
    row, rest = divmod(dtypes.BITS[context.dtype] * math.prod(context.shape[1:]), 8)
    if rest:
        raise TypeError(f"{context.name!r:.200}: expected rows of whole bytes, got elements of less. Open it whole")
    return EvenColumn(index, context.dtype, (*window, *context.shape[1:]), step * row, math.prod(window) * row)
