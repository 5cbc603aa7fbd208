"""Make and check gather plans.

The loops are here, for numba to compile (`jit_host`). Where it compiles nothing they run as they are.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from fastrack._crypto.cobblestone import CHUNK_SIZE
from fastrack._crypto.forms import is_compiling
from fastrack._crypto.library import Unit, load

if TYPE_CHECKING:
    from fastrack._crypto.base import GatherPlan

PLANS = Unit("fastrack._crypto.jit_host", "build_plans")

Words = npt.NDArray[np.int64]

_DIGIT_BITS = 8
_DIGITS = 1 << _DIGIT_BITS  # of the numbers of chunks when they are sorted
_SCRATCH = _DIGITS  # words to count them in


class PlanMemory(NamedTuple):
    """The memory that a loop has filled with the arrays of a `GatherPlan`."""

    words: Words
    room: int  # that there was for rows
    chunks: int  # their number
    rows: int
    address: int  # of the words; 0 if it is unknown

    @classmethod
    def of(cls, words: Words, room: int) -> Self:
        """Return the memory after the loop."""
        return cls(words, room, int(words[0]), int(words[1]), int(words[2]))

    def arrays(self) -> tuple[Words, Words, Words]:
        """Return the chunks, the starts and the table."""
        chunks, starts, table = self._offsets()
        words, count = self.words, self.chunks
        table_of = words[table : table + 3 * self.rows].reshape(-1, 3)
        return words[chunks : chunks + count], words[starts : starts + count + 1], table_of

    def addresses(self) -> tuple[int, int, int]:
        """Return the addresses of these arrays."""
        address = self.address or int(self.words.__array_interface__["data"][0])
        chunks, starts, table = self._offsets()
        return address + 8 * chunks, address + 8 * starts, address + 8 * table

    def _offsets(self) -> tuple[int, int, int]:
        return _SCRATCH, _SCRATCH + self.room, _SCRATCH + 2 * self.room + 1


def make_plan(starts: Words, sizes: Words, offsets: Words) -> PlanMemory:
    """Split ranges of plaintext at chunk boundaries, sort them by chunk, and return the plan of their gather.

    Range `i` has `sizes[i]` bytes from `starts[i]` on, and is copied to `offsets[i]` in the result; all are int64 (n,).
    Ranges that are adjacent in the message and in the result are merged before.
    """
    ranges = tuple(np.ascontiguousarray(array, np.int64) for array in (starts, sizes, offsets))
    if not starts.size == sizes.size == offsets.size:
        raise ValueError(f"expected one size and offset for each start, got {[array.size for array in ranges]}")
    loops = _loops()
    room = loops.count_pieces(*ranges, starts.size)
    words = np.empty(memory_size(room), np.int64)
    loops.plan_ranges(*ranges, starts.size, words, room)
    return PlanMemory.of(words, room)


def make_even_plan(rows: Words, stride: int, size: int, order: Words | None = None) -> PlanMemory:
    """Return what `make_plan` does for ranges of one size, at these multiples of `stride`.

    They come to the multiples of `size` in the result that `order` has; without it, one after the other.
    """
    rows = np.ascontiguousarray(rows, np.int64)
    places = rows if order is None else np.ascontiguousarray(order, np.int64)
    if places.size != rows.size:
        raise ValueError(f"expected one place for each row, got {[rows.size, places.size]}")
    room = rows.size * ((size + CHUNK_SIZE - 2) // CHUNK_SIZE + 1) if size else 0
    words = np.empty(memory_size(room), np.int64)
    _loops().plan_rows(rows, places, order is not None, rows.size, stride, size, words, room)
    return PlanMemory.of(words, room)


def is_inside(plan: GatherPlan, count: int, plain: int, target: int) -> bool:
    """Return whether a sound plan stays inside its message of `count` chunks and its result."""
    loops = _loops()
    places = plan.arrays if loops is sys.modules[__name__] else plan.addresses
    return bool(loops.is_plan_inside(*places, plan.count, plan.rows, count, plain, target))


@cache
def _loops() -> Any:
    return load(PLANS) if is_compiling() else sys.modules[__name__]


# The loops. Arrays are followed by their lengths, as compiled code has their addresses only.


def memory_size(room: int) -> int:
    """Return the number of words that a plan takes while it is made, with room for so many rows of its table."""
    return _SCRATCH + 6 * room + 1


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


def plan_ranges(starts: Any, sizes: Any, offsets: Any, ranges: int, words: Any, room: int) -> None:
    """Fill memory as `finish` leaves it, with the plan of some ranges."""
    pieces = 0
    index = 0
    while index < ranges:
        after, size = merge(starts, sizes, offsets, index)
        pieces = split(starts[index], size, offsets[index], words, room, pieces)
        index = after
    finish(words, room, pieces)


def plan_rows(
    rows: Any, places: Any, has_places: bool, count: int, stride: int, size: int, words: Any, room: int
) -> None:
    """Fill memory as `finish` leaves it, with the plan of rows."""
    pieces = 0
    index = 0
    while index < count and size:
        after = index + 1
        while (
            after < count
            and (rows[after] - rows[after - 1]) * stride == size
            and (not has_places or places[after] - places[after - 1] == 1)
        ):
            after += 1
        place = places[index] if has_places else index
        pieces = split(rows[index] * stride, (after - index) * size, place * size, words, room, pieces)
        index = after
    finish(words, room, pieces)


def split(start: int, size: int, offset: int, words: Any, room: int, pieces: int) -> int:
    """Add the parts of a range to the table, and the number of the chunk of each; return the length of the table."""
    numbers, table = _SCRATCH + 5 * room + 1, _SCRATCH + 2 * room + 1
    stop = start + size
    while start < stop:
        number = start // CHUNK_SIZE
        length = min(stop, (number + 1) * CHUNK_SIZE) - start
        words[numbers + pieces] = number
        words[table + 3 * pieces] = start - number * CHUNK_SIZE
        words[table + 3 * pieces + 1] = offset
        words[table + 3 * pieces + 2] = length
        start += length
        offset += length
        pieces += 1
    return pieces


def finish(words: Any, room: int, pieces: int) -> None:
    """Sort the table by the numbers of chunks, and list each chunk once.

    The memory begins with the number of chunks, that of the rows, and zero. `_SCRATCH` words on are: the chunks, with
    room for so many; the first row of each in the table, and the end of the last; the table; and then the numbers of
    all rows.
    """
    chunks, starts, numbers = _SCRATCH, _SCRATCH + room, _SCRATCH + 5 * room + 1
    sort(words, room, pieces)
    unique = 0
    for row in range(pieces):
        number = words[numbers + row]
        if row == 0 or number != words[numbers + row - 1]:
            words[chunks + unique] = number
            words[starts + unique] = row
            unique += 1
    words[starts + unique] = pieces
    words[0], words[1], words[2] = unique, pieces, 0


def sort(words: Any, room: int, pieces: int) -> None:
    """Sort the rows of the table, stably and by a digit after the other, unless they are in order."""
    order, other = _SCRATCH, _SCRATCH + room
    numbers = _SCRATCH + 5 * room + 1
    highest = 0
    is_sorted = True
    for row in range(pieces):
        number = words[numbers + row]
        is_sorted = is_sorted and number >= highest
        highest = max(highest, number)
        words[order + row] = row
    shift = 0
    while not is_sorted and highest >> shift:
        for digit in range(_DIGITS):
            words[digit] = 0
        for row in range(pieces):
            words[(words[numbers + row] >> shift) % _DIGITS] += 1
        before = 0
        for digit in range(_DIGITS):
            count = words[digit]
            words[digit] = before
            before += count
        for place in range(pieces):
            row = words[order + place]
            digit = (words[numbers + row] >> shift) % _DIGITS
            words[other + words[digit]] = row
            words[digit] += 1
        order, other = other, order
        shift += _DIGIT_BITS
    for first in range(pieces):
        if words[order + first] != first:
            rotate(words, room, order, first)


def rotate(words: Any, room: int, order: int, first: int) -> None:
    """Move the rows of the table on that follow each other from `first` on, until one takes its place.

    Row `words[order + place]` comes to a place. The places that are done have their own number there afterwards.
    """
    table, numbers = _SCRATCH + 2 * room + 1, _SCRATCH + 5 * room + 1
    number = words[numbers + first]
    at = table + 3 * first
    start, target, length = words[at], words[at + 1], words[at + 2]
    place, row = first, words[order + first]
    while row != first:
        words[numbers + place] = words[numbers + row]
        for column in range(3):
            words[table + 3 * place + column] = words[table + 3 * row + column]
        words[order + place] = place
        place, row = row, words[order + row]
    words[order + place] = place
    words[numbers + place] = number
    at = table + 3 * place
    words[at], words[at + 1], words[at + 2] = start, target, length


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
