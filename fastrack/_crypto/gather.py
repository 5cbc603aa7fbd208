"""Gather plans: byte ranges of messages, sorted by the chunks that hold them, and checked before native code runs.

The loops are here, and in the native extension (`native.kernels_plan`). Where there is none they run as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastrack._crypto import native
from fastrack._crypto.cobblestone import chunks_between
from fastrack.format import CHUNK_SIZE

Words = npt.NDArray[np.int64]
_Memory = tuple[Words, int]  # that a loop has filled with the arrays of a plan, and the rows that it has room for

_WORD = np.dtype(np.int64)
_DIGIT_BITS = 8
_DIGITS = 1 << _DIGIT_BITS  # of the numbers of chunks when they are sorted
_SCRATCH = _DIGITS  # words to count them in

# What is left there at the end: the number of chunks, that of the rows, and the addresses of the arrays, or zeros.
COUNT, ROWS, PLACES = range(3)
HEAD = 5


class GatherPlan:
    """A list of byte ranges of chunks, and the offsets in the result that they are copied to. It does not change.

    Attributes
    ----------
    chunks : int64 (n,); the numbers of the chunks to open, without duplicates
    starts : int64 (n + 1,); the ranges of chunk `i` are `table[starts[i]:starts[i + 1]]`
    table : int64 (m, 3); offset in the chunk, offset in the result, length; in bytes
    """

    __slots__ = ("_arrays", "_made")

    def __init__(self, chunks: Words, starts: Words, table: Words) -> None:
        self._arrays: tuple[Words, Words, Words] | None = (chunks, starts, table)
        self._made: _Memory | EvenRanges | None = None

    @classmethod
    def of(cls, made: _Memory | EvenRanges) -> GatherPlan:
        """Return the plan that a loop made, or makes when it is needed. Arrays are made if asked for."""
        plan = cls.__new__(cls)
        plan._arrays, plan._made = None, made  # noqa: SLF001 - its own
        return plan

    @property
    def chunks(self) -> Words:
        return self._split()[0]

    @property
    def starts(self) -> Words:
        return self._split()[1]

    @property
    def table(self) -> Words:
        return self._split()[2]

    def _split(self) -> tuple[Words, Words, Words]:
        if self._arrays is None:
            assert self._made is not None
            if isinstance(self._made, EvenRanges):
                self._made, _ = self._made.make_plan()
            self._arrays = arrays_of(*self._made)
        return self._arrays

    def locate(self, sealed: int, plain: int, target: int) -> tuple[int, int, int, int]:
        """Return the number of chunks, and the addresses of the arrays, for native code.

        Raise ValueError if the plan reaches outside its message, of `sealed` bytes with tags and `plain` bytes without,
        or outside its result of `target` bytes. Native code relies on this check.
        """
        count, made = chunks_between(sealed, plain), self._made
        if isinstance(made, EvenRanges):
            memory, lies_inside = made.make_plan(count, plain, target)
            if lies_inside:
                self._made = memory
                chunks, _, *places = memory[0][:HEAD].tolist()
                return (chunks, *places) if places[0] else self._locate()
        elif self._is_sound() and is_inside(self, count, plain, target):
            return self._locate()
        raise ValueError("expected a gather plan inside its message and its result, got one that reaches outside")

    def _is_sound(self) -> bool:
        """Return whether the arrays are contiguous, of int64, and of shapes that fit each other."""
        chunks, starts, table = arrays = self._split()
        valid = all(array.dtype == np.int64 and array.flags.c_contiguous for array in arrays)
        valid = valid and (chunks.ndim, starts.ndim, table.ndim) == (1, 1, 2) and table.shape[1] == 3
        return valid and starts.size == chunks.size + 1

    def _locate(self) -> tuple[int, int, int, int]:
        chunks, starts, table = (int(array.__array_interface__["data"][0]) for array in self._split())
        return self.chunks.size, chunks, starts, table


class EvenRanges(NamedTuple):
    """Byte ranges of one size, at multiples of a stride.

    rows : int64 (n,); range `i` begins `rows[i] * stride` bytes after the start of the message's plaintext
    order : int64 (n,); range `i` goes to byte `order[i] * size` of the result. Without it they follow each other
    """

    rows: Words
    stride: int
    size: int
    order: Words | None = None

    def __call__(self) -> EvenRanges:
        """Return these ranges, as a function that computes ranges does: there is nothing to compute."""
        return self

    def expand(self) -> ByteRanges:
        """Return the same ranges with their starts, sizes and places."""
        order = np.arange(self.rows.size) if self.order is None else self.order
        return ByteRanges(self.rows * self.stride, np.full(self.rows.size, self.size, np.int64), order * self.size)

    def pieces(self) -> GatherPlan:
        """Return the gather of these bytes, as `ByteRanges.pieces` does."""
        return GatherPlan.of(self)

    def make_plan(self, count: int = 0, plain: int = 0, target: int = 0) -> tuple[_Memory, bool]:
        """Return the memory of the plan, and whether it `is_inside`, by one native call."""
        rows, stride, size, order = self
        if rows.dtype != _WORD or not rows.flags.c_contiguous:
            rows = np.ascontiguousarray(rows, _WORD)
        places = rows if order is None else np.ascontiguousarray(order, _WORD)
        ranges = rows.size
        if places.size != ranges:
            raise ValueError(f"expected one place for each row, got {[ranges, places.size]}")
        room = ranges * ((size + CHUNK_SIZE - 2) // CHUNK_SIZE + 1) if size else 0
        words = np.empty(_SCRATCH + 6 * room + 1, _WORD)
        bounds = count, plain, target
        lies_inside = _loops().plan_rows(rows, places, order is not None, ranges, stride, size, words, room, *bounds)
        return (words, room), lies_inside


@dataclass(frozen=True, slots=True)
class ByteRanges:
    """Byte ranges of a message's plaintext, and the offsets in a result that they go to.

    starts, sizes, places : int64 (n,); range `i` has `sizes[i]` bytes from `starts[i]` on, and goes to `places[i]`
    """

    starts: Words
    sizes: Words
    places: Words

    @classmethod
    def concatenate(cls, parts: Iterable[LazyRanges], shifts: Sequence[int]) -> ByteRanges:
        """Concatenate ranges, and move the places of each by the number of bytes in `shifts`."""
        ranges = [part().expand() for part in parts]
        return cls(
            np.concatenate([each.starts for each in ranges]),
            np.concatenate([each.sizes for each in ranges]),
            np.concatenate([each.places + shift for each, shift in zip(ranges, shifts, strict=True)]),
        )

    def expand(self) -> ByteRanges:
        """Return these ranges."""
        return self

    def pieces(self) -> GatherPlan:
        """Return the gather of these bytes: split at chunk boundaries, with each chunk once and in ascending order.

        Ranges that are adjacent in the message and in the result are merged before.
        """
        ranges = [np.ascontiguousarray(array, np.int64) for array in (self.starts, self.sizes, self.places)]
        count = ranges[0].size
        if any(array.size != count for array in ranges):
            raise ValueError(f"expected one size and place for each start, got {[array.size for array in ranges]}")
        loops = _loops()
        room = loops.count_pieces(*ranges, count)
        words = np.empty(memory_size(room), np.int64)
        loops.plan_ranges(*ranges, count, words, room)
        return GatherPlan.of((words, room))


Ranges = ByteRanges | EvenRanges
"""Byte ranges of a message's plaintext, and where they go."""

LazyRanges = Callable[[], Ranges] | EvenRanges
"""Function that computes them."""


def is_inside(plan: GatherPlan, count: int, plain: int, target: int) -> bool:
    """Return whether a sound plan stays inside its message of `count` chunks and its result."""
    loops, arrays = _loops(), (plan.chunks, plan.starts, plan.table)
    places = arrays if loops is sys.modules[__name__] else plan._locate()[1:]  # noqa: SLF001 - of this module
    return bool(loops.is_plan_inside(*places, arrays[0].size, len(arrays[2]), count, plain, target))


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
    chunks, starts, table = arrays_of(words, room)
    return is_plan_inside(chunks, starts, table, chunks.size, len(table), count, plain, target)


def arrays_of(words: Words, room: int) -> tuple[Words, Words, Words]:
    """Return the arrays of a plan that a loop has made."""
    count, rows = words[:PLACES].tolist()
    chunks, starts, table = offsets(room)
    table_of = words[table : table + 3 * rows].reshape(-1, 3)
    return words[chunks : chunks + count], words[starts : starts + count + 1], table_of


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
