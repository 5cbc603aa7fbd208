"""Sources of messages: a sealed tensor, rows of one, or a plain tensor that is sealed on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastrack._crypto import cobblestone
from fastrack._crypto.base import Bytes, Engine, GatherPlan
from fastrack._crypto.cobblestone import CHUNK_SIZE, SEALED_CHUNK_SIZE, MessageKey
from fastrack._devices.base import Slab
from fastrack._sealed.tensor import SealedTensor, TensorSlice

# Bytes that a gather plan takes in a staging buffer, which holds it twice: sealed and opened. A tag is added for each
# 16384 bytes of it, so that one more byte for each chunk and each range is enough.
_PIECE = 2 * 3 * 8 + 1
_CHUNK = 2 * 2 * 8 + 1
_MARGIN = 2 * 8 + 16 + 2 * 16  # the last start, one more tag, and the alignment of both


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of staged slabs, in bytes of plaintext: multiples of 16384."""

    lead: int  # size of the first slab; each that follows is half as large again, up to the limit
    limit: int  # two chunks or more

    def __iter__(self) -> Iterator[int]:
        size = self.lead
        while True:
            yield size
            size = min(size + max(CHUNK_SIZE, size // 2 // CHUNK_SIZE * CHUNK_SIZE), self.limit)


class Source:
    """A message on its way to a device: its tensor's name and file, for errors, and the memory that it reads."""

    name: str | None = None
    path: Path | None = None
    memory: Bytes
    in_place = True  # what it sends lies in host memory already

    def slabs(self, sizes: Sizes | None) -> Iterator[Slab]:
        """Return the slabs of the message: of these sizes if they are staged, or one slab if None."""
        raise NotImplementedError

    def fill(self, slab: Slab, buffer: Bytes | None) -> Bytes:
        """Return the ciphertext of a slab: a view of `memory`, all of it for a gather, or bytes written to `buffer`."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wipe secrets, if there are any."""


class SealedSource(Source):
    """A sealed tensor, whose chunks are sent as they are."""

    def __init__(self, sealed: SealedTensor) -> None:
        self.name = sealed.name
        self.path = sealed.path
        self.memory = sealed.chunks
        self._nbytes = sealed.nbytes

    def slabs(self, sizes: Sizes | None) -> Iterator[Slab]:
        return slabs_of(self._nbytes, sizes)

    def fill(self, slab: Slab, buffer: Bytes | None) -> Bytes:
        start = slab.first_chunk * SEALED_CHUNK_SIZE
        return self.memory[start : start + slab.sealed_size]


class RowSource(Source):
    """Rows of a sealed tensor, of which the chunks that hold them are sent."""

    def __init__(self, part: TensorSlice) -> None:
        self.name = part.tensor.name
        self.path = part.tensor.path
        self.memory = part.tensor.chunks
        self._pieces = part.ranges().pieces()
        self._nbytes = part.tensor.nbytes

    def slabs(self, sizes: Sizes | None) -> Iterator[Slab]:
        if sizes is None:
            return iter([Slab(0, 0, self._nbytes, self.memory.size, self._pieces)])
        return gathers_of(self._pieces, self._nbytes, sizes)

    def fill(self, slab: Slab, buffer: Bytes | None) -> Bytes:
        return self.memory


class PassedSource(Source):
    """A plain tensor for a device that works in place, which seals it under a key of this transfer and opens it."""

    def __init__(self, plain: Bytes) -> None:
        self.memory = plain

    def slabs(self, sizes: Sizes | None) -> Iterator[Slab]:
        return (replace(slab, is_plain=True) for slab in slabs_of(self.memory.size, sizes))

    def fill(self, slab: Slab, buffer: Bytes | None) -> Bytes:
        return self.memory[slab.start : slab.stop]


class PlainSource(Source):
    """A plain tensor in host memory, sealed chunk by chunk under a key of this transfer alone."""

    in_place = False

    def __init__(self, plain: Bytes, key: MessageKey, engine: Engine) -> None:
        self.memory = plain
        self._engine = engine
        self._schedule = engine.expand_key(key)

    def slabs(self, sizes: Sizes | None) -> Iterator[Slab]:
        return slabs_of(self.memory.size, sizes)

    def fill(self, slab: Slab, buffer: Bytes | None) -> Bytes:
        assert buffer is not None
        staged = buffer[: slab.sealed_size]
        self._engine.seal_run(self._schedule, self.memory[slab.start : slab.stop], staged, slab.first_chunk)
        return staged

    def finish(self) -> None:
        self._schedule.wipe()


def slabs_of(nbytes: int, sizes: Sizes | None) -> Iterator[Slab]:
    """Divide a message of `nbytes` of plaintext into slabs of these sizes, or into one."""
    start = 0
    for size in sizes or [nbytes]:
        stop = min(start + size, nbytes)
        # A last chunk that is empty belongs to the slab before it.
        first = start // CHUNK_SIZE
        yield Slab(first, start, stop, cobblestone.segment_size(first, stop - start, nbytes))
        if stop == nbytes:
            return
        start = stop


def gathers_of(pieces: GatherPlan, nbytes: int, sizes: Sizes) -> Iterator[Slab]:
    """Divide a gather from a message of `nbytes` of plaintext into slabs whose chunks and plan fit into a buffer.

    The device puts the plan behind the chunks, sealed and then opened. A slab thus takes its chunks, padded to a
    multiple of 16 bytes, and twice the plan: three words for each range, one for the number of each chunk, and one for
    the start of each chunk and for the end. A chunk with too many ranges for one slab is in several slabs.
    """
    chunks, starts, table = pieces.chunks, pieces.starts, pieces.table
    sealed = np.minimum(cobblestone.ciphertext_size(nbytes) - chunks * SEALED_CHUNK_SIZE, SEALED_CHUNK_SIZE)
    fixed = sealed + -sealed % 16 + _CHUNK
    before = np.concatenate([[0], np.cumsum(fixed + _PIECE * np.diff(starts))])  # bytes of the chunks before each
    chunk = piece = 0
    for size in sizes:
        if chunk == chunks.size:
            return
        room = cobblestone.ciphertext_size(max(size, 2 * CHUNK_SIZE)) - _MARGIN
        done = before[chunk] + _PIECE * (piece - starts[chunk])
        after = int(np.searchsorted(before, done + room, side="right")) - 1
        if after > chunk:
            end = int(starts[after])
        else:
            after, end = chunk + 1, piece + (room - int(fixed[chunk])) // _PIECE
        starts_here = np.clip(starts[chunk : after + 1], piece, end) - piece
        plan = GatherPlan(chunks[chunk:after], starts_here, table[piece:end])
        yield Slab(0, 0, nbytes, int(sealed[chunk:after].sum()), plan)
        chunk, piece = after if end == starts[after] else chunk, end
