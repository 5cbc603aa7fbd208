"""Make and check gather plans.

The loops are here, and in the machine code (`native.kernels_plan`). Where there is none they run as they are.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastrack._crypto import native
from fastrack.format import CHUNK_SIZE

Words = npt.NDArray[np.int64]
PlanMemory = tuple[Words, int]
"""The memory that a loop has filled with the arrays of a `GatherPlan`, and the number of rows that it has room for."""

_WORD = np.dtype(np.int64)
_DIGIT_BITS = 8
_DIGITS = 1 << _DIGIT_BITS  # of the numbers of chunks when they are sorted
_SCRATCH = _DIGITS  # words to count them in

# What is left there at the end: the number of chunks, that of the rows, and the addresses of the arrays, or zeros.
COUNT, ROWS, PLACES = range(3)
HEAD = 5


class PlanArrays(NamedTuple):
    """The arrays of a `GatherPlan`."""

    chunks: Words
    starts: Words
    table: Words

    @property
    def is_sound(self) -> bool:
        """True if the arrays are contiguous, of int64, and of shapes that fit each other."""
        chunks, starts, table = self
        valid = all(array.dtype == np.int64 and array.flags.c_contiguous for array in self)
        valid = valid and (chunks.ndim, starts.ndim, table.ndim) == (1, 1, 2) and table.shape[1] == 3
        return valid and starts.size == chunks.size + 1

    def locate(self) -> tuple[int, int, int, int]:
        """Return the number of chunks, and the addresses of the arrays, for native code."""
        chunks, starts, table = (int(array.__array_interface__["data"][0]) for array in self)
        return self.chunks.size, chunks, starts, table


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
    return words, room


class EvenRows(NamedTuple):
    """Ranges of one size, at multiples of a stride.

    rows : int64 (n,); range `i` begins `rows[i] * stride` bytes after the start of the message's plaintext
    order : int64 (n,); range `i` goes to byte `order[i] * size` of the result. Without it they follow each other
    """

    rows: Words
    stride: int
    size: int
    order: Words | None = None

    def make_plan(self, count: int = 0, plain: int = 0, target: int = 0) -> tuple[PlanMemory, bool]:
        """Return what `make_plan` does for these ranges, and what `is_inside` does for that, by one native call."""
        rows, stride, size, order = self
        if rows.dtype != _WORD or not rows.flags.c_contiguous:
            rows = np.ascontiguousarray(rows, _WORD)
        places = rows if order is None else np.ascontiguousarray(order, _WORD)
        ranges = rows.size
        if places.size != ranges:
            raise ValueError(f"expected one place for each row, got {[ranges, places.size]}")
        room = ranges * ((size + CHUNK_SIZE - 2) // CHUNK_SIZE + 1) if size else 0
        words = np.empty(memory_size(room), _WORD)
        bounds = count, plain, target
        is_inside = _loops().plan_rows(rows, places, order is not None, ranges, stride, size, words, room, *bounds)
        return (words, room), is_inside


def arrays_of(memory: PlanMemory) -> PlanArrays:
    """Return the arrays of a plan that a loop has made."""
    words, room = memory
    count, rows = words[:PLACES].tolist()
    chunks, starts, table = offsets(room)
    table_of = words[table : table + 3 * rows].reshape(-1, 3)
    return PlanArrays(words[chunks : chunks + count], words[starts : starts + count + 1], table_of)


def locate(memory: PlanMemory) -> tuple[int, int, int, int]:
    """Return the number of chunks, and the addresses of the arrays, for native code."""
    count, _, chunks, starts, table = memory[0][:HEAD].tolist()
    return (count, chunks, starts, table) if chunks else arrays_of(memory).locate()


def is_inside(plan: PlanArrays, count: int, plain: int, target: int) -> bool:
    """Return whether a sound plan stays inside its message of `count` chunks and its result."""
    loops = _loops()
    places = plan if loops is sys.modules[__name__] else plan.locate()[1:]
    return bool(loops.is_plan_inside(*places, plan.chunks.size, len(plan.table), count, plain, target))


@cache
def _loops() -> Any:
    return sys.modules[__name__] if native.load() is None else native.functions()


# The loops. Arrays are followed by their lengths, as compiled code has their addresses only.


def memory_size(room: int) -> int:
    """Return the number of words that a plan takes while it is made, with room for so many rows of its table."""
    return _SCRATCH + 6 * room + 1


def offsets(room: int) -> tuple[int, int, int]:
    """Return where the chunks, the starts and the table are in that memory, in words."""
    return _SCRATCH, _SCRATCH + room, _SCRATCH + 2 * room + 1


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
    rows: Any, places: Any, has_places: bool, ranges: int, stride: int, size: int, words: Any, room: int,
    count: int, plain: int, target: int,
) -> bool:  # fmt: skip
    """Fill memory as `finish` leaves it, with the plan of rows, and return what `is_inside` does for it."""
    fill_rows(rows, places, has_places, ranges, stride, size, words, room)
    arrays = arrays_of((words, room))
    return is_plan_inside(*arrays, arrays.chunks.size, len(arrays.table), count, plain, target)


def fill_rows(
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

    `_SCRATCH` words on from the start of the memory are: the chunks, with room for so many; the first row of each in
    the table, and the end of the last; the table; and then the numbers of all rows.
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
    words[COUNT], words[ROWS] = unique, pieces
    words[PLACES] = words[PLACES + 1] = words[PLACES + 2] = 0


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
