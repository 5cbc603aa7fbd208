"""Expansion of a message key into the state that the CUDA kernels read, by integer arithmetic, for any CPU.

No table is looked up and no branch depends on a secret. Secrets are only in the target, and in registers and on the
stack, which are overwritten; nothing is allocated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from fastrack._crypto.cobblestone import CHUNK_SIZE, NONCE_SIZE
from fastrack._crypto.native.compiler import compiled_with_lock
from fastrack._crypto.native.jit import Array, copy_bytes, isolate_frame, pointer_to, wipe, wipe_stack
from fastrack._devices.cuda.key_state import (
    LAST_POWER,
    LENGTH_OFFSET,
    NONCE_OFFSET,
    POWERS_OFFSET,
    STATE_SIZE,
)

_compiled = compiled_with_lock
_pointer_32, _pointer_64 = pointer_to(types.uint32), pointer_to(types.uint64)

# All integers are unsigned, of 64 bits: numba converts mixed signed and unsigned ones to floats. AES works on eight
# bytes at a time.
_0, _1, _2, _7, _8, _24, _32 = (np.uint64(number) for number in (0, 1, 2, 7, 8, 24, 32))
_BYTES = np.uint64(0x0101010101010101)
_LOW_7 = np.uint64(0x7F7F7F7F7F7F7F7F)
_REDUCTION, _AFFINE = np.uint64(0x1B), np.uint64(0x63) * _BYTES
_ALL = np.uint64(0xFF)
_WORD = np.uint64(0xFFFFFFFF)
_ROWS = tuple(np.uint64(0xFF << 8 * row) for row in range(4))
_UPPER_3 = np.uint64(0x00FFFFFF00FFFFFF)
_HOLES = tuple(np.uint64(0x1111111111111111 << shift) for shift in range(4))
_FULL = np.uint64(8 * CHUNK_SIZE)


def build_portable() -> dict[str, Any]:
    """Return `write_state_portably(material, size, target)`, for a message key of `size` bytes."""
    return {"write_state_portably": write}


@_compiled
def write(material: Array, size: int, target: Array) -> None:
    _write(material, size - NONCE_SIZE, target)
    wipe_stack()


@_compiled
def _write(material: Array, key_size: int, target: Array) -> None:
    isolate_frame()
    wipe(target, STATE_SIZE)
    copy_bytes(target, material, key_size)
    copy_bytes(target + NONCE_OFFSET, material + key_size, NONCE_SIZE)
    rounds = key_size // 4 + 6
    _expand(carray(_pointer_32(target), (4 * (rounds + 1),)), key_size // 4)
    low, high = _hash_key(carray(_pointer_64(target), (2 * (rounds + 1),)), rounds)

    field = carray(_pointer_64(target + LENGTH_OFFSET), (2,))
    powers = carray(_pointer_64(target + POWERS_OFFSET), (2 * (LAST_POWER + 1),))
    field[0], field[1] = _product(_FULL, _0, low, high)
    powers[2], powers[3] = low, high
    count = 1
    while count < LAST_POWER:
        low, high = powers[2 * count], powers[2 * count + 1]
        for exponent in range(1, min(count, LAST_POWER - count) + 1):
            index = 2 * (count + exponent)
            powers[index], powers[index + 1] = _product(powers[2 * exponent], powers[2 * exponent + 1], low, high)
        count *= 2


@_compiled
def _expand(schedule: Any, key_words: int) -> None:
    constant = _1
    for index in range(key_words, schedule.size):
        word = np.uint64(schedule[index - 1])
        if index & (key_words - 1) == 0:
            word = _substitute(word) & _WORD
            word = (word >> _8 | word << _24) & _WORD ^ constant
            constant = _double(constant)
        elif key_words == 8 and index % 8 == 4:
            word = _substitute(word) & _WORD
        schedule[index] = np.uint64(schedule[index - key_words]) ^ word


@_compiled
def _hash_key(keys: Any, rounds: int) -> Any:
    """Encrypt a block of zeros, and return it as a big-endian number, divided by x."""
    a, b = keys[0], keys[1]  # two columns each
    for step in range(1, rounds + 1):
        a, b = _shift_rows(_substitute(a), _substitute(b))
        if step < rounds:
            a, b = _mix_columns(a), _mix_columns(b)
        a ^= keys[2 * step]
        b ^= keys[2 * step + 1]
    low, high = _swap_bytes(b), _swap_bytes(a)
    carry = _0 - (high >> np.uint64(63))
    return (low << _1) ^ (carry & _1), (high << _1 | low >> np.uint64(63)) ^ (carry & np.uint64(0xC2 << 56))


@_compiled
def _shift_rows(a: Any, b: Any) -> Any:
    c = (a & _WORD, a >> _32, b & _WORD, b >> _32)
    first = c[0] & _ROWS[0] | c[1] & _ROWS[1] | c[2] & _ROWS[2] | c[3] & _ROWS[3]
    second = c[1] & _ROWS[0] | c[2] & _ROWS[1] | c[3] & _ROWS[2] | c[0] & _ROWS[3]
    third = c[2] & _ROWS[0] | c[3] & _ROWS[1] | c[0] & _ROWS[2] | c[1] & _ROWS[3]
    fourth = c[3] & _ROWS[0] | c[0] & _ROWS[1] | c[1] & _ROWS[2] | c[2] & _ROWS[3]
    return first | second << _32, third | fourth << _32


@_compiled
def _mix_columns(columns: Any) -> Any:
    once = _next_row(columns)
    twice = _next_row(once)
    return _double(columns ^ once) ^ once ^ twice ^ _next_row(twice)


@_compiled
def _next_row(columns: Any) -> Any:
    return columns >> _8 & _UPPER_3 | columns << _24 & ~_UPPER_3


@_compiled
def _substitute(b: Any) -> Any:
    """Apply the S-box (FIPS 197, section 5.1.1): b^254 in GF(2^8), then an affine map."""
    b2 = _times(b, b)
    b3 = _times(b2, b)
    b6 = _times(b3, b3)
    b12 = _times(b6, b6)
    power = _times(b12, b3)
    for _ in range(4):
        power = _times(power, power)
    inverse = _times(_times(power, b12), b2)
    rotated = inverse
    for _ in range(4):
        rotated = (rotated & _LOW_7) << _1 | rotated >> _7 & _BYTES
        inverse ^= rotated
    return inverse ^ _AFFINE


@_compiled
def _times(a: Any, b: Any) -> Any:
    product = _0
    for _ in range(8):
        product ^= a & (b & _BYTES) * _ALL
        b >>= _1
        a = _double(a)
    return product


@_compiled
def _double(b: Any) -> Any:
    return (b & _LOW_7) << _1 ^ (b >> _7 & _BYTES) * _REDUCTION


# The field of GHASH, by the method of Pornin, BearSSL, ghash_ctmul64: integer products of words with holes. Only their
# low halves are correct; the high halves are low halves of products of the reversed words.


@_compiled
def _product(a0: Any, a1: Any, b0: Any, b1: Any) -> Any:
    """Multiply in the field, low word first. The second factor is divided by x."""
    ra0, ra1, rb0, rb1 = _reverse(a0), _reverse(a1), _reverse(b0), _reverse(b1)
    low, high = _carryless(a0, b0), _carryless(a1, b1)
    crossed = _carryless(a0 ^ a1, b0 ^ b1) ^ low ^ high
    upper_low, upper_high = _carryless(ra0, rb0), _carryless(ra1, rb1)
    upper_crossed = _carryless(ra0 ^ ra1, rb0 ^ rb1) ^ upper_low ^ upper_high
    p0 = low
    p1 = crossed ^ _reverse(upper_low) >> _1
    p2 = high ^ _reverse(upper_crossed) >> _1
    p3 = _reverse(upper_high) >> _1
    # The low half holds x^128 and up: x^128 = x^7 + x^2 + x + 1. Its overflow past the end is reduced first.
    p1 ^= _overflow(p0)
    return p2 ^ p0 ^ p0 >> _1 ^ p0 >> _2 ^ p0 >> _7 ^ _overflow(p1), p3 ^ p1 ^ p1 >> _1 ^ p1 >> _2 ^ p1 >> _7


@_compiled
def _overflow(word: Any) -> Any:
    return word << np.uint64(63) ^ word << np.uint64(62) ^ word << np.uint64(57)


@_compiled
def _carryless(x: Any, y: Any) -> Any:
    """Return the low 64 bits of the carry-less product."""
    x0, x1, x2, x3 = x & _HOLES[0], x & _HOLES[1], x & _HOLES[2], x & _HOLES[3]
    y0, y1, y2, y3 = y & _HOLES[0], y & _HOLES[1], y & _HOLES[2], y & _HOLES[3]
    z0 = (x0 * y0) ^ (x1 * y3) ^ (x2 * y2) ^ (x3 * y1)
    z1 = (x0 * y1) ^ (x1 * y0) ^ (x2 * y3) ^ (x3 * y2)
    z2 = (x0 * y2) ^ (x1 * y1) ^ (x2 * y0) ^ (x3 * y3)
    z3 = (x0 * y3) ^ (x1 * y2) ^ (x2 * y1) ^ (x3 * y0)
    return z0 & _HOLES[0] | z1 & _HOLES[1] | z2 & _HOLES[2] | z3 & _HOLES[3]


# Numbers of bits, and the masks of every other group of so many bits.
_SWAPS = tuple((np.uint64(bits), np.uint64((2**64 - 1) // (2**bits + 1))) for bits in (1, 2, 4, 8, 16))


@_compiled
def _reverse(word: Any) -> Any:
    """Reverse the bits."""
    for bits, mask in _SWAPS:
        word = word >> bits & mask | (word & mask) << bits
    return word >> _32 | word << _32


@_compiled
def _swap_bytes(word: Any) -> Any:
    for bits, mask in _SWAPS[3:]:
        word = word >> bits & mask | (word & mask) << bits
    return word >> _32 | word << _32
