"""Open the samples of a data set on the host, and transform each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._sealed.indexing import Indices
from fastrack._sealed.tensor import SealedRows, TensorSlice
from fastrack._training.handles import DatasetRef
from fastrack._training.joined import JoinedRef
from fastrack._training.layout import RecordLayout
from fastrack._transfer.api import to_device
from fastrack._util.pickles import unpickle

Transform = Callable[[dict[str, Any]], Any]


class Opening:
    """Keys and function with which samples are opened, in the process that asks for them."""

    __slots__ = ("_keys", "_ring", "_transform")

    def __init__(self, keys: KeySource | None, transform: Transform) -> None:
        self._keys = keys
        self._transform = transform
        self._ring: KeyRing | None = None  # made when the process opens its first samples

    def open(self, source: DatasetRef | JoinedRef, rows: Indices) -> list[Any]:
        """Open samples in one call, and return what the transform makes of each."""
        if self._ring is None:
            self._ring = KeyRing.resolve(self._keys)
        return [self._transform(sample) for sample in _open_samples(source, rows, self._ring)]

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("Opening", self._keys, self._transform)


def _open_samples(source: DatasetRef | JoinedRef, rows: Indices, keys: KeyRing) -> Iterator[dict[str, Any]]:
    handles: dict[str, SealedRows] = {}
    starts: dict[str, list[int]] = {}
    for part in source.parts:
        layout = part.layout
        if isinstance(layout, RecordLayout):
            layout.open_offsets(keys)
            name = layout.names[0]
            handles[name] = _PackedRecords(part, layout, rows)
            starts[name] = [0, *np.cumsum(layout.lengths(rows)).tolist()]
        else:
            handles |= part.sample(rows)
    values: dict[str, Any] = to_device(handles, "cpu", keys=keys)
    if isinstance(source, JoinedRef):
        values = {name: values[name] for name in source.names if name in values}
        if source.plain is not None:
            values |= source.plain.sample(rows)
    for index in range(rows.size):
        sample = {name: value if name in starts else value[index] for name, value in values.items()}
        for name, ends in starts.items():
            record = sample[name][ends[index] : ends[index + 1]]
            sample[name] = np.asarray(record).tobytes() if handles[name].dtype == "U8" else record
        yield sample


class _PackedRecords(SealedRows):
    """Handle on records, one after the other without padding."""

    __slots__ = ("_layout", "_ref", "_rows")

    def __init__(self, ref: DatasetRef, layout: RecordLayout, rows: Indices) -> None:
        self.name = layout.names[0]
        self.dtype = layout.dtype(0)
        self.key_id = layout.shards.key_id
        self._ref = ref
        self._layout = layout
        self._rows = rows

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(self._layout.lengths(self._rows).sum()),)

    def slices(self) -> Sequence[TensorSlice]:
        return self._layout.packed_slices(self._rows)

    def check_contexts(self, keys: KeyRing) -> None:
        self._ref.check_contexts(0, keys)
