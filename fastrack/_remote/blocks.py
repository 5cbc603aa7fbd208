"""Blocks of a remote file, each present or absent as a whole, as ranges of their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 18  # bytes
_STEP = 1 << 12  # blocks that are looked at, or downloaded, at a time


def blocks_of(ranges: Sequence[tuple[int, int]] | NDArray[np.int64]) -> list[range]:
    """Return the blocks with bytes of ranges of bytes (start, stop), in ascending order, each once."""
    starts, stops = np.asarray(ranges, np.int64).reshape(-1, 2).T
    nonempty = starts < stops
    begins, ends = (starts // BLOCK)[nonempty].tolist(), ((stops - 1) // BLOCK + 1)[nonempty].tolist()
    return _merge([range(begin, end) for begin, end in set(zip(begins, ends, strict=True))])


def _merge(blocks: list[range]) -> list[range]:
    """Return ranges of blocks in ascending order, each block once. Ranges that touch are joined."""
    if len(blocks) == 1 and blocks[0]:
        return blocks
    merged: list[range] = []
    for run in sorted(blocks, key=attrgetter("start")):
        if merged and run.start <= merged[-1].stop:
            if run.stop > merged[-1].stop:
                merged[-1] = range(merged[-1].start, run.stop)
        elif run:
            merged.append(run)
    return merged


def count(blocks: Iterable[range]) -> int:
    """Return the number of blocks."""
    return sum(map(len, blocks))


def steps(blocks: Sequence[range]) -> Iterator[list[range]]:
    """Divide blocks into steps of bounded size, to bound the memory that a step takes."""
    step: list[range] = []
    room = _STEP
    for run in blocks:
        first = run.start
        while first < run.stop:
            part = range(first, min(first + room, run.stop))
            step.append(part)
            first, room = part.stop, room - len(part)
            if not room:
                yield step
                step, room = [], _STEP
    if step:
        yield step
