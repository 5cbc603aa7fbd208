"""Samples of a dataset as numbers in a table, for engines that move tables between processes and disks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from fastrack._keys.keyring import KeyRing
from fastrack._sealed.indexing import Indices
from fastrack._training.dataset import SealedDataset
from fastrack._training.handles import CombinedDataset, DatasetHandle, EvenLayout, RecordLayout
from fastrack._util.shown import shown
from fastrack.errors import FormatError

DATASET: Final = "dataset"
ROW: Final = "row"
ROW_BYTES: Final = 16  # of the two numbers of a sample


@dataclass(frozen=True)
class RowTable:
    """The samples of a dataset as rows of a table: the id of the dataset, and the number of the sample."""

    data: SealedDataset

    def __post_init__(self) -> None:
        if not isinstance(self.data, SealedDataset):
            raise TypeError(
                f"data: expected a SealedDataset, got {type(self.data).__name__}. Make one: SealedDataset(paths)"
            )
        if self.data._opening is not None:  # noqa: SLF001 - of this package
            raise ValueError(
                "data: expected a SealedDataset without transform=, got one with it. Transform the batches"
            )

    def __len__(self) -> int:
        return len(self.data)

    @property
    def _ref(self) -> DatasetHandle | CombinedDataset:
        return self.data._ref  # noqa: SLF001 - of this package

    @property
    def dataset_id(self) -> int:
        """Id of the files and of the layout of samples in them, equal in every process that has these files."""
        if "_id" not in vars(self):  # the lock of a cached_property is no forked child's, on Python 3.11
            vars(self)["_id"] = identify(self._ref)
        return int(vars(self)["_id"])

    def handles(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return handles on the samples of a table, by column, with the other columns of the table.

        Raise FormatError without sample numbers of these files, and ValueError for another column of the same name.
        """
        others = dict(table)
        try:
            ids, rows = np.asarray(others.pop(DATASET)), np.asarray(others.pop(ROW))
        except KeyError as error:
            raise FormatError(
                f"batch: expected the columns {DATASET!r} and {ROW!r} of sealed samples, got none called {error}. Keep "
                "both until the batch is opened"
            ) from None
        if not (ids.dtype.kind == rows.dtype.kind == "i" and ids.shape == rows.shape == (rows.size,)):
            raise FormatError(
                f"batch: expected the numbers of sealed samples as integers, got {ids.dtype} {list(ids.shape)} and "
                f"{rows.dtype} {list(rows.shape)}. Keep both columns as they are"
            )
        if (ids != self.dataset_id).any():
            raise FormatError(
                "batch: expected samples of this dataset, got those of other files or of other columns. Open a batch "
                "with the dataset that its samples were read from"
            )
        samples = self._ref.sample(rows.astype(np.int64))
        for name in samples.keys() & others.keys():
            raise ValueError(f"batch: expected each column once, got another {shown(name, 200)} beside the sealed one")
        return {**samples, **others}

    def with_lengths(self, keys: KeyRing) -> RowTable:
        """Open the lengths of records, which no pickle has, and return this table."""
        for part in self._ref.parts:
            if isinstance(part.layout, RecordLayout):
                part.layout.open_offsets(keys)
        return self


def make_table(dataset_id: int, start: int, stop: int) -> dict[str, Indices]:
    """Return the columns of the samples from `start` to `stop` of a dataset."""
    return {DATASET: np.full(stop - start, dataset_id, np.int64), ROW: np.arange(start, stop)}


def divide(count: int, parts: int) -> list[tuple[int, int]]:
    """Divide samples into up to `parts` ranges of about one size."""
    parts = max(1, min(parts, count))
    ends = [count * part // parts for part in range(parts + 1)]
    return list(pairwise(ends))


def identify(ref: DatasetHandle | CombinedDataset) -> int:
    """Return 63 bits of a hash of files, columns and layout. It finds mistakes, not attacks."""
    digest = hashlib.sha256(repr(ref.names).encode())
    for part in ref.parts:
        layout = part.layout
        for contexts in layout.shards.contexts:
            for context in contexts:
                encoded = context.encode()
                digest.update(len(encoded).to_bytes(8, "little") + encoded)
        columns = layout.columns if isinstance(layout, EvenLayout) else ()
        digest.update(repr((type(layout).__name__, layout.names, columns, layout.ends.tolist())).encode())
    return int.from_bytes(digest.digest()[:8], "little") >> 1
