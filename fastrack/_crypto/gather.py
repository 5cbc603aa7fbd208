"""Make and check gather plans, in one native call each. Importing this module imports numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastrack._crypto.cobblestone import CHUNK_SIZE
from fastrack._crypto.jit import compiled


@compiled
def make_plan(starts: Any, sizes: Any, offsets: Any) -> Any:
    """Split ranges of plaintext at chunk boundaries, sort them by chunk, and return the arrays of a `GatherPlan`.

    Range `i` has `sizes[i]` bytes from `starts[i]` on, and is copied to `offsets[i]` in the result; all are int64 (n,).
    Ranges that are adjacent in the message and in the result are merged before.
    """
    count = 0
    index = 0
    while index < starts.size:
        after, size = _merge(starts, sizes, offsets, index)
        if size > 0:
            count += (starts[index] + size - 1) // CHUNK_SIZE - starts[index] // CHUNK_SIZE + 1
        index = after

    numbers = np.empty(count, np.int64)
    table = np.empty((count, 3), np.int64)
    ascending = True
    row = 0
    index = 0
    while index < starts.size:
        after, size = _merge(starts, sizes, offsets, index)
        start, stop = starts[index], starts[index] + size
        while start < stop:
            number = start // CHUNK_SIZE
            length = min(stop, (number + 1) * CHUNK_SIZE) - start
            numbers[row] = number
            ascending = ascending and (row == 0 or number >= numbers[row - 1])
            table[row] = start - number * CHUNK_SIZE, offsets[index] + start - starts[index], length
            start += length
            row += 1
        index = after

    if not ascending:
        order = np.argsort(numbers, kind="mergesort")
        numbers, table = numbers[order], table[order]

    chunks = np.empty(count, np.int64)
    firsts = np.empty(count + 1, np.int64)
    unique = 0
    for row in range(count):
        if row == 0 or numbers[row] != numbers[row - 1]:
            chunks[unique], firsts[unique] = numbers[row], row
            unique += 1
    firsts[unique] = count
    return chunks[:unique], firsts[: unique + 1], table


@compiled
def is_inside(chunks: Any, starts: Any, table: Any, count: int, plain: int, target: int) -> bool:
    """Return whether a plan of valid dtypes and shapes stays inside its message of `count` chunks and its result."""
    if starts[0] != 0 or starts[chunks.size] != len(table):
        return False
    # All starts first: the table must not be read beyond its rows.
    for index in range(chunks.size):
        if starts[index] > starts[index + 1]:
            return False
    for index in range(chunks.size):
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


@compiled
def _merge(starts: Any, sizes: Any, offsets: Any, index: int) -> Any:
    """Merge range `index` with those that continue it; return the index after them, and the merged size."""
    size = sizes[index]
    after = index + 1
    while after < starts.size and starts[after] == starts[index] + size and offsets[after] == offsets[index] + size:
        size += sizes[after]
        after += 1
    return after, size
