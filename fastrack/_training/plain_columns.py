"""Columns of samples that the files of a dataset store unencrypted."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastrack._sealed.indexing import Indices
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes
from fastrack._training.shards import Row, Shards, by_shard
from fastrack._util.pickles import unpickle
from fastrack._util.shown import list_names, shown


class PlainColumns:
    """Columns that the files of a dataset store unencrypted. Only a manifest authenticates them.

    After unpickling, the files are opened when they are first needed.
    """

    def __init__(
        self, shards: Shards, names: tuple[str, ...], ends: Indices, size: int | None = None, step: int = 1
    ) -> None:
        self._shards = shards
        self.names = names
        self._ends = ends  # int64, the cumulative number of samples, by file
        self._size = size  # the length of windows; without one, samples are rows
        self._step = step  # rows from one window to the next
        self._columns: dict[str, list[Bytes]] | None = None
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}

    def sample(self, rows: Row) -> dict[str, Any]:
        """Return a copy of the rows or windows of one sample, or of several stacked ones, by column."""
        columns, framework = self.open(), arrays.default_framework()
        parts = by_shard(self._ends, rows)
        window = () if self._size is None else (self._size,)
        sample = {}
        for name, files in columns.items():
            dtype, row = self._kinds[name]
            result = np.empty((np.size(rows), *(window or (1,)), dtypes.nbytes(dtype, row)), np.uint8)
            for shard, local, order in parts:
                result[order] = files[shard][local[:, None] * self._step + np.arange(self._size or 1)]
            shape = (*(() if isinstance(rows, int) else rows.shape), *window, *row)
            sample[name] = arrays.from_bytes(result.reshape(-1), dtype, shape, framework)
        return sample

    def open(self) -> dict[str, list[Bytes]]:
        """Open the columns. Raise if a file lacks one, or if one differs in length or kind from the others."""
        if self._columns is None:
            columns: dict[str, list[Bytes]] = {name: [] for name in self.names}
            counts = np.diff(self._ends, prepend=0).tolist()
            for count, file in zip(counts, self._shards.open_all(), strict=True):
                for name in self.names:
                    if name not in file.plain:
                        if name in file:
                            raise ValueError(
                                f"{file.path}: {shown(name)}: expected an unencrypted tensor, got a sealed one. Name "
                                "it in columns="
                            )
                        raise ValueError(
                            f"{file.path} has no unencrypted tensor {shown(name)}; {list_names(name, file.plain)}"
                        )
                    dtype, shape, memory = file.stored(name)
                    if not shape or self._samples(shape[0]) != count:
                        raise ValueError(
                            f"{file.path}: {shown(name)}: expected an unencrypted column of as many rows as the sealed "
                            f"ones, got shape {list(shape)}"
                        )
                    if self._kinds.setdefault(name, (dtype, shape[1:])) != (dtype, shape[1:]):
                        raise ValueError(
                            f"{file.path}: {shown(name)}: expected {self._kinds[name][0]} rows of "
                            f"{list(self._kinds[name][1])}, as in the first file, got {dtype} {list(shape)}"
                        )
                    row_size = dtypes.nbytes(dtype, shape[1:])
                    columns[name].append(memory.reshape(shape[0], row_size))
            self._columns = columns
        return self._columns

    def _samples(self, rows: int) -> int:
        return rows if self._size is None else max(0, (rows - self._size) // self._step + 1)

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("PlainColumns", self._shards, self.names, self._ends, self._size, self._step)
