"""Blocks of a paged cache, sealed from the pieces of several arrays and opened into them."""

import mmap
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pytest
from helpers import reference
from helpers.buffers import Fenced
from helpers.cases import each
from helpers.kernel_host import CALL, GOOD, TICKET, read_only, verdict_of, verdict_words
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, noise
from helpers.runs import flip

from fastrack._devices.cuda.table import name_of
from fastrack._devices.paged.base import PagedBlock, Piece
from fastrack._devices.paged.tables import paged_launches

TOTAL, GUARD = 5, 0xA5  # blocks of an array, and what buffers hold before
APART, BLOCKS_FIRST, PIECES_FIRST = LAYOUTS = "apart", "blocks first", "pieces first"
FEW = ((APART, [4096] * 3), (PIECES_FIRST, [18432, 16]))  # blocks of 12288 and of 18448 bytes
ORDER = [PagedBlock(0, 3), PagedBlock(1, 0), PagedBlock(0, 1), PagedBlock(1, 4), PagedBlock(0, 0)]


class Arrays:
    """Arrays of groups, given as a layout and the sizes of pieces: each piece has its own, or all share one."""

    def __init__(self, *groups):
        self.all, self.groups = [], []
        for kind, sizes in groups:
            whole = sum(sizes)
            shared = None if kind == APART else self._add(TOTAL * whole)
            group, start = [], 0
            for size in sizes:
                if kind == APART:
                    group.append((self._add(TOTAL * size), 0, size, size))
                elif kind == BLOCKS_FIRST:
                    group.append((shared, start, whole, size))
                else:
                    group.append((shared, TOTAL * start, size, size))
                start += size
            self.groups.append(group)

    @property
    def pieces(self):
        return [
            [Piece(array.data.ctypes.data + at, stride, size) for array, at, stride, size in group]
            for group in self.groups
        ]

    def places(self, block):
        """Return the views of the pieces of a block."""
        for array, at, stride, size in self.groups[block.group]:
            yield array.data[at + stride * block.number :][:size]

    def read(self, block):
        return b"".join(place.tobytes() for place in self.places(block))

    def write(self, block, content):
        start = 0
        for place in self.places(block):
            place[:] = np.frombuffer(content, np.uint8)[start : start + place.size]
            start += place.size

    def content(self):
        assert all(array.stands for array in self.all)
        return [array.data.tobytes() for array in self.all]

    def fill(self, contents):
        for array, content in zip(self.all, contents, strict=True):
            array.data[:] = np.frombuffer(content, np.uint8)

    def _add(self, size):
        self.all.append(Fenced.holding(noise(size, len(self.all)).tobytes(), 16))
        return self.all[-1]


class Keys(NamedTuple):
    """Keys of messages, from a first one on, and their states."""

    pairs: list
    first: int
    states: np.ndarray
    bits: int

    @classmethod
    def of(cls, size, count, first=0, *, calls=(), messages=()):
        """Make keys of `size` bytes. `calls` and `messages` replace the marks of some states, by index."""
        pairs = [(noise(size, n + 9).tobytes(), noise(12, n + 50).tobytes()) for n in range(count)]
        slots = 1 << (count - 1).bit_length()
        states = [bytes(8704)] * slots
        for index, pair in enumerate(pairs):
            call, message = dict(calls).get(index, CALL), dict(messages).get(index, first + index)
            states[first + index & slots - 1] = reference.kernel_state(*pair, call, message)
        return cls(pairs, first, read_only(Fenced.holding(b"".join(states), 16)), 8 * size)

    @property
    def mask(self):
        return self.states.size // 8704 - 1


@pytest.fixture(scope="module")
def keys(key):
    return Keys.of(len(key), len(ORDER))


def expected(arrays, keys, blocks):
    return [reference.seal(*pair, arrays.read(block)) for pair, block in zip(keys.pairs, blocks, strict=False)]


def offsets_of(sealed):
    """Lay ciphertexts 48 bytes apart: where each starts, and the end."""
    *starts, end = accumulate((len(part) + 48 for part in sealed), initial=16)
    return starts, end


def keep(host, keys, arrays, blocks, sizes, *, grid=1):
    """Seal blocks: the lowest bad name or None, the ciphertexts, of `sizes`, and the number of launches."""
    starts, end = offsets_of(sizes)
    target, words, told = Fenced(end, 16), verdict_words(), Fenced(16, 16)
    launches = paged_launches(arrays.pieces, blocks, keys.first, starts)
    for ticket, launch in enumerate(launches, TICKET):
        arguments = (target.data, launch.count, words.data, ticket, told.data, table_of(launch))
        host.launch(f"keep_{keys.bits}", keys.states, keys.mask, *arguments, grid=grid)
    lowest = verdict_of(words, TICKET + len(launches) - 1)
    assert told.data.view(np.uint64).tolist() == [TICKET + len(launches) - 1, GOOD if lowest is None else lowest]
    assert target.stands
    assert told.stands
    found = [target.data[start : start + len(part)].tobytes() for start, part in zip(starts, sizes, strict=True)]
    for start, part in zip(starts, sizes, strict=True):
        target.data[start : start + len(part)] = GUARD
    assert (target.data == GUARD).all()
    return lowest, found, len(launches)


def restore(host, keys, arrays, blocks, sealed, *, grid=1):
    """Open blocks: the lowest bad name or None, and the numbers of the messages whose bits were cleared."""
    starts, end = offsets_of(sealed)
    source, words = np.full(end, GUARD, np.uint8), verdict_words()
    for start, part in zip(starts, sealed, strict=True):
        source[start : start + len(part)] = np.frombuffer(part, np.uint8)
    source = read_only(Fenced.holding(source.tobytes(), 16))
    good = Fenced.holding(b"\xff" * 4 * ((keys.first + len(blocks) - 1) // 32 + 1), 4)
    launches = paged_launches(arrays.pieces, blocks, keys.first, starts)
    for ticket, launch in enumerate(launches, TICKET):
        arguments = (source, launch.count, words.data, ticket, good.data, table_of(launch))
        host.launch(f"restore_{keys.bits}", keys.states, keys.mask, *arguments, grid=grid)
    assert good.stands
    bits = np.unpackbits(good.data, bitorder="little")
    return verdict_of(words, TICKET + len(launches) - 1), np.flatnonzero(bits == 0).tolist()


def table_of(launch):
    return read_only(Fenced.holding(launch.table, 16))


def check(host, keys, arrays, blocks, *, grid=1):
    """Seal blocks, and open them into others' places: the number of launches."""
    sealed, before = expected(arrays, keys, blocks), arrays.content()
    lowest, found, launches = keep(host, keys, arrays, blocks, sealed, grid=grid)
    assert lowest is None
    assert found == sealed
    assert arrays.content() == before
    plain = [arrays.read(block) for block in blocks]
    elsewhere = [block._replace(number=(block.number + 1) % TOTAL) for block in blocks]
    assert restore(host, keys, arrays, elsewhere, sealed, grid=grid) == (None, [])
    found = arrays.content()
    arrays.fill(before)
    for block, content in zip(elsewhere, plain, strict=True):
        arrays.write(block, content)
    assert found == arrays.content()  # so those that are not named keep their bytes
    return launches


@each("layout", LAYOUTS)
@each(("piece", "pieces"), [(16, 6), (512, 40), (4096, 5), (18432, 3), (2 * CHUNK_SIZE, 2)])
@each("grid", [1, 7])
def test_blocks_are_sealed_from_their_pieces_and_opened_into_them(host, keys, layout, piece, pieces, grid):
    arrays = Arrays((layout, [piece] * pieces))
    blocks = [PagedBlock(0, number) for number in (3, 0)]
    assert check(host, keys, arrays, blocks, grid=grid) == 1


def test_one_launch_has_blocks_of_groups_of_other_sizes(host, keys):
    assert check(host, keys, Arrays(*FEW), ORDER, grid=3) == 1


def test_pieces_of_one_block_may_differ(host, keys):
    sizes = [16, 16368, 16, 48, 16, 32768, 8160, 16]
    assert check(host, keys, Arrays((BLOCKS_FIRST, sizes), (APART, [16])), ORDER, grid=2) == 1


def test_blocks_of_more_pieces_than_a_table_has_room_for_take_several_launches(host, keys):
    arrays = Arrays((BLOCKS_FIRST, [144] * 300), (APART, [64]))
    assert check(host, keys, arrays, ORDER[:3], grid=2) == 3
    sealed = expected(arrays, keys, ORDER[:3])
    altered = [*sealed[:2], flip(sealed[2], 8 * 2 * SEALED_CHUNK_SIZE + 1)]
    assert restore(host, keys, arrays, ORDER[:3], altered) == (name_of(2, 2), [2])


def test_a_table_may_be_full(host, key):
    groups = [(BLOCKS_FIRST, [48] * (121 if n == 0 else 1)) for n in range(8)]
    blocks = [PagedBlock(n % 8, (n // 8) % TOTAL) for n in range(100)]
    keys, arrays = Keys.of(len(key), 100, 500), Arrays(*groups)
    sealed = expected(arrays, keys, blocks)
    assert keep(host, keys, arrays, blocks, sealed, grid=9) == (None, sealed, 1)
    altered = [flip(part, 3) if n in {0, 31, 32, 99} else part for n, part in enumerate(sealed)]
    first = name_of(500, 0)
    assert restore(host, keys, arrays, blocks, altered, grid=9) == (first, [500, 531, 532, 599])


def test_chunks_and_blocks_far_away_are_where_they_belong(host, key):
    """Only the last chunk of a block above 4 GiB is there. An offset cut to 32 bits would lead to another place."""
    chunk, number, stride, place = 299_999, 13, 5 << 30, 1 << 32
    size, start, sealed_at = (
        CHUNK_SIZE * chunk + 48,
        CHUNK_SIZE * chunk + number * stride,
        place + SEALED_CHUNK_SIZE * chunk,
    )
    array, sealed = sparse(start + 48), sparse(sealed_at + 64)
    keys, array[start:] = Keys.of(len(key), 1), noise(48)
    expected = reference.seal(*keys.pairs[0], noise(48).tobytes(), chunk)
    (launch,) = paged_launches([[Piece(array.ctypes.data, stride, size)]], [PagedBlock(0, number)], 0, [place])
    told, good = Fenced(16, 16), Fenced.holding(b"\xff" * 4, 4)
    for kernel, last in (("keep", told), ("restore", good)):
        words = verdict_words(ended=chunk)
        arguments = (sealed.ctypes.data, launch.count, words.data, TICKET, last.data, table_of(launch))
        options = {"grid": launch.count, "first": chunk}  # only the last block
        host.launch(f"{kernel}_{keys.bits}", keys.states, 0, *arguments, **options)
        assert verdict_of(words) is None
        assert sealed[sealed_at:].tobytes() == expected
        assert array[start:].tobytes() == noise(48).tobytes()
        array[start:] = 0
    assert good.data.tobytes() == b"\xff" * 4


def sparse(size):
    """Return zeros, of which pages that nothing touches take no memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


@each("bad", [{0: [0]}, {1: [1]}, {4: [0]}, {3: [0, 1]}, {0: [0], 1: [0], 2: [0], 3: [1], 4: [0]}])
@each("grid", [1, 4])
def test_a_bad_chunk_is_zeros_and_clears_the_bit_of_its_message_only(host, key, bad, grid):
    keys, arrays = Keys.of(len(key), len(ORDER), 30), Arrays(*FEW)
    sealed, plain = expected(arrays, keys, ORDER), [bytearray(arrays.read(block)) for block in ORDER]
    for index, chunks in bad.items():
        for chunk in chunks:
            sealed[index] = flip(sealed[index], 8 * SEALED_CHUNK_SIZE * chunk + 77)
            part = plain[index][chunk * CHUNK_SIZE : (chunk + 1) * CHUNK_SIZE]
            plain[index][chunk * CHUNK_SIZE : (chunk + 1) * CHUNK_SIZE] = bytes(len(part))
    before = arrays.content()
    lowest = name_of(30 + min(bad), bad[min(bad)][0])
    assert restore(host, keys, arrays, ORDER, sealed, grid=grid) == (lowest, [30 + index for index in bad])
    found = arrays.content()
    arrays.fill(before)
    for block, content in zip(ORDER, plain, strict=True):
        arrays.write(block, bytes(content))
    assert found == arrays.content()


@each("where", ["the first bit", "the last of a piece", "the first of another", "the last of the text", "the tag"])
def test_every_part_of_a_chunk_counts(host, keys, where):
    arrays, block = Arrays((APART, [4096, 18432])), PagedBlock(0, 2)
    sealed = expected(arrays, keys, [block])
    end = len(sealed[0])
    bits = {"the first bit": 0, "the last of a piece": 8 * 4096 - 1, "the first of another": 8 * 4096}
    place = (bits | {"the last of the text": 8 * (end - 16) - 1, "the tag": 8 * end - 1})[where]
    chunk = place // 8 // SEALED_CHUNK_SIZE
    assert restore(host, keys, arrays, [block], [flip(sealed[0], place)]) == (name_of(0, chunk), [0])


def test_an_altered_empty_last_chunk_is_noticed(host, keys):
    arrays, block = Arrays((APART, [CHUNK_SIZE])), PagedBlock(0, 2)
    (sealed,) = expected(arrays, keys, [block])
    plain = arrays.read(block)
    assert restore(host, keys, arrays, [block], [flip(sealed, 8 * len(sealed) - 5)]) == (name_of(0, 1), [0])
    assert arrays.read(block) == plain


@each("marks", [{"calls": {1: CALL + 1}}, {"messages": {1: 41}}, {"messages": {1: 42 + (1 << 29)}}])
def test_under_the_state_of_another_call_or_message_nothing_is_sealed_or_opened_and_that_is_told(host, key, marks):
    keys, arrays = Keys.of(len(key), len(ORDER), 41, **marks), Arrays(*FEW)
    sealed, bad = expected(arrays, keys, ORDER), ORDER[1]
    lowest, found, _ = keep(host, keys, arrays, ORDER, sealed, grid=2)
    assert lowest == name_of(42, 0)
    assert found == [sealed[0], bytes([GUARD]) * len(sealed[1]), *sealed[2:]]
    assert restore(host, keys, arrays, ORDER, sealed, grid=2) == (lowest, [42])
    assert not any(arrays.read(bad))
    assert expected(arrays, keys, ORDER)[2:] == sealed[2:]


def test_without_any_state_of_the_call_nothing_is_sealed(host, key):
    keys, arrays = Keys.of(len(key), 2, calls={0: 0, 1: CALL - 1}), Arrays(*FEW)
    sealed = expected(arrays, keys, ORDER[:2])
    lowest, found, _ = keep(host, keys, arrays, ORDER[:2], sealed, grid=5)
    assert lowest == name_of(0, 0)
    assert found == [bytes([GUARD]) * len(part) for part in sealed]


def test_each_chunk_that_was_not_sealed_is_told(host, key):
    arrays = Arrays((APART, [3 * CHUNK_SIZE]))
    keys = Keys.of(len(key), 1, calls={0: CALL + 1})
    words, told = verdict_words(), Fenced(16, 16)
    (launch,) = paged_launches(arrays.pieces, [PagedBlock(0, 1)], 0, [0])
    target = Fenced(4 * SEALED_CHUNK_SIZE, 16)
    arguments = (target.data, launch.count, words.data, TICKET, told.data, table_of(launch))
    host.launch(f"keep_{keys.bits}", keys.states, 0, *arguments, grid=4, first=3)  # only its last block
    assert words.data.view(np.uint64).tolist()[0] == name_of(0, 3)


def test_no_secret_stays_in_shared_memory(host, keys):
    arrays = Arrays((APART, [4096] * 2))
    plain, state = arrays.read(ORDER[0]), keys.states.tobytes()
    secrets = {text[at : at + 8] for text in (state[:8704], plain) for at in range(0, len(text) - 8, 4)} - {bytes(8)}
    sealed = expected(arrays, keys, ORDER[:1])
    for work in (keep, restore):
        work(host, keys, arrays, ORDER[:1], sealed)
        remains = host.remains()
        assert [at for at in range(0, len(remains), 4) if remains[at : at + 8] in secrets] == []
