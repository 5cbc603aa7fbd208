"""Tables of segments, which name the messages and chunks of a launch, and the destinations of their plaintext.

A table is a kernel parameter. It is part of the command that starts the kernel, and does not cross the bus with the
slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

MAX_SEGMENTS: Final = 100  # of a launch; the parameters of a kernel take 4096 bytes at most
NUMBER_BITS: Final = 38  # of the chunk number in the name of a chunk

_SEGMENT = Struct("<4Q2I")
_SIZE: Final = MAX_SEGMENTS * _SEGMENT.size


class TableSegment(NamedTuple):
    """A row of a table: `Segment` in ``kernels/table.cuh``."""

    target: int  # address of the plaintext or, for a gather, of the result
    name: int  # from `name_of`, of the first chunk or, for a gather, of chunk 0
    size: int  # bytes of the plaintext or, for a gather, of the whole message
    limit: int  # number of chunks or, for a gather, bytes of the result
    start: int  # number of chunks in all earlier segments
    place: int  # offset of the chunks in the staging buffer, in units of 16 bytes


def pack_table(segments: Sequence[TableSegment]) -> bytes:
    """Return the bytes of a table for the kernels, padded to a fixed size.

    Raise ValueError if there are more than `MAX_SEGMENTS` segments.
    """
    if len(segments) > MAX_SEGMENTS:
        raise ValueError(f"packing a table failed: expected at most {MAX_SEGMENTS} segments, got {len(segments)}")
    return b"".join([_SEGMENT.pack(*segment) for segment in segments]).ljust(_SIZE, b"\0")


def name_of(message: int, chunk: int) -> int:
    """Return the name that the kernels report for a chunk."""
    return message << NUMBER_BITS | chunk


def parse_name(name: int) -> tuple[int, int]:
    """Return the message number and the chunk number in a name."""
    return name >> NUMBER_BITS, name & ((1 << NUMBER_BITS) - 1)
