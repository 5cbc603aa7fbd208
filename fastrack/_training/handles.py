"""Handles on the samples of a data set, and their transfer between processes.

A handle pickles as the id of its data set, its column and its row numbers. Worker processes thus send numbers only: no
key, no ciphertext and no plaintext ever reaches one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol, overload
from weakref import WeakValueDictionary

import numpy as np

from fastrack._keys.keyring import KeyRing
from fastrack._sealed.headers import fetch_headers
from fastrack._sealed.indexing import Indices, highest_unsigned
from fastrack._sealed.tensor import SealedRows, TensorSlice
from fastrack._tensors import arrays
from fastrack._training.layout import Layout, RecordLayout
from fastrack._util.pickles import unpickle
from fastrack.errors import ClosedError, FormatError

Row = int | Indices
Packed = int | bytes | tuple[bytes, tuple[int, ...]]


class DatasetRef:
    """Data set that handles refer to, by reference in its process and by id in a pickle.

    dataset_id : 8 random bytes
    labels : for each column, what its handles have in common: name, dtype, and key id
    checked : the columns of which `check_contexts` has authenticated the shapes
    has_records : True if samples have any length, and several of them are padded
    """

    __slots__ = (
        "__weakref__",
        "_packed_dtype",
        "checked",
        "count",
        "dataset_id",
        "has_records",
        "labels",
        "layout",
    )  # fmt: skip

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
        """Return the handles on one sample, or on several stacked ones, by column, after a check of their numbers."""
        self.require(rows)
        return self.handles(rows)

    def handles(self, rows: Row) -> dict[str, Any]:
        """Return the same for numbers that were checked."""
        names = self.layout.names
        if isinstance(self.layout, RecordLayout):
            return {names[0]: DatasetRows(self, 0, rows), names[1]: Lengths(self, rows).resolve()}
        return {name: DatasetRows(self, column, rows) for column, name in enumerate(names)}

    def check_contexts(self, column: int, keys: KeyRing) -> None:
        """Authenticate, once, the shapes that determine how many samples each file has.

        A file that claims to have none would otherwise never be opened, and its samples be missing unnoticed.
        """
        if column not in self.checked:
            tensors = self.layout.shape_tensors(column)
            fetch_headers(tensors)
            for tensor in tensors:
                tensor.open_header(keys).wipe()
            self.checked.add(column)

    @property
    def names(self) -> tuple[str, ...]:
        return self.layout.names

    @property
    def parts(self) -> tuple[DatasetRef, ...]:
        """Data sets whose columns stand side by side: this one alone."""
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
                f"sample {wrong} of a data set of {self.count}: expected 0 to {self.count - 1}; the process that sent "
                "this number has another data set, or was compromised"
            )
        if not 0 <= column < len(self.layout.names):
            raise FormatError(
                f"column {column}: expected 0 to {len(self.layout.names) - 1}, the columns of the data set"
            )

    def pack(self, rows: Row) -> Packed:
        """Return the row numbers in as few bytes as they take."""
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


class SampleSource(Protocol):
    """Source of the samples of a data set by their numbers."""

    @property
    def dataset_id(self) -> bytes: ...
    def sample(self, rows: Row) -> dict[str, Any]: ...
    def handles(self, rows: Row) -> dict[str, Any]: ...
    def require(self, rows: Row) -> None: ...
    def pack(self, rows: Row) -> Packed: ...


class Samples(Sequence[dict[str, Any]]):
    """Sequence of samples of a data set that were selected together."""

    __slots__ = ("_ref", "_rows")

    def __init__(self, ref: SampleSource, rows: Indices) -> None:
        self._ref = ref
        self._rows = rows  # which were checked

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
        return unpickle, ("Samples", self._ref.dataset_id, self._ref.pack(self._rows))


class DatasetRows(SealedRows):
    """Handle on samples of a data set in one column. `rows` is an integer, or an array of one dimension or two.

    The numbers of the samples and of the column were checked, by `DatasetRef.require` or as an index is.
    """

    __slots__ = ("_shape", "column", "needs_padding", "ref", "rows")

    def __init__(self, ref: DatasetRef, column: int, rows: Row) -> None:
        self.name, self.dtype, self.key_id = ref.labels[column]
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

    def select(self, keys: KeyRing) -> Sequence[TensorSlice]:
        if self.column not in self.ref.checked:
            self.ref.check_contexts(self.column, keys)
        return self.ref.layout.slices(self.column, self.rows)

    def slices(self) -> Sequence[TensorSlice]:
        return self.ref.layout.slices(self.column, self.rows)

    def check_contexts(self, keys: KeyRing) -> None:
        self.ref.check_contexts(self.column, keys)

    def stack(self, handles: Sequence[object]) -> DatasetRows | None:
        """Return one handle on the rows of several; None if they differ in data set, column or number of rows."""
        rows = []
        for handle in handles:
            if not isinstance(handle, DatasetRows) or (handle.ref, handle.column) != (self.ref, self.column):
                return None
            rows.append(handle.rows)
        alike = {np.shape(each) for each in rows} == {np.shape(self.rows)}
        return DatasetRows(self.ref, self.column, np.array(rows, np.int64)) if alike else None

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("DatasetRows", self.ref.dataset_id, self.column, self.ref.pack(self.rows))


class Lengths:
    """Lengths of records, in a process that lacks the offsets. They are resolved in the process that has them."""

    __slots__ = ("ref", "rows")

    def __init__(self, ref: DatasetRef, rows: Row) -> None:
        ref.require(rows)
        self.ref = ref
        self.rows = rows

    def stack(self, others: Sequence[object]) -> Lengths:
        """Return the lengths of several records of one data set."""
        rows = []
        for other in others:
            if not isinstance(other, Lengths) or other.ref is not self.ref:
                raise TypeError(
                    "lengths of records in a spawned worker process: expected records of one data set, got several. "
                    "Use num_workers=0, or one data set of several files"
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


# Pickles. Ids are looked up among the data sets of this process.

refs: WeakValueDictionary[bytes, Any] = WeakValueDictionary()


def _find(dataset_id: bytes, packed: Packed) -> tuple[Any, Row]:
    ref = refs.get(dataset_id)
    if ref is None:
        raise ClosedError(
            "unpickling samples: expected their data set in this process, got none. Keep the SealedDataset that the "
            "DataLoader was made with, and use its samples in that process"
        )
    return ref, ref.unpack(packed)


def restore_ref(dataset_id: bytes, layout: Layout) -> DatasetRef:
    """Return the reference of this process with that id, or else that which a pickle describes."""
    return refs.get(dataset_id) or DatasetRef(layout, dataset_id)


def restore_rows(dataset_id: bytes, column: int, packed: Packed) -> DatasetRows:
    """Return the handle that a pickle describes."""
    ref, rows = _find(dataset_id, packed)
    ref.require(rows, column)
    return DatasetRows(ref, column, rows)


def restore_samples(dataset_id: bytes, packed: Packed) -> Samples:
    """Return the samples that a pickle describes."""
    ref, rows = _find(dataset_id, packed)
    assert not isinstance(rows, int)
    ref.require(rows)
    return Samples(ref, rows)


def restore_lengths(dataset_id: bytes, packed: Packed) -> Any:
    """Return the lengths that a pickle describes."""
    return Lengths(*_find(dataset_id, packed)).resolve()
