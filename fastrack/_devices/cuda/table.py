"""Tables of segments, which name the messages and chunks of a launch, and the destinations of their plaintext.

A table is a kernel parameter. It is part of the command that starts the kernel, and does not cross the bus with the
slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from struct import Struct
from typing import Final, NamedTuple

MAX_SEGMENTS: Final = 100  # of a launch; the parameters of a kernel take 4096 bytes at most
MAX_WIDENINGS: Final = 42  # segments of a launch that widens them
NUMBER_BITS: Final = 38  # of the chunk number in the name of a chunk

_SEGMENT = Struct("<4Q2I")
_WIDENING = Struct("<4Q2IQ11I4x")


class TableSegment(NamedTuple):
    """A row of a table: `Segment` in ``kernels/table.cuh``."""

    target: int  # address of the plaintext or, for a gather, of the result
    name: int  # from `name_of`, of the first chunk or, for a gather, of chunk 0
    size: int  # bytes of the plaintext or, for a gather, of the whole message
    limit: int  # number of chunks or, for a gather, bytes of the result
    start: int  # number of chunks in all earlier segments
    place: int  # offset of the chunks in the staging buffer, in units of 16 bytes


class Divisor(NamedTuple):
    """A divisor of numbers below 2^31, by a multiplication and a shift: `Divisor` in ``kernels/widen.cuh``."""

    value: int
    times: int
    shift: int

    @classmethod
    def of(cls, value: int) -> Divisor:
        """Return a divisor from 1 to 2^31.

        With the logarithm of the value, rounded up, above 31 bits, the error of the product is below one part in 2^31
        (Granlund and Montgomery, *Division by Invariant Integers using Multiplication*, theorem 4.2).
        """
        shift = 31 + (value - 1).bit_length()
        return cls(value, -(-(1 << shift) // value), shift)


class Widening(NamedTuple):
    """The rest of a row of a table whose segments are widened: `Widening` in ``kernels/widen.cuh``."""

    scales: int  # their address
    kind: int  # of the values, and of the scales
    scales_a_row: int
    columns: Divisor
    rows_a_scale: Divisor
    columns_a_scale: Divisor


def pack_table(segments: Sequence[TableSegment], widenings: Sequence[Widening] = ()) -> bytes:
    """Return the bytes of a table for the kernels, padded to a fixed size.

    Raise ValueError if there are more than `MAX_SEGMENTS` segments, or than `MAX_WIDENINGS` with widenings.
    """
    most = MAX_WIDENINGS if widenings else MAX_SEGMENTS
    if len(segments) > most:
        raise ValueError(f"packing a table failed: expected at most {most} segments, got {len(segments)}")
    if not widenings:
        return b"".join([_SEGMENT.pack(*segment) for segment in segments]).ljust(MAX_SEGMENTS * _SEGMENT.size, b"\0")
    rows = [
        _WIDENING.pack(*segment, *widening[:3], *chain(*widening[3:]))
        for segment, widening in zip(segments, widenings, strict=True)
    ]
    return b"".join(rows).ljust(MAX_WIDENINGS * _WIDENING.size, b"\0")


def name_of(message: int, chunk: int) -> int:
    """Return the name that the kernels report for a chunk."""
    return message << NUMBER_BITS | chunk


def parse_name(name: int) -> tuple[int, int]:
    """Return the message number and the chunk number in a name."""
    return name >> NUMBER_BITS, name & ((1 << NUMBER_BITS) - 1)
