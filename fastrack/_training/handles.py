"""Where samples come from, and how handles on them travel between processes.

A handle travels as a recipe: the token of its data set, its column and its rows. Worker processes thus deal in numbers
only: no key, no ciphertext and no plaintext ever reaches one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, overload
from weakref import WeakValueDictionary

import numpy as np

from fastrack._crypto.keys import KeyRing
from fastrack._sealed.indexing import Indices
from fastrack._sealed.tensor import SealedRows, TensorSlice
from fastrack._tensors import arrays
from fastrack._training.layout import Layout, RecordLayout
from fastrack._util.pickles import unpickle
from fastrack.errors import ClosedError, FormatError

Row = int | Indices
Packed = int | bytes | tuple[bytes, tuple[int, ...]]


class DatasetRef:
    """What samples are of. Handles name it by its token, and hold on to it where they know it.

    token : 8 random bytes
    """

    __slots__ = ("__weakref__", "_checked", "count", "dataset_id", "layout")

    def __init__(self, layout: Layout, dataset_id: bytes | None = None) -> None:
        self.layout = layout
        self.count = layout.count
        self.dataset_id = dataset_id or os.urandom(8)
        self._checked: set[int] = set()
        _refs[self.dataset_id] = self

    def sample(self, rows: Row) -> dict[str, Any]:
        """One sample, or several put together."""
        return {name: self._leaf(column, rows) for column, name in enumerate(self.layout.names)}

    def check_contexts(self, column: int, keys: KeyRing) -> None:
        """Authenticate, once, what tells how many samples each file has.

        A file that claims to have none would otherwise never be looked at, and its samples be missing unnoticed.
        """
        if column not in self._checked:
            for tensor in self.layout.shape_tensors(column):
                tensor.open_header(keys).wipe()
            self._checked.add(column)

    def _leaf(self, column: int, rows: Row) -> Any:
        if isinstance(self.layout, RecordLayout) and column == 1:
            return Lengths(self, rows).resolve()
        return DatasetRows(self, column, rows)

    def require(self, rows: Row, column: int = 0) -> None:
        """Refuse what this data set does not have. Worker processes send numbers, and nothing else vouches for them.

        Raises
        ------
        FormatError
            If a sample or the column is out of range.
        """
        if isinstance(rows, int):
            lowest, highest = rows, rows
        else:
            lowest, highest = (int(rows.min()), int(rows.max())) if rows.size else (0, -1)
        if lowest < 0 or highest >= self.count:
            wrong = lowest if lowest < 0 else highest
            raise FormatError(
                f"sample {wrong} of a data set of {self.count}: expected 0 to {self.count - 1}; the process that sent "
                "this number has another data set, or is not to be trusted"
            )
        if not 0 <= column < len(self.layout.names):
            raise FormatError(f"column {column} of a data set of {len(self.layout.names)}: there is no such column")

    def pack(self, rows: Row) -> Packed:
        """Rows as little as they can be."""
        if isinstance(rows, int):
            return rows
        packed = rows.astype(self._packed_dtype).tobytes()
        return packed if rows.ndim == 1 else (packed, rows.shape)

    def unpack(self, packed: Packed) -> Row:
        """What was packed."""
        if isinstance(packed, int):
            return packed
        packed, shape = packed if isinstance(packed, tuple) else (packed, (-1,))
        return np.frombuffer(packed, self._packed_dtype).astype(np.int64).reshape(shape)

    @property
    def _packed_dtype(self) -> str:
        return "<u4" if self.count <= 1 << 32 else "<u8"


class Samples(Sequence[dict[str, Any]]):
    """Samples of a data set that were asked for together."""

    __slots__ = ("_ref", "_rows")

    def __init__(self, ref: DatasetRef, rows: Indices) -> None:
        ref.require(rows)
        self._ref = ref
        self._rows = rows

    def stack(self) -> dict[str, Any]:
        """All of them, one handle a column."""
        return self._ref.sample(self._rows)

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
    """Samples of a data set in one column: an integer for one, a vector or table of them for several."""

    __slots__ = ("column", "ref", "rows")

    def __init__(self, ref: DatasetRef, column: int, rows: Row) -> None:
        ref.require(rows, column)
        layout = ref.layout
        self.name = layout.names[column]
        self.dtype = layout.dtype(column)
        self.key_id = layout.shards.key_id
        self.ref = ref
        self.column = column
        self.rows = rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.layout.shape(self.column, self.rows)

    @property
    def needs_padding(self) -> bool:
        return self.ref.layout.needs_padding(self.rows)

    def slices(self) -> Sequence[TensorSlice]:
        return self.ref.layout.slices(self.column, self.rows)

    def check_contexts(self, keys: KeyRing) -> None:
        self.ref.check_contexts(self.column, keys)

    def stack(self, handles: Sequence[object]) -> DatasetRows | None:
        """Return one handle on the samples of all these, which include this one; None if some are not alike."""
        rows = []
        for handle in handles:
            if not isinstance(handle, DatasetRows) or handle.ref is not self.ref or handle.column != self.column:
                return None
            if np.shape(handle.rows) != np.shape(self.rows):
                return None
            rows.append(handle.rows)
        return DatasetRows(self.ref, self.column, np.array(rows, np.int64))

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("DatasetRows", self.ref.dataset_id, self.column, self.ref.pack(self.rows))


class Lengths:
    """Lengths of records, in a process that does not know them: on the way to one that does."""

    __slots__ = ("ref", "rows")

    def __init__(self, ref: DatasetRef, rows: Row) -> None:
        ref.require(rows)
        self.ref = ref
        self.rows = rows

    def stack(self, others: Sequence[object]) -> Lengths:
        """With others of the same data set."""
        rows = []
        for other in others:
            if not isinstance(other, Lengths) or other.ref is not self.ref:
                raise TypeError(
                    "lengths of records of several data sets cannot be put together in a worker process that was "
                    "spawned; use num_workers=0, or one data set of several files"
                )
            rows.append(other.rows)
        return Lengths(self.ref, np.array(rows, np.int64))

    def resolve(self) -> Any:
        """The lengths, if they are known here: an integer, or a tensor."""
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


# Across processes. Whatever comes is looked up by its token among what lives here.

_refs: WeakValueDictionary[bytes, DatasetRef] = WeakValueDictionary()


def get_or_create(dataset_id: bytes, layout: Layout) -> DatasetRef:
    """The origin of that token; a new one, if it is not known here."""
    return _refs.get(dataset_id) or DatasetRef(layout, dataset_id)


def _find_ref(dataset_id: bytes) -> DatasetRef:
    ref = _refs.get(dataset_id)
    if ref is None:
        raise ClosedError(
            "these samples are of a data set that is not in this process, or no longer; keep the SealedDataset that "
            "its DataLoader was made with, and use its samples in that process"
        )
    return ref


def restore_rows(dataset_id: bytes, column: int, packed: Packed) -> DatasetRows:
    """Return the handle that a pickle describes."""
    ref = _find_ref(dataset_id)
    return DatasetRows(ref, column, ref.unpack(packed))


def restore_samples(dataset_id: bytes, packed: Packed) -> Samples:
    """Make the samples that a pickle holds."""
    ref = _find_ref(dataset_id)
    rows = ref.unpack(packed)
    assert not isinstance(rows, int)
    return Samples(ref, rows)


def restore_lengths(dataset_id: bytes, packed: Packed) -> Any:
    """Make the lengths that a pickle holds."""
    ref = _find_ref(dataset_id)
    return Lengths(ref, ref.unpack(packed)).resolve()
