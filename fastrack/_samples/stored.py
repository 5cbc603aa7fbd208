"""Stored samples of a folder of shards, compared with a source that is imported again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from fastrack._files.reader import SealedFile
from fastrack._keys.keyring import KeyRing
from fastrack._samples.blocks import OFFSETS, RECORDS, Block, columns_of
from fastrack._sealed.messages import OpenMessage
from fastrack._sealed.tensor import SealedTensor
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes


class StoredSamples:
    """The samples of some shards, in order. One shard of them is in memory."""

    def __init__(self, folder: Path, paths: list[Path], count: int, keys: KeyRing) -> None:
        self.count, self.taken = count, 0
        self._folder = folder
        self._shards = (shard for path in paths for shard in _open_shard(path, keys))
        self._shard: dict[str, Block] = {}
        self._left = 0

    def take(self, blocks: Mapping[str, Block], count: int) -> int:
        """Compare `count` samples with the next stored ones. Return how many were compared: fewer at the last one.

        Raise ValueError if a sample differs from the stored one.
        """
        done = 0
        while done < count and self.taken < self.count:
            if not self._left:
                self._shard = next(self._shards)
                self._left = next(iter(self._shard.values())).count
            size = min(count - done, self._left)
            for name, stored in self._shard.items():
                if not _are_same(blocks[name], done, stored, stored.count - self._left, size):
                    raise self._other_source(f"others among samples {self.taken} to {self.taken + size - 1}")
            self._left -= size
            self.taken += size
            done += size
        if self.taken == self.count:
            self._shard = {}
        return done

    def require_all_taken(self) -> None:
        """Raise ValueError if the source had fewer samples."""
        if self.taken < self.count:
            raise self._other_source(f"one of {self.taken} samples")

    def _other_source(self, got: str) -> ValueError:
        return ValueError(
            f"resume=: expected the source of the {self.count} samples that {self._folder} has, as it was, got {got}. "
            "Name that source, or import this one into another folder"
        )


def _are_same(block: Block, start: int, stored: Block, first: int, size: int) -> bool:
    if block.ends is not None and stored.ends is not None:
        lengths = np.diff(block.ends[start : start + size + 1])
        if not np.array_equal(lengths, np.diff(stored.ends[first : first + size + 1])):
            return False
    ours, theirs = block.between(start, start + size), stored.between(first, first + size)
    return block.column == stored.column and np.array_equal(ours, theirs)


def _open_shard(path: Path, keys: KeyRing) -> Iterator[dict[str, Block]]:
    with SealedFile(path) as file:
        count, columns = columns_of([file[name].context for name in file], path)
        blocks = {}
        for name, column in columns.items():
            if column.shape is not None:
                blocks[name] = Block(column, _open(file[name], keys), count)
                continue
            ends = _open(file[name + OFFSETS], keys).view(np.int64) * dtypes.nbytes(column.dtype, (1,))
            blocks[name] = Block(column, _open(file[name + RECORDS], keys), count, ends)
    yield blocks


def _open(tensor: SealedTensor, keys: KeyRing) -> Bytes:
    memory = arrays.empty_bytes(tensor.nbytes)
    with OpenMessage(tensor, keys) as message:
        message.read(memory)
    return memory
