"""The kernel launches of a slab: groups of its segments, after checks that the kernels rely on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fastrack._crypto.base import Messages
from fastrack._crypto.cobblestone import chunks_between
from fastrack._crypto.gather import GatherPlan
from fastrack._devices.base import Segment, Slab
from fastrack._devices.cuda.gather_plan import join_plans
from fastrack._devices.cuda.table import MAX_SEGMENTS, TableSegment, name_of, pack_table
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE, ciphertext_size

SPREAD = 1024  # range of message numbers in a launch: their keys are on the device together


@dataclass(slots=True)
class Launch:
    """Segments of messages that have keys of the same size: runs, or gathers with their plans."""

    bits: int
    is_gather: bool
    first: int  # message
    last: int = 0
    count: int = 0  # of chunks
    rows: list[TableSegment] = field(default_factory=list)
    plans: list[GatherPlan] = field(default_factory=list)

    @property
    def table(self) -> bytes:
        return pack_table(self.rows)

    @property
    def plan(self) -> GatherPlan:
        """The plan of all gathers."""
        return join_plans(self.plans)

    def fits(self, bits: int, segment: Segment) -> bool:
        """Return whether a segment can be added."""
        same = (self.bits, self.is_gather) == (bits, segment.plan is not None)
        return same and len(self.rows) < MAX_SEGMENTS and self.last <= segment.message < self.first + SPREAD

    def add(self, segment: Segment, count: int, pointer: int, nbytes: int) -> None:
        """Add a segment of `count` chunks, whose message fills `nbytes` at `pointer`."""
        number, first, start, stop, _, offset, plan = segment
        if plan is None:
            row = TableSegment(pointer + start, name_of(number, first), stop - start, count, self.count, offset // 16)
        else:
            row = TableSegment(pointer, name_of(number, 0), stop, nbytes, self.count, offset // 16)
            self.plans.append(plan)
        self.rows.append(row)
        self.count += count
        self.last = number


def launches_of(slab: Slab, messages: Messages, size: int) -> list[Launch]:
    """Return the launches that open a slab in a staging buffer of `size` bytes.

    Raise ValueError if a segment reaches outside its message, its array or the buffer.
    """
    launches: list[Launch] = []
    end = 0
    for segment in slab.segments:
        number, plan = segment.message, segment.plan
        memory, bits = messages.memories[number], messages.keys.bits[number]
        end = _check_place(segment, end, slab.sealed_size, size)
        if plan is None:
            count = check_run(segment, messages)
        else:
            count = _check_gather(segment, plan, messages)
            if not count:
                continue
        if not launches or not launches[-1].fits(bits, segment):
            launches.append(Launch(bits, plan is not None, number))
        launches[-1].add(segment, count, memory.address, memory.size)
    return launches


def check_run(segment: Segment, messages: Messages) -> int:
    """Check that a run is within its message and its array, and return its number of chunks."""
    number, first, start, stop, size, _, _ = segment
    count = chunks_between(size, stop - start, first)
    sealed = messages.sealed[number]
    fits = stop <= messages.memories[number].size
    fits = fits and (sealed is None or first * SEALED_CHUNK_SIZE + size <= sealed.size)
    if start != first * CHUNK_SIZE or not fits:
        raise ValueError(f"a slab reaches outside its message or its array: {segment}")
    return count


def _check_place(segment: Segment, end: int, limit: int, size: int) -> int:
    """Check that a segment begins after `end`, the end of the previous segment, and return its own end."""
    stop = segment.offset + segment.sealed_size
    if segment.offset % 16 or segment.offset < end or not stop <= limit <= size:
        raise ValueError(f"a segment reaches outside its staging buffer, or does not fit: {segment}")
    return stop


def _check_gather(segment: Segment, plan: GatherPlan, messages: Messages) -> int:
    """Check that a gather is within its message and its result, and return its number of chunks."""
    number, stop = segment.message, segment.stop
    whole = ciphertext_size(stop)
    plan.locate(whole, stop, messages.memories[number].size)
    count = int(plan.chunks.size)
    sealed = messages.sealed[number]
    if sealed is not None and sealed.size != whole:
        raise ValueError("a gather is not given the message that its chunks are of")
    sizes = np.minimum(stop - plan.chunks * CHUNK_SIZE, CHUNK_SIZE) + TAG_SIZE
    needed = int((np.arange(count) * SEALED_CHUNK_SIZE + sizes).max()) if count else 0
    if needed > segment.sealed_size:
        raise ValueError("a gather does not fit into its staging buffer, with its plan behind its chunks")
    if sealed is not None and count and needed != segment.sealed_size:
        raise ValueError("chunks of a gather are not side by side")
    return count
