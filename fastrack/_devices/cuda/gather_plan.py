"""Sealing of gather plans for their upload, under the key of the link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastrack._crypto.base import Bytes
from fastrack._crypto.gather import GatherPlan
from fastrack._devices.cuda.link import LinkKey, sealed_size
from fastrack.format import CHUNK_SIZE


@dataclass(frozen=True, slots=True)
class SealedPlan:
    """A sealed plan in a staging buffer, and the location where the device opens it."""

    sealed: Bytes  # the sealed chunks of the plan
    start: int  # offset of the sealed chunks in the buffer
    first_chunk: int
    count: int  # of the sealed chunks
    size: int  # bytes of the opened plan
    pieces: int  # of the gather

    @property
    def end(self) -> int:
        """The end of the sealed chunks in the buffer."""
        return self.start + self.sealed.size

    @property
    def opened(self) -> int:
        """The offset of the opened plan in the buffer's device memory: chunk numbers, starts and table."""
        return align(self.end)


def seal_plan(key: LinkKey, plan: GatherPlan, offset: int) -> SealedPlan:
    """Seal a plan for a staging buffer, where it follows `offset` bytes of chunks and keys."""
    plain = np.concatenate([part.reshape(-1) for part in (plan.chunks, plan.starts, plan.table)]).view(np.uint8)
    sealed, count = np.empty(sealed_size(plain.size), np.uint8), -(-plain.size // CHUNK_SIZE)
    return SealedPlan(sealed, align(offset), key.seal(plain, sealed), count, plain.size, len(plan.table))


def join_plans(plans: Sequence[GatherPlan]) -> GatherPlan:
    """Return one plan for the chunks of several plans, in order."""
    if len(plans) == 1:
        return plans[0]
    ends = np.cumsum([len(plan.table) for plan in plans])
    starts = [plan.starts[:-1] + end - len(plan.table) for plan, end in zip(plans, ends, strict=True)]
    return GatherPlan(
        np.concatenate([plan.chunks for plan in plans]),
        np.concatenate([*starts, ends[-1:]]),
        np.concatenate([plan.table for plan in plans]),
    )


def room_for(plan: GatherPlan, offset: int) -> int:
    """Return the size of a staging buffer for `offset` bytes of chunks, their sealed plan and their opened plan."""
    size = plan.chunks.nbytes + plan.starts.nbytes + plan.table.nbytes
    return align(align(offset) + sealed_size(size)) + size


def align(size: int, boundary: int = 16) -> int:
    """Round a size up to a multiple of `boundary`."""
    return -(-size // boundary) * boundary
