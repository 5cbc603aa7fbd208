"""Tables of paged memory, read by the stand-in of the kernels: every chunk of every block once, at its own pieces."""

import pytest
from helpers.cases import each
from helpers.fake_kernels import paged_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrack._devices.paged.base import PagedBlock, Piece
from fastrack._devices.paged.tables import MAX_BLOCKS, paged_launches
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, ciphertext_size

sizes = st.sampled_from([16, 48, 512, 4096, 18432, CHUNK_SIZE, 2 * CHUNK_SIZE]) | st.integers(1, 1500).map(
    lambda n: 16 * n
)


@st.composite
def groups(draw):
    """Draw pieces of a block, apart or in one array."""
    kinds = draw(st.lists(sizes, min_size=1, max_size=3))
    pieces = draw(st.integers(1, 200)) if min(kinds) >= 512 else draw(st.integers(1, 100))
    stride = max(kinds) * draw(st.integers(1, 3))
    return [Piece(4096 * (n + 1) << 24, stride, kinds[n % len(kinds)]) for n in range(pieces)]


def chunks_of(group, block, message, offset):
    """Return each chunk of a block as `paged_chunks` yields it, with all that lies side by side as one range."""
    units = [address + stride * block.number + at for address, stride, size in group for at in range(0, size, 16)]
    count = 16 * len(units) // CHUNK_SIZE + 1
    per = CHUNK_SIZE // 16
    return {(message, n): (offset + SEALED_CHUNK_SIZE * n, units[n * per : n * per + per]) for n in range(count)}


def read(launches):
    """Return the chunks of all launches, none of which may come twice."""
    found = {}
    for count, messages, table in launches:
        assert len(table) <= 4096 - 7 * 8
        chunks = list(paged_chunks(table, count))
        assert tuple(dict.fromkeys(message for message, *_ in chunks)) == messages
        for message, number, place, ranges in chunks:
            assert (message, number) not in found
            found[message, number] = place, [address + at for address, size in ranges for at in range(0, size, 16)]
    return found


@settings(max_examples=15, deadline=None)
@given(st.lists(groups(), min_size=1, max_size=3), st.data())
def test_every_chunk_is_in_one_launch_at_its_own_pieces(groups, data):
    block = st.builds(PagedBlock, st.integers(0, len(groups) - 1), st.integers(0, 1000))
    blocks, first = data.draw(st.lists(block, min_size=1, max_size=4)), data.draw(st.integers(0, 2**29 - 4))
    expected, offsets, end = {}, [], data.draw(st.sampled_from([0, 4096]))
    for message, chosen in enumerate(blocks, first):
        group = groups[chosen.group]
        expected |= chunks_of(group, chosen, message, end)
        offsets.append(end)
        end += ciphertext_size(sum(piece.size for piece in group)) + 64
    assert read(paged_launches(groups, blocks, first, offsets)) == expected


def test_blocks_of_few_pieces_take_one_launch_and_their_messages_are_close():
    groups = [[Piece(1 << 20, 512, 512)] * 64, [Piece(1 << 30, 65536, 16)] * 60]
    blocks = [PagedBlock(n % 2, n) for n in range(250)]
    launches = paged_launches(groups, blocks, 7, [65536 * n for n in range(250)])
    assert [launch.messages for launch in launches] == [(*range(7, 107),), (*range(107, 207),), (*range(207, 257),)]
    assert [launch.count for launch in launches] == [50 * 3 + 50, 50 * 3 + 50, 25 * 3 + 25]


def test_blocks_of_many_pieces_take_several_launches_of_all_their_messages():
    group = [Piece(4096 * (n + 1), 1 << 20, 4096) for n in range(300)]
    blocks = [PagedBlock(0, n) for n in range(3)]
    launches = paged_launches([group], blocks, 0, [0, 1 << 21, 1 << 22])
    assert [(launch.count, launch.messages) for launch in launches] == [
        (96, (0, 1, 2)),
        (96, (0, 1, 2)),
        (36, (0, 1, 2)),
    ]


def test_more_groups_than_a_table_has_parts_take_several_launches():
    groups = [[Piece(4096, 4096, 16 * (n + 1))] for n in range(11)]
    blocks = [PagedBlock(n, 1) for n in range(11)]
    launches = paged_launches(groups, blocks, 0, [1024 * n for n in range(11)])
    assert [launch.messages for launch in launches] == [(*range(8),), (*range(8, 11),)]


def test_a_group_that_is_not_there_is_an_error():
    with pytest.raises(IndexError):
        paged_launches([[GOOD]], [PagedBlock(1, 0)], 0, [0])


def test_without_blocks_there_is_no_launch():
    assert paged_launches([[Piece(16, 16, 16)]], [], 0, []) == []


GOOD = Piece(4096, 64, 64)


@each(
    ("pieces", "block", "message", "offset", "complaint"),
    [
        ([], PagedBlock(0, 0), 0, 0, "expected 1 to 128 pieces in 16384 bytes of a block, got 0"),
        ([GOOD._replace(address=4104)], PagedBlock(0, 0), 0, 0, "got a piece of 64 every 64, 8 behind"),
        ([GOOD._replace(address=0)], PagedBlock(0, 0), 0, 0, "expected pieces of multiples of 16 bytes"),
        ([GOOD, GOOD._replace(stride=72)], PagedBlock(0, 0), 0, 0, "got a piece of 64 every 72"),
        ([GOOD._replace(size=24)], PagedBlock(0, 0), 0, 0, "got a piece of 24 every 64"),
        ([GOOD._replace(size=0)], PagedBlock(0, 0), 0, 0, "got a piece of 0 every 64"),
        ([GOOD._replace(size=80)], PagedBlock(0, 0), 0, 0, "got a piece of 80 every 64"),  # blocks would overlap
        ([GOOD._replace(stride=2**36)], PagedBlock(0, 0), 0, 0, "got a piece of 64 every 68719476736"),
        ([GOOD._replace(stride=2**35, size=2**35)] * 2, PagedBlock(0, 0), 0, 0, "in blocks below 68719476736 bytes"),
        ([GOOD._replace(size=16)] * 129, PagedBlock(0, 0), 0, 0, "expected 1 to 128 pieces .* got 129"),
        ([GOOD], PagedBlock(-1, 0), 0, 0, "expected blocks"),
        ([GOOD], PagedBlock(0, -1), 0, 0, "got block -1 of message 0 at 0"),
        ([GOOD], PagedBlock(0, 2**32), 0, 0, "got block 4294967296 of"),
        ([GOOD], PagedBlock(0, 0), 0, 8, "at 8 to 88"),
        ([GOOD], PagedBlock(0, 0), 0, -16, "at -16 to 64"),
        ([GOOD], PagedBlock(0, 0), 0, 2**36 - 64, "at 68719476672 to 68719476752"),
        ([GOOD], PagedBlock(0, 0), 2**29, 0, "of up to 536870912 messages"),
        ([GOOD], PagedBlock(0, 0), -1, 0, "of up to 536870912 messages"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(pieces, block, message, offset, complaint):
    with pytest.raises(ValueError, match=complaint):
        paged_launches([pieces], [block], message, [offset])


def test_the_most_that_the_kernels_can_take_is_not_refused():
    blocks = [PagedBlock(0, 2**32 - 1)] * MAX_BLOCKS
    offsets = [2**36 - 64 - 16] * MAX_BLOCKS
    (launch,) = paged_launches([[GOOD]], blocks, 2**29 - MAX_BLOCKS, offsets)
    assert launch.count == MAX_BLOCKS
    assert len(launch.table) == 3816
