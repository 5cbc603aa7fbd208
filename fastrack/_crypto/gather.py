"""Plans of gathers, made and checked in one native call each. Importing this imports numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastrack._crypto.cobblestone import CHUNK_SIZE
from fastrack._crypto.jit import compiled


def _cut(starts: Any, sizes: Any, places: Any) -> Any:
    """Cut ranges of plaintext at the chunks, and sort the pieces by chunk: the three arrays of `Pieces`.

    Ranges that follow each other in the message and in the result are one before they are cut.

    Parameters
    ----------
    starts, sizes, places : numpy.ndarray
        int64 (n,). Range `i` has `sizes[i]` bytes from `starts[i]` on, and goes to `places[i]` in the result.
    """
    count = 0
    last = np.int64(-1)
    ascending = True
    index = 0
    while index < starts.size:
        after, size = _join(starts, sizes, places, index)
        if size > 0:
            first = starts[index] // CHUNK_SIZE
            ascending = ascending and first >= last
            last = (starts[index] + size - 1) // CHUNK_SIZE
            count += last - first + 1
        index = after

    numbers = np.empty(count, np.int64)
    table = np.empty((count, 3), np.int64)
    row = 0
    index = 0
    while index < starts.size:
        after, size = _join(starts, sizes, places, index)
        start, stop = starts[index], starts[index] + size
        while start < stop:
            number = start // CHUNK_SIZE
            length = min(stop, (number + 1) * CHUNK_SIZE) - start
            numbers[row] = number
            table[row, 0] = start - number * CHUNK_SIZE
            table[row, 1] = places[index] + start - starts[index]
            table[row, 2] = length
            start += length
            row += 1
        index = after

    if not ascending:
        order = np.argsort(numbers, kind="mergesort")
        numbers = numbers[order]
        table = table[order]

    chunks = np.empty(count, np.int64)
    heads = np.empty(count + 1, np.int64)
    found = 0
    for row in range(count):
        if row == 0 or numbers[row] != numbers[row - 1]:
            chunks[found] = numbers[row]
            heads[found] = row
            found += 1
    heads[found] = count
    return chunks[:found], heads[: found + 1], table


def _is_inside(chunks: Any, starts: Any, table: Any, count: int, plain: int, target: int) -> bool:
    """Whether a plan of the right types and sizes stays inside its message of `count` chunks and its result."""
    if starts[0] != 0 or starts[chunks.size] != len(table):
        return False
    # First all starts: the table must not be read where it has no rows.
    for index in range(chunks.size):
        if starts[index] > starts[index + 1]:
            return False
    for index in range(chunks.size):
        chunk = chunks[index]
        if chunk < 0 or chunk >= count:
            return False
        inner = min(plain - chunk * CHUNK_SIZE, CHUNK_SIZE)
        for row in range(starts[index], starts[index + 1]):
            offset, place, length = table[row, 0], table[row, 1], table[row, 2]
            # No sums here: two numbers of a plan may add up to less than nothing.
            if offset < 0 or place < 0 or length < 0 or offset > inner - length or place > target - length:
                return False
    return True


def _joined(starts: Any, sizes: Any, places: Any, index: int) -> Any:
    """The range that starts at `index` with those that continue it: the index after them, and its size."""
    size = sizes[index]
    after = index + 1
    while after < starts.size and starts[after] == starts[index] + size and places[after] == places[index] + size:
        size += sizes[after]
        after += 1
    return after, size


_join = compiled(_joined)
cut = compiled(_cut)
is_inside = compiled(_is_inside)
