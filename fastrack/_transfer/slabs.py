"""Divide the messages of a call into slabs, which fit into staging buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fastrack._crypto import cobblestone
from fastrack._crypto.gather import GatherPlan
from fastrack._devices.base import Segment, Slab
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, ciphertext_size

# Bytes of a gather plan in a staging buffer, which holds the plan twice: sealed and opened. The plan has a tag for each
# 16384 bytes, so one more byte for each chunk and each range is enough.
_PIECE = 2 * 3 * 8 + 1
_CHUNK = 2 * 2 * 8 + 1
_MARGIN = 2 * 8 + 16 + 2 * 16  # the last start, one more tag, and the alignment of both

Plans = Sequence[GatherPlan | None]  # of the messages of a call; None for a whole message


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of staged slabs, in bytes of plaintext: multiples of 16384.

    A slab has room for its chunks, and for `segment_overhead` bytes for each segment.
    """

    first: int  # size of the first slab; each that follows is half as large again, up to the limit
    largest: int  # two chunks or more
    segment_overhead: int = 0

    @property
    def buffer_size(self) -> int:
        """Bytes of a staging buffer."""
        return ciphertext_size(self.largest) + self.segment_overhead

    def __iter__(self) -> Iterator[int]:
        size = self.first
        while True:
            yield size
            size = min(size + max(CHUNK_SIZE, size // 2 // CHUNK_SIZE * CHUNK_SIZE), self.largest)


def slabs_of(nbytes: Sequence[int], plans: Plans, sizes: Sizes) -> Iterator[Slab]:
    """Split messages into slabs that fit the staging buffers."""
    packing = _Packing(sizes)
    for number, (size, plan) in enumerate(zip(nbytes, plans, strict=True)):
        yield from packing.add_run(number, size) if plan is None else packing.add_gather(number, size, plan)
    if packing.segments:
        yield packing.close()


class _Packing:
    """The slab that is being filled."""

    def __init__(self, sizes: Sizes) -> None:
        self.segments: list[Segment] = []
        self._sizes = sizes
        self._iterator = iter(sizes)
        self._begin()

    def add_run(self, number: int, nbytes: int) -> Iterator[Slab]:
        """Add a whole message, and yield the slabs that are full."""
        start = 0
        while True:
            first, free = start // CHUNK_SIZE, self._free(self._size)
            # A last chunk that is empty belongs to the slab before it.
            sealed, stop = cobblestone.segment_size(first, nbytes - start, nbytes), nbytes
            if sealed > free:
                # The last chunk does not fit, even if it is empty and all others do.
                count = min(free // SEALED_CHUNK_SIZE, (nbytes - start - 1) // CHUNK_SIZE)
                if count <= 0:
                    yield self.close()
                    continue
                sealed, stop = count * SEALED_CHUNK_SIZE, start + count * CHUNK_SIZE
            self._add(Segment(number, first, start, stop, sealed, self._offset))
            if stop == nbytes:
                return
            start = stop
            yield self.close()

    def add_gather(self, number: int, nbytes: int, pieces: GatherPlan) -> Iterator[Slab]:
        """Add a gather, and yield the slabs that are full.

        The device puts the plan behind the chunks, sealed and then opened. A gather thus takes its chunks, padded to a
        multiple of 16 bytes, and twice the plan: three words for each range, one for the number of each chunk, and one
        for the start of each chunk and for the end. A chunk with too many ranges for one slab is in several slabs.
        """
        chunks, starts, table = pieces.chunks, pieces.starts, pieces.table
        sealed = np.minimum(ciphertext_size(nbytes) - chunks * SEALED_CHUNK_SIZE, SEALED_CHUNK_SIZE)
        fixed = sealed + -sealed % 16 + _CHUNK
        before = np.concatenate([[0], np.cumsum(fixed + _PIECE * np.diff(starts))])  # bytes of the chunks before each
        chunk = piece = 0
        while chunk < chunks.size:
            free = self._free(max(self._size, 2 * CHUNK_SIZE)) - _MARGIN
            done = before[chunk] + _PIECE * (piece - starts[chunk])
            after = int(np.searchsorted(before, done + free, side="right")) - 1
            if after > chunk:
                end = int(starts[after])
            elif self.segments:
                yield self.close()
                continue
            else:
                after, end = chunk + 1, piece + (free - int(fixed[chunk])) // _PIECE
            starts_here = np.clip(starts[chunk : after + 1], piece, end) - piece
            plan = GatherPlan(chunks[chunk:after], starts_here, table[piece:end])
            extent = int(sealed[chunk:after].sum())
            self._add(Segment(number, 0, 0, nbytes, extent, self._offset, plan))
            self._taken += _MARGIN + _CHUNK * len(plan.chunks) + _PIECE * len(plan.table)
            chunk, piece = after if end == starts[after] else chunk, end
            if chunk < chunks.size:
                yield self.close()

    def close(self) -> Slab:
        """Return the slab, and begin the next."""
        slab = Slab(self.segments, self._end)
        self._begin()
        return slab

    def _begin(self) -> None:
        self.segments = []
        self._size = next(self._iterator)
        self._offset = self._end = self._taken = 0

    def _free(self, size: int) -> int:
        """Return the bytes that are free for another segment, in a slab of `size`."""
        return ciphertext_size(size) - self._offset - self._taken

    def _add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self._end = segment.offset + segment.sealed_size
        self._offset = self._end + -self._end % 16
        self._taken += self._sizes.segment_overhead
