"""Tables of paged memory, which name the pieces, the blocks and the chunks of a launch of `keep` or `restore`.

A launch takes all chunks of its blocks, or some if their group has more pieces than a table has room for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

from fastrack._devices.paged.base import PagedBlock, Piece
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, chunk_count, ciphertext_size

MAX_PIECES: Final = 128  # of a launch; the parameters of a kernel take 4096 bytes at most
MAX_BLOCKS: Final = 100
MAX_PARTS: Final = 8
_UNIT: Final = 16  # bytes, which the kernels count in
_UNITS: Final = 1 << 32  # fewer are counted
_MESSAGES: Final = _UNITS // MAX_PARTS  # as a word has the numbers of a message and of a part

# The rows of `Paged` in ``kernels/paged.cuh``. Behind them it has the number of blocks.
_PIECE, _BLOCK, _PART = Struct("<QII"), Struct("<4I"), Struct("<5I")


class PagedLaunch(NamedTuple):
    """A launch: its number of chunks, the messages of its blocks, and its table."""

    count: int  # type: ignore[assignment]  # tuples have a method of this name
    messages: tuple[int, ...]
    table: bytes


class _Part(NamedTuple):
    """Chunks of each block of a group, and the rows of the pieces that these touch."""

    pieces: Sequence[bytes]
    chunk: int  # the first
    chunks: int
    size: int  # of the whole block, in units


def paged_launches(
    groups: Sequence[Sequence[Piece]], blocks: Sequence[PagedBlock], first_message: int, offsets: Sequence[int]
) -> list[PagedLaunch]:
    """Return the launches for blocks whose ciphertexts lie at `offsets` in a staging buffer.

    Block `i` is message `first_message` + `i` of the call. The messages of a launch are in a range of `MAX_BLOCKS`.
    Raise ValueError if the kernels cannot take a group, a block or an offset.
    """
    parts = {group: _parts_of(tuple(groups[group])) for group in {block.group for block in blocks}}
    sealed = [(first_message + i, *each) for i, each in enumerate(zip(blocks, offsets, strict=True))]
    for message, block, offset in sealed:
        end = offset + ciphertext_size(_UNIT * parts[block.group][0].size)
        fits = offset >= 0 and offset % _UNIT == 0 and end <= _UNIT * _UNITS
        if not (fits and 0 <= message < _MESSAGES and 0 <= block.number < _UNITS and block.group >= 0):
            raise ValueError(
                f"paged memory: expected blocks 0 to {_UNITS - 1} of up to {_MESSAGES} messages, at multiples of "
                f"{_UNIT} bytes in {_UNIT * _UNITS}, got block {block.number} of message {message} at {offset} to {end}"
            )
    launches = []
    for first in range(0, len(sealed), MAX_BLOCKS):
        batch = sealed[first : first + MAX_BLOCKS]
        used = {block.group: parts[block.group] for _, block, _ in batch}
        launches += [_launch(chosen, batch) for chosen in _choose(used)]
    return launches


@lru_cache(64)
def _parts_of(pieces: tuple[Piece, ...]) -> tuple[_Part, ...]:
    """Return the parts of a group, each of as many chunks as touch no more pieces than a table has room for."""
    starts = [0]  # of each piece in a block, in units
    for address, stride, size in pieces:
        odd = (address | stride | size) % _UNIT
        starts.append(starts[-1] + size // _UNIT)
        if odd or not (address > 0 and 0 < size <= stride < _UNIT * _UNITS and starts[-1] < _UNITS):
            raise ValueError(
                f"paged memory: expected pieces of multiples of {_UNIT} bytes, at multiples of them, in blocks below "
                f"{_UNIT * _UNITS} bytes, got a piece of {size} every {stride}, {address % _UNIT} behind a multiple. "
                "Give arrays of another layout"
            )
    size = starts.pop()
    rows = [_PIECE.pack(each.address, each.stride // _UNIT, start) for each, start in zip(pieces, starts, strict=True)]
    chunks, per = chunk_count(_UNIT * size), CHUNK_SIZE // _UNIT
    parts: list[_Part] = []
    begin = low = high = 0  # the first chunk of a part, its first piece, and the one behind its last
    for chunk in range(chunks + 1):
        first = max(bisect_right(starts, chunk * per) - 1, 0)
        end = bisect_left(starts, min((chunk + 1) * per, size))
        if not 0 < end - first <= MAX_PIECES:
            raise ValueError(
                f"paged memory: expected 1 to {MAX_PIECES} pieces in {CHUNK_SIZE} bytes of a block, got {end - first}. "
                "Give arrays of another layout"
            )
        if chunk == chunks or end - low > MAX_PIECES:
            parts.append(_Part(rows[low:high], begin, chunk - begin, size))
            begin, low = chunk, first
        high = end
    return tuple(parts)


def _choose(used: Mapping[int, Sequence[_Part]]) -> Iterator[dict[int, _Part]]:
    """Yield the parts that each launch takes: of a group one, as its blocks are named once."""
    chosen: dict[int, _Part] = {}
    for group, parts in used.items():
        for part in parts:
            pieces = sum(len(each.pieces) for each in (part, *chosen.values()))
            if pieces > MAX_PIECES or len(chosen) == MAX_PARTS or group in chosen:
                yield chosen
                chosen = {}
            chosen[group] = part
    yield chosen


def _launch(chosen: Mapping[int, _Part], blocks: Sequence[tuple[int, PagedBlock, int]]) -> PagedLaunch:
    """Return the launch for those blocks whose groups have a part."""
    numbers, total, messages, rows = {group: number for number, group in enumerate(chosen)}, 0, [], b""
    for message, (group, number), offset in blocks:
        if group in chosen:
            place = (offset + chosen[group].chunk * SEALED_CHUNK_SIZE) // _UNIT
            rows += _BLOCK.pack(number, total, place, message * MAX_PARTS + numbers[group])
            messages.append(message)
            total += chosen[group].chunks
    pieces = heads = b""
    for part in chosen.values():
        heads += _PART.pack(len(pieces) // _PIECE.size, len(part.pieces), part.chunk, part.chunks, part.size)
        pieces += b"".join(part.pieces)
    pieces, rows = pieces.ljust(MAX_PIECES * _PIECE.size, b"\0"), rows.ljust(MAX_BLOCKS * _BLOCK.size, b"\0")
    heads = heads.ljust(MAX_PARTS * _PART.size, b"\0")
    return PagedLaunch(total, tuple(messages), pieces + rows + heads + len(messages).to_bytes(8, "little"))
