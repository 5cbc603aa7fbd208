"""Tables of segments, which tell a launch the chunks of which messages it opens, and where their plaintext goes.

A table is a parameter of its kernel: as the addresses of one message would be, it is part of the command that starts
the kernel, and does not cross the bus with the slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

MAX_SEGMENTS: Final = 100  # of a launch; the parameters of a kernel take 4096 bytes at most
NUMBER_BITS: Final = 38  # of the number of a chunk, in the name of a chunk

_SEGMENT = Struct("<4Q2I")
_SIZE: Final = MAX_SEGMENTS * _SEGMENT.size


class TableSegment(NamedTuple):
    """A row of a table: `Segment` in ``kernels/table.cuh``."""

    target: int  # the address of its plaintext or, for a gather, of the result
    name: int  # of its first chunk or, for a gather, of chunk 0, by `name_of`
    size: int  # bytes of its plaintext or, for a gather, of the whole message
    limit: int  # number of its chunks or, for a gather, bytes of the result
    start: int  # number of chunks in the segments before it
    place: int  # offset of its chunks in the staging buffer, in units of 16 bytes


def pack_table(segments: Sequence[TableSegment]) -> bytes:
    """Return a table as the kernels take it, which is always of the same size.

    Raise ValueError if it has no room for so many segments.
    """
    if len(segments) > MAX_SEGMENTS:
        raise ValueError(f"packing a table failed: expected at most {MAX_SEGMENTS} segments, got {len(segments)}")
    return b"".join([_SEGMENT.pack(*segment) for segment in segments]).ljust(_SIZE, b"\0")


def name_of(message: int, chunk: int) -> int:
    """Return the name of a chunk, by which the kernels report it."""
    return message << NUMBER_BITS | chunk


def parse_name(name: int) -> tuple[int, int]:
    """Return the numbers of the message and of the chunk."""
    return name >> NUMBER_BITS, name & ((1 << NUMBER_BITS) - 1)
