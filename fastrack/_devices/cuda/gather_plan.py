"""Seal the plans of gathers for their way to a device, under a key that seals nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastrack._crypto.base import Bytes, Engine, GatherPlan
from fastrack._crypto.cobblestone import CHUNK_SIZE, TAG_SIZE, MessageKey


@dataclass(frozen=True, slots=True)
class SealedPlan:
    """Hold a sealed plan as it lies in a slot, and name where the device opens it.

    Attributes
    ----------
    sealed : numpy.ndarray
        Its chunks.
    start, end : int
        The bytes of the slot that these take.
    opened : int
        Where in the slot's memory on the device the opened plan begins: numbers of chunks, starts and table.
    first, count : int
        The number of the first chunk, and how many there are.
    size : int
        Bytes of the opened plan.
    """

    sealed: Bytes
    start: int
    first: int
    count: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.sealed.size

    @property
    def opened(self) -> int:
        return align(self.end)


class PlanSealer:
    """Seal the plans of the gathers out of one message, as chunks that are numbered through.

    Parameters
    ----------
    engine : Engine
        What seals.
    key : MessageKey
        A key for these plans alone: the key of the message would seal different plans under the same nonce.
    """

    def __init__(self, engine: Engine, key: MessageKey) -> None:
        self._engine = engine
        self._schedule = engine.expand_key(key)
        self._next = 0

    def seal(self, pieces: GatherPlan, behind: int) -> SealedPlan:
        """Seal a plan that goes behind as many bytes of chunks in its slot."""
        parts = [part.reshape(-1) for part in (pieces.chunks, pieces.starts, pieces.table)]
        plain = np.concatenate(parts).view(np.uint8)
        plan = SealedPlan(
            np.empty(_sealed_size(plain.size), np.uint8), align(behind), self._next, _chunks(plain.size), plain.size
        )
        self._next += plan.count  # first: after an error or an interrupt no other plan takes these numbers
        self._engine.seal_run(self._schedule, plain, plan.sealed, plan.first)
        return plan

    def wipe(self) -> None:
        """Wipe the key's schedule: nothing is sealed any more."""
        self._schedule.wipe()


def room_for(pieces: GatherPlan, behind: int) -> int:
    """Count the bytes of a slot that so many bytes of chunks take together with their plan, sealed and opened."""
    size = pieces.chunks.nbytes + pieces.starts.nbytes + pieces.table.nbytes
    return align(align(behind) + _sealed_size(size)) + size


def align(size: int, boundary: int = 16) -> int:
    """Round up to where the next thing may start."""
    return -(-size // boundary) * boundary


def _chunks(size: int) -> int:
    return -(-size // CHUNK_SIZE)


def _sealed_size(size: int) -> int:
    return size + TAG_SIZE * _chunks(size)
