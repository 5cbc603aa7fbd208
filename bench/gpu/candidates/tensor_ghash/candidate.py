"""Extend a state by what GHASH on the tensor cores needs: powers of H for groups of blocks, and a matrix of bits."""

import numpy as np

_POWERS = 272  # where power 0 lies in a state; powers are divided by x, and little-endian words
_GROUP = 32  # blocks

EDITS = {
    "fastrack.cu": [
        ("STATE_BYTES 8704", "STATE_BYTES 74752"),
        ("FASTRACK_SHARED_BYTES 66400", "FASTRACK_SHARED_BYTES 74112"),
        ("GATHER_SHARED_BYTES 82784", "GATHER_SHARED_BYTES 90496"),
        ('#include "chunk.cuh"', '#include "mma.cuh"\n#include "chunk.cuh"'),
    ]
}


def extend_state(state):
    """Append H^(1 + 32 n) for n from 0 to 31, and the matrix by which a group's bits are multiplied."""
    powers = _group_powers(state)
    return bytes(state) + powers + _matrix(state).tobytes()


def _power(state, exponent):
    place = _POWERS + 16 * exponent
    return int.from_bytes(state[place : place + 16], "little")


def _group_powers(state):
    """H^(1 + 32 n), divided by x. A state has powers up to 513, so the later half are products."""
    found = []
    for n in range(32):
        exponent = 1 + _GROUP * n
        if exponent <= 513:
            found.append(_power(state, exponent))
        else:
            found.append(_product(_power(state, exponent - 512), _power(state, 512)))
    return b"".join(power.to_bytes(16, "little") for power in found)


def _product(a, b):
    """Multiply two elements that are divided by x; so is the product."""
    total = 0
    b = _times_x(b)  # the true second factor
    for place in range(127, -1, -1):
        total ^= b if a >> place & 1 else 0
        b = _times_x(b)
    return total


def _times_x(a):
    """Multiply by x: one place down, and x^128 = x^7 + x^2 + x + 1 at the top."""
    return a >> 1 ^ (0xE1 << 120 if a & 1 else 0)


def _matrix(state):
    """The matrix, in the order in which the lanes of a warp read it: (slice, tile, half, lane, word).

    Column (block of the group, byte, bit) is what that bit, alone, adds to the sum: x^e H^(32 - block). Row n is bit n
    of that sum as a number. A lane gets the sums of 16 rows, by `mma.cuh`: they are chosen to lie side by side.
    """
    columns = np.empty((_GROUP, 128, 16), np.uint8)  # block, bit of the block as memory has it, bytes of the sum
    for block in range(_GROUP):
        element = _times_x(_power(state, _GROUP - block))
        for exponent in range(128):  # of x: byte exponent / 8, its highest bit first
            columns[block, exponent // 8 * 8 + 7 - exponent % 8] = np.frombuffer(
                element.to_bytes(16, "little"), np.uint8
            )
            element = _times_x(element)
    bits = np.unpackbits(columns, axis=2, bitorder="little")  # block, bit, row
    rows = bits.transpose(2, 0, 1).reshape(128, _GROUP, 4, 32)  # row, block, word, bit
    words = np.packbits(rows, axis=3, bitorder="little").view("<u4")[..., 0]  # row, block, word
    made = np.empty((8, 8, 2, 32, 4), "<u4")
    lane = np.arange(32)
    group, item = lane // 4, lane % 4
    for part in range(8):
        for tile in range(8):
            for half in range(2):
                for word in range(4):  # a.x, a.y, a.z, a.w
                    row = 16 * group + 2 * tile + word % 2
                    made[part, tile, half, :, word] = words[row, 4 * part + item, 2 * half + word // 2]
    return made
