"""`ImportWriter`: a `DatasetWriter` of one import, which knows what its folder has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from fastrack._keys.keyring import KeyLike, KeyRing
from fastrack._samples.blocks import VALID, Block, Column
from fastrack._samples.dataset_writer import DatasetWriter
from fastrack._samples.stored import DataSet, Part, StoredSamples, read_parts
from fastrack._util.locations import Location
from fastrack._util.shown import shown


class ImportWriter(DatasetWriter):
    """Write the samples of an import; if `is_dry`, check and count them, and write nothing."""

    def __init__(self, folder: Location, key: KeyLike | None, *, is_dry: bool, **options: Any) -> None:
        super().__init__(folder, key, **options)
        self._is_dry = is_dry
        self._run = self._there.samples

    @property
    def there(self) -> DataSet:
        """The dataset that the folder had at first."""
        return self._there

    @property
    def columns(self) -> dict[str, Column]:
        """The columns of its samples."""
        return self._columns

    @property
    def shards(self) -> int:
        """Number of its shards."""
        return self._shards

    @property
    def run(self) -> int:
        """Number of the first sample of this run."""
        return self._run

    def leave_out_existing(self) -> None:
        """Note in the shards that this run leaves out files that the folder had."""
        self._leaves_out = True

    def resume(self) -> StoredSamples:
        """Compare the first samples with those of the last run in place of writing them again."""
        self._run = self._there.run
        self._expected = StoredSamples(self._folder, self._there, KeyRing(self._key))
        return self._expected

    def read_last(self, columns: Collection[str] | None = None) -> Iterator[Part]:
        """Return the samples of the run that is resumed, or some of their columns; none if none is."""
        shards = (shard for shard in self._there.shards if shard[1].first >= self._run)
        return read_parts(shards, KeyRing(self._key), columns)

    def read_earlier(self, columns: Collection[str] | None = None, run: int | None = None) -> Iterator[Part]:
        """Return the samples of the runs before this one, or of one of them, or some of their columns."""
        shards = (shard for shard in self._there.shards if shard[1].first < self._run and run in {None, shard[1].run})
        return read_parts(shards, KeyRing(self._key), columns)

    def fit(self, batch: Mapping[str, Any]) -> dict[str, Block]:
        """Return the columns of a batch as the folder has them. Raise ValueError if it has others."""
        blocks = {name: self._block(name, values) for name, values in batch.items()}
        for name in self._columns:
            base = name.removesuffix(VALID)
            if name != base and name not in blocks and base in blocks:  # appended from a source without nulls
                blocks[name] = Block.of(np.ones(blocks[base].count, np.bool_))
        for name in blocks:
            base = name.removesuffix(VALID)
            if self._columns and name != base and name not in self._columns and base in self._columns:
                raise ValueError(
                    f"column {shown(base, 80)}: expected no nulls, as {self._folder} was made without, got some. Fill "
                    "them, or import into another folder"
                )
        if len({block.count for block in blocks.values()}) == 1 and next(iter(blocks.values())).count:
            self._require_columns({name: block.column for name, block in blocks.items()})
        return blocks

    def _write_shard(self, *, complete: bool = False) -> None:
        if not self._is_dry:
            super()._write_shard(complete=complete)
            return
        self.stored += self._count
        self._shards += bool(self._count)
        self._start_shard()
