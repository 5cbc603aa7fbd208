"""Blocks of a remote file, which are present or absent together, as ranges of their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

BLOCK = 1 << 18  # bytes
_STEP = 1 << 12  # blocks that are looked at, or downloaded, at a time


def block_range(start: int, stop: int) -> range:
    """Return the blocks with bytes from `start` to before `stop`."""
    return range(start // BLOCK, -(-stop // BLOCK)) if start < stop else range(0)


def blocks_of(ranges: Iterable[tuple[int, int]]) -> list[range]:
    """Return the blocks with bytes of ranges of bytes (start, stop), in ascending order, each once."""
    return merge([block_range(start, stop) for start, stop in ranges])


def merge(blocks: list[range]) -> list[range]:
    """Return ranges of blocks in ascending order, each block once. Ranges that touch are joined."""
    if len(blocks) == 1 and blocks[0]:
        return blocks
    merged: list[range] = []
    for each in sorted(blocks, key=_start):
        if merged and each.start <= merged[-1].stop:
            if each.stop > merged[-1].stop:
                merged[-1] = range(merged[-1].start, each.stop)
        elif each:
            merged.append(each)
    return merged


def count(blocks: Iterable[range]) -> int:
    """Return the number of blocks."""
    return sum(map(len, blocks))


def steps(blocks: Sequence[range]) -> Iterator[list[range]]:
    """Divide blocks into steps of bounded size, so that what is kept of them in memory is bounded too."""
    step: list[range] = []
    left = _STEP
    for each in blocks:
        first = each.start
        while first < each.stop:
            part = range(first, min(first + left, each.stop))
            step.append(part)
            first, left = part.stop, left - len(part)
            if not left:
                yield step
                step, left = [], _STEP
    if step:
        yield step


def _start(blocks: range) -> int:
    return blocks.start
