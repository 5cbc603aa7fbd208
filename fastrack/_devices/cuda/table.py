"""Tables of segments, which name the messages and chunks of a launch, and the destinations of their plaintext.

A table is a kernel parameter. It is part of the command that starts the kernel, and does not cross the bus with the
slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from struct import Struct
from typing import Final, NamedTuple

from fastrack._crypto.base import Scaling

MAX_SEGMENTS: Final = 100  # of a launch; the parameters of a kernel take 4096 bytes at most
MAX_WIDENINGS: Final = 42  # segments of a launch that widens them
NUMBER_BITS: Final = 38  # of the chunk number in the name of a chunk

_VALUES: Final = {"F8_E4M3": 0, "F8_E5M2": 1, "I8": 2}
_SCALES: Final = {"F32": (0, 4), "BF16": (16, 2)}  # flag and bytes
_MOST: Final = 1 << 30  # of a divisor: with a chunk's values, a number that is divided stays below 2^31
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


def widening_of(scaling: Scaling, nbytes: int) -> Widening:
    """Return the widening of a message of `nbytes` values.

    Raise ValueError if the kernels do not know the dtypes, or if there are fewer scales than the values need.
    """
    if scaling.values not in _VALUES or scaling.dtype not in _SCALES:
        raise ValueError(f"the kernels cannot widen {scaling.values} with scales of {scaling.dtype}")
    flag, size = _SCALES[scaling.dtype]
    columns, rows_a_scale, columns_a_scale = scaling.columns, scaling.rows_a_scale, scaling.columns_a_scale
    if min(columns, rows_a_scale, columns_a_scale) < 1:
        raise ValueError(f"scales of {rows_a_scale} rows and {columns_a_scale} of {columns} columns are none")
    rows, scales_a_row = -(-nbytes // columns), -(-columns // columns_a_scale)
    needed = -(-rows // rows_a_scale) * scales_a_row
    if needed * size > scaling.memory.size or scaling.memory.address % size or needed >> 32:
        raise ValueError(f"values need {needed} scales of {size} bytes, which are not in their memory")
    # Kernels are faster where 16 values always share a scale, and no divisor may be larger than needed.
    divisors = (columns, min(rows_a_scale, rows), min(columns_a_scale, columns)) if needed > 1 else (_MOST,) * 3
    if max(divisors) > _MOST:
        raise ValueError(f"the kernels widen at most {_MOST} columns, got {columns}, and as many rows of one scale")
    return Widening(scaling.memory.address, _VALUES[scaling.values] | flag, scales_a_row, *map(Divisor.of, divisors))


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
