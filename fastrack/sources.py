"""What fills a slab: a sealed tensor's own bytes, rows of one, or a plain tensor that is sealed on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from fastrack import aead, cobblestone
from fastrack.aead import Bytes
from fastrack.cobblestone import MessageKey
from fastrack.devices import Slab
from fastrack.sealed import SealedRows, SealedTensor

__all__ = ["PlainSource", "RowSource", "SealedSource", "Source", "slabs_of"]


class Source(Protocol):
    """A message on its way to a device.

    Attributes
    ----------
    name : str or None
        What the tensor is called, for errors.
    in_place : bool
        Whether its ciphertext lies in host memory already.
    memory : numpy.ndarray
        What it reads.
    """

    name: str | None
    in_place: bool
    memory: Bytes

    def slabs(self, limit: int | None) -> Iterator[Slab]:
        """The slabs of the message, of at most `limit` bytes of plaintext; one for all of it if None."""

    def fill(self, slab: Slab, slot: Bytes | None) -> Bytes:
        """The slab's ciphertext: put into `slot`, or where it lies already if there is none."""

    def finish(self) -> None:
        """Wipe what is secret."""


class SealedSource:
    """A sealed tensor: its chunks go as they are."""

    in_place = True

    def __init__(self, sealed: SealedTensor) -> None:
        self.name: str | None = sealed.name
        self.memory = sealed.chunks
        self._nbytes = sealed.nbytes

    def slabs(self, limit: int | None) -> Iterator[Slab]:
        return slabs_of(self._nbytes, limit)

    def fill(self, slab: Slab, slot: Bytes | None) -> Bytes:
        start = slab.first * cobblestone.STRIDE
        here = self.memory[start : start + slab.sealed]
        if slot is None:
            return here
        np.copyto(slot[: slab.sealed], here)
        return slot[: slab.sealed]

    def finish(self) -> None:
        """Nothing is secret."""


class RowSource:
    """Rows of a sealed tensor: the chunks that hold them, each once.

    For devices that read ciphertext where it lies, which is what it gives: it packs nothing into a slot.
    """

    in_place = True

    def __init__(self, sealed: SealedRows) -> None:
        self.name: str | None = sealed.name
        self.memory = sealed.chunks
        self._pieces = sealed.pieces()
        self._nbytes = sealed.tensor.nbytes

    def slabs(self, limit: int | None) -> Iterator[Slab]:
        yield Slab(0, 0, self._nbytes, self.memory.size, self._pieces)

    def fill(self, slab: Slab, slot: Bytes | None) -> Bytes:
        assert slot is None
        return self.memory

    def finish(self) -> None:
        """Nothing is secret."""


class PlainSource:
    """A plain tensor in host memory, sealed chunk by chunk under a key that only this transfer has."""

    in_place = False

    def __init__(self, plain: Bytes, key: MessageKey, engine: aead.Engine) -> None:
        self.name: str | None = None
        self.memory = plain
        self._engine = engine
        self._schedule = engine.prepare(key)

    def slabs(self, limit: int | None) -> Iterator[Slab]:
        return slabs_of(self.memory.size, limit)

    def fill(self, slab: Slab, slot: Bytes | None) -> Bytes:
        assert slot is not None
        staged = slot[: slab.sealed]
        self._engine.seal_run(self._schedule, self.memory[slab.start : slab.stop], staged, slab.first)
        return staged

    def finish(self) -> None:
        self._schedule.wipe()


def slabs_of(nbytes: int, limit: int | None) -> Iterator[Slab]:
    """Cut a message of `nbytes` of plaintext into slabs of at most `limit`, or into one."""
    whole = max(cobblestone.CHUNK, -(-nbytes // cobblestone.CHUNK) * cobblestone.CHUNK)
    for first, size in cobblestone.runs(nbytes, limit or whole):
        start = first * cobblestone.CHUNK
        yield Slab(first, start, start + size, cobblestone.run_size(first, size, nbytes))
