"""The kernel launches of a slab: groups of its segments, after checks that the kernels rely on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from fastrack._crypto.base import Messages
from fastrack._crypto.cobblestone import chunks_between
from fastrack._crypto.gather import GatherPlan
from fastrack._devices.base import Segment, Slab
from fastrack._devices.cuda.table import MAX_SEGMENTS, MAX_WIDENINGS, TableSegment, Widening, name_of, widening_of
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE, ciphertext_size

Kind = Literal["open", "gather", "widen"]
"""The work of a kernel on segments: the first part of its name."""

SPREAD = 128  # range of message numbers in a launch, whose keys are on the device together; a power of two
_BF16_SIZE: Final = 2


@dataclass(slots=True)
class Launch:
    """Segments of messages that have keys of the same size: runs, gathers with their plans, or runs to be widened."""

    kind: Kind
    bits: int
    first: int  # message
    last: int = 0
    count: int = 0  # of chunks
    rows: list[TableSegment] = field(default_factory=list)
    plans: list[GatherPlan] = field(default_factory=list)
    widenings: list[Widening] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)  # of the rows
    keys: range = range(0)  # the wrapped keys that the launch takes, or has expanded before it

    def fits(self, kind: Kind, bits: int, message: int) -> bool:
        """Return whether a segment of a message can be added."""
        room = len(self.rows) < (MAX_WIDENINGS if kind == "widen" else MAX_SEGMENTS)
        return (self.kind, self.bits) == (kind, bits) and room and self.last <= message < self.first + SPREAD

    def add(self, segment: Segment, count: int, messages: Messages) -> None:
        """Add a segment of `count` chunks."""
        number, first, start, stop, _, offset, plan = segment
        memory, scaling = messages.memories[number], messages.scalings[number]
        if plan is None:
            target = memory.address + _width(messages, number) * start
            row = TableSegment(target, name_of(number, first), stop - start, count, self.count, offset // 16)
        else:
            row = TableSegment(memory.address, name_of(number, 0), stop, memory.size, self.count, offset // 16)
            self.plans.append(plan)
        if scaling is not None:
            self.widenings.append(widening_of(scaling, messages.nbytes[number]))
        self.rows.append(row)
        self.messages.append(number)
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
        kind, bits = _kind(segment, messages), messages.keys.bits[number]
        end = _check_place(segment, end, slab.sealed_size, size)
        if plan is None:
            count = check_run(segment, messages)
        else:
            count = _check_gather(segment, plan, messages)
            if not count:
                continue
        if not launches or not launches[-1].fits(kind, bits, number):
            launches.append(Launch(kind, bits, number))
        launches[-1].add(segment, count, messages)
    return launches


def check_run(segment: Segment, messages: Messages) -> int:
    """Check that a run is within its message and its array, and return its number of chunks."""
    number, first, start, stop, size, _, _ = segment
    count = chunks_between(size, stop - start, first)
    sealed, memory = messages.sealed[number], messages.memories[number]
    width = _width(messages, number)
    fits = width * stop <= memory.size and memory.address % width == 0
    fits = fits and (sealed is None or first * SEALED_CHUNK_SIZE + size <= sealed.size)
    if start != first * CHUNK_SIZE or not fits:
        raise ValueError(f"a slab reaches outside its message or its array: {segment}")
    return count


def _kind(segment: Segment, messages: Messages) -> Kind:
    if messages.scalings[segment.message] is None:
        return "open" if segment.plan is None else "gather"
    if segment.plan is not None:
        raise ValueError("values cannot be gathered and widened together")
    return "widen"


def _width(messages: Messages, number: int) -> int:
    """Return the bytes of the result for each byte of a message."""
    return 1 if messages.scalings[number] is None else _BF16_SIZE


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
