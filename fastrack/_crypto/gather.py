"""Make and check gather plans.

The loops are here, for numba to compile (`jit_host`). Where it compiles nothing they run as they are.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fastrack._crypto.cobblestone import CHUNK_SIZE
from fastrack._crypto.forms import is_compiling
from fastrack._crypto.library import Unit, load

PLANS = Unit("fastrack._crypto.jit_host", "build_plans")

Words = npt.NDArray[np.int64]


def make_plan(starts: Words, sizes: Words, offsets: Words) -> tuple[Words, Words, Words]:
    """Split ranges of plaintext at chunk boundaries, sort them by chunk, and return the arrays of a `GatherPlan`.

    Range `i` has `sizes[i]` bytes from `starts[i]` on, and is copied to `offsets[i]` in the result; all are int64 (n,).
    Ranges that are adjacent in the message and in the result are merged before.
    """
    ranges = tuple(np.ascontiguousarray(array, np.int64) for array in (starts, sizes, offsets))
    if not starts.size == sizes.size == offsets.size:
        raise ValueError(f"expected one size and offset for each start, got {[array.size for array in ranges]}")
    loops = _loops()
    count = loops.count_pieces(*ranges, starts.size)
    numbers, table = np.empty(count, np.int64), np.empty((count, 3), np.int64)
    chunks, firsts = np.empty(count, np.int64), np.empty(count + 1, np.int64)
    if not loops.fill_plan(*ranges, starts.size, numbers, table, count):
        order = np.argsort(numbers, kind="stable")
        numbers, table = numbers[order], table[order]
    unique = loops.group(numbers, chunks, firsts, count)
    return chunks[:unique], firsts[: unique + 1], table


def is_inside(chunks: Words, starts: Words, table: Words, count: int, plain: int, target: int) -> bool:
    """Return whether a plan of valid dtypes and shapes stays inside its message of `count` chunks and its result.

    Its arrays are contiguous.
    """
    return bool(_loops().is_plan_inside(chunks, starts, table, chunks.size, len(table), count, plain, target))


@cache
def _loops() -> Any:
    return load(PLANS) if is_compiling() else sys.modules[__name__]


# The loops. Arrays are followed by their lengths, as compiled code has their addresses only.


def count_pieces(starts: Any, sizes: Any, offsets: Any, ranges: int) -> int:
    """Return the number of rows of a plan's table."""
    count = 0
    index = 0
    while index < ranges:
        after, size = merge(starts, sizes, offsets, index)
        if size > 0:
            count += (starts[index] + size - 1) // CHUNK_SIZE - starts[index] // CHUNK_SIZE + 1
        index = after
    return count


def fill_plan(starts: Any, sizes: Any, offsets: Any, ranges: int, numbers: Any, table: Any, _pieces: int) -> bool:
    """Write the numbers of the chunks, and the rows of the table; return whether the numbers ascend."""
    ascending = True
    row = 0
    index = 0
    while index < ranges:
        after, size = merge(starts, sizes, offsets, index)
        start, stop = starts[index], starts[index] + size
        while start < stop:
            number = start // CHUNK_SIZE
            length = min(stop, (number + 1) * CHUNK_SIZE) - start
            numbers[row] = number
            ascending = ascending and (row == 0 or number >= numbers[row - 1])
            table[row, 0] = start - number * CHUNK_SIZE
            table[row, 1] = offsets[index] + start - starts[index]
            table[row, 2] = length
            start += length
            row += 1
        index = after
    return ascending


def group(numbers: Any, chunks: Any, firsts: Any, pieces: int) -> int:
    """Write each chunk of ascending numbers once, and the first row of each; return the number of chunks."""
    unique = 0
    for row in range(pieces):
        if row == 0 or numbers[row] != numbers[row - 1]:
            chunks[unique], firsts[unique] = numbers[row], row
            unique += 1
    firsts[unique] = pieces
    return unique


def is_plan_inside(
    chunks: Any, starts: Any, table: Any, size: int, rows: int, count: int, plain: int, target: int
) -> bool:
    """Return what `is_inside` does."""
    if starts[0] != 0 or starts[size] != rows:
        return False
    # All starts first: the table must not be read beyond its rows.
    for index in range(size):
        if starts[index] > starts[index + 1]:
            return False
    for index in range(size):
        chunk = chunks[index]
        if chunk < 0 or chunk >= count:
            return False
        inner = min(plain - chunk * CHUNK_SIZE, CHUNK_SIZE)
        for row in range(starts[index], starts[index + 1]):
            source, result, length = table[row, 0], table[row, 1], table[row, 2]
            # Differences only: the sum of two numbers of a plan may overflow.
            if source < 0 or result < 0 or length < 0 or source > inner - length or result > target - length:
                return False
    return True


def merge(starts: Any, sizes: Any, offsets: Any, index: int) -> Any:
    """Merge range `index` with those that continue it; return the index after them, and the merged size."""
    size = sizes[index]
    after = index + 1
    while after < starts.size and starts[after] == starts[index] + size and offsets[after] == offsets[index] + size:
        size += sizes[after]
        after += 1
    return after, size
