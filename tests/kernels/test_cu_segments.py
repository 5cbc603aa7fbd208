"""Segments of many messages in one launch of the CUDA kernels, each under its own key and with its own target."""

import numpy as np
import pytest
from helpers import reference
from helpers.cases import each
from helpers.kernel_host import pack
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, noise
from helpers.runs import as_pieces, flip, plan
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrack._devices.cuda.table import MAX_SEGMENTS, name_of, pack_table, parse_name

# Of these, each message has its own key.
SIZES = [100, 0, CHUNK_SIZE, 1, 2 * CHUNK_SIZE + 777, CHUNK_SIZE - 1, 16, 8192]
PLAIN = [noise(size, seed).tobytes() for seed, size in enumerate(SIZES)]
NONCES = [noise(12, seed + 50).tobytes() for seed in range(len(SIZES))]
UNTOUCHED = 0xA5


@pytest.fixture(scope="module")
def keys(key):
    return [noise(len(key), seed + 9).tobytes() for seed in range(len(SIZES))]


@pytest.fixture(scope="module")
def states(host, keys):
    return host.prepare_all(list(zip(keys, NONCES, strict=True)))


@pytest.fixture(scope="module")
def sealed(keys):
    return [reference.seal(*each) for each in zip(keys, NONCES, PLAIN, strict=True)]


ALL = range(len(SIZES))


def whole(sealed, order=ALL):
    return [(message, 0, sealed[message]) for message in order]


@pytest.fixture(scope="module")
def bits(key):
    return 8 * len(key)


# Whole chunks.


@each("blocks", [1, 2, 3, 5, 40])
def test_every_message_opens_under_its_own_key(host, states, bits, sealed, blocks):
    assert host.open_nest(states, bits, whole(sealed), blocks=blocks) == (None, PLAIN)


@settings(max_examples=30, deadline=None)
@given(order=st.lists(st.integers(0, len(SIZES) - 1), min_size=1, max_size=20), blocks=st.integers(1, 9))
def test_any_messages_in_any_order_open(host, states, bits, sealed, order, blocks):
    result = host.open_nest(states, bits, whole(sealed, order), blocks=blocks)
    assert result == (None, [PLAIN[message] for message in order])


def test_a_table_may_be_full(host, states, bits, sealed):
    order = [(0, 1, 3, 6)[number % 4] for number in range(MAX_SEGMENTS)]
    for blocks in (3, 200):
        result = host.open_nest(states, bits, whole(sealed, order), blocks=blocks)
        assert result == (None, [PLAIN[message] for message in order])
    altered = [*sealed]
    altered[6] = flip(sealed[6], 5)
    assert host.open_nest(states, bits, whole(altered, order))[0] == name_of(6, 0)


def test_a_message_may_go_on_in_a_later_launch(host, states, bits, sealed):
    cut = SEALED_CHUNK_SIZE
    segments = [(4, 1, sealed[4][cut:]), (5, 0, sealed[5])]
    assert host.open_nest(states, bits, segments, blocks=2) == (None, [PLAIN[4][CHUNK_SIZE:], PLAIN[5]])
    segments = [(3, 0, sealed[3]), (4, 0, sealed[4][: 2 * cut])]
    assert host.open_nest(states, bits, segments, blocks=2) == (None, [PLAIN[3], PLAIN[4][: 2 * CHUNK_SIZE]])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    bad=st.dictionaries(st.integers(0, len(SIZES) - 1), st.integers(0, 2**20), min_size=1, max_size=4),
    blocks=st.integers(1, 9),
)
def test_the_first_bad_chunk_of_the_first_bad_message_is_reported_and_all_others_open(
    host, states, bits, sealed, bad, blocks
):
    altered, expected, names = [*sealed], [*PLAIN], []
    for message, place in bad.items():
        bit = place % (8 * len(sealed[message]))
        chunk = bit // (8 * SEALED_CHUNK_SIZE)
        altered[message] = flip(sealed[message], bit)
        plain = bytearray(PLAIN[message])
        plain[chunk * CHUNK_SIZE : (chunk + 1) * CHUNK_SIZE] = bytes(len(plain[chunk * CHUNK_SIZE :][:CHUNK_SIZE]))
        expected[message] = bytes(plain)
        names.append(name_of(message, chunk))
    assert host.open_nest(states, bits, whole(altered), blocks=blocks) == (min(names), expected)


def test_names_of_chunks_tell_message_and_chunk(host, states, bits, sealed):
    assert parse_name(name_of(2**25 - 1, 2**38 - 1)) == (2**25 - 1, 2**38 - 1)
    assert name_of(2**25 - 1, 2**38 - 1) < 2**63
    # The slot of that number has another message.
    altered = flip(sealed[4], 8 * 2 * SEALED_CHUNK_SIZE)
    verdict, _ = host.open_nest(states, bits, [(4 + 8 * 2**20, 0, altered)])
    assert parse_name(verdict) == (4 + 8 * 2**20, 0)


# What is not where, or what, the table says, is refused.


@each("message", range(8))
def test_a_row_with_another_message_is_refused(host, states, bits, sealed, message):
    """Each message under the key of each other one."""
    for other in set(range(8)) - {message}:
        segments = [(other, 0, sealed[message])]
        count = max(1, -(-len(sealed[message]) // SEALED_CHUNK_SIZE))
        verdict, (plain,) = host.open_nest(states, bits, segments, blocks=2)
        assert (verdict, plain) == (name_of(other, 0), bytes(len(PLAIN[message]))), (other, count)


@each("number", [1, 2, 2**32, 2**38 - 4])
def test_a_row_with_another_chunk_is_refused(host, states, bits, sealed, number):
    segments = [(0, 0, sealed[0]), (4, number, sealed[4])]
    assert host.open_nest(states, bits, segments, blocks=2) == (name_of(4, number), [PLAIN[0], bytes(SIZES[4])])


@each("change", [-1, 1, -16, 16, 2**32, -100, 5 * CHUNK_SIZE])
def test_a_row_with_another_size_is_refused(host, states, bits, sealed, change):
    """The size decides where the tag lies. Room behind the message keeps the launch within its memory."""
    if change > 0:
        segments = [(0, 0, sealed[0] + bytes(SEALED_CHUNK_SIZE - len(sealed[0])))]
        alter = lambda rows: [rows[0]._replace(size=SIZES[0] + change, limit=1)]  # noqa: E731
    else:
        segments = [(0, 0, sealed[0])]
        alter = lambda rows: [rows[0]._replace(size=SIZES[0] + change)]  # noqa: E731
    verdict, (plain,) = host.open_nest(states, bits, segments, alter=alter)
    assert verdict == name_of(0, 0)
    assert set(plain[: SIZES[0]]) <= {0, UNTOUCHED}


def test_rows_with_swapped_places_are_refused(host, states, bits, sealed):
    def alter(rows):
        return [rows[0]._replace(place=rows[1].place), rows[1]._replace(place=rows[0].place)]

    twice = [(6, 0, sealed[6]), (7, 0, sealed[7])]
    verdict, plain = host.open_nest(states, bits, twice, alter=alter)
    assert (verdict, plain) == (name_of(6, 0), [bytes(SIZES[6]), bytes(SIZES[7])])


def test_two_rows_with_one_target_write_there_and_nowhere_else(host, states, bits, keys):
    """The host gives such a table to nothing but gathers; the kernel keeps to the target."""
    first, second = (reference.seal(keys[n], NONCES[n], bytes([n]) * 500) for n in (0, 1))

    def alter(rows):
        return [rows[0], rows[1]._replace(target=rows[0].target)]

    verdict, (both, other) = host.open_nest(states, bits, [(0, 0, first), (1, 0, second)], alter=alter, blocks=1)
    assert verdict is None
    assert both == b"\1" * 500
    assert other == bytes([UNTOUCHED]) * 500


def test_a_table_has_room_for_so_many_segments_and_no_more():
    assert len(pack_table([])) == len(pack_table([(1, 2, 3, 4, 5, 6)] * MAX_SEGMENTS)) == 4000
    with pytest.raises(ValueError, match="100"):
        pack_table([(1, 2, 3, 4, 5, 6)] * (MAX_SEGMENTS + 1))


# Gathers.


def gathers(sealed):
    """Of three messages: what is packed of them, the plan, and the result."""
    chosen = {4: [(5, 10), (CHUNK_SIZE - 3, 9), (2 * CHUNK_SIZE + 700, 77)], 5: [(16000, 383), (0, 7)], 0: [(99, 1)]}
    segments, expected = [], []
    for message, ranges in chosen.items():
        pieces, size = plan(ranges)
        packed = pack(sealed[message], pieces.chunks.tolist())
        segments.append((message, SIZES[message], packed, pieces, size))
        expected.append(b"".join(PLAIN[message][start : start + length] for start, length in ranges))
    return segments, expected


@each("blocks", [1, 2, 3, 8])
def test_pieces_of_several_messages_are_gathered_in_one_launch(host, states, bits, sealed, blocks):
    segments, expected = gathers(sealed)
    assert host.gather_nest(states, bits, segments, blocks=blocks) == (None, expected)


@each(("message", "chunk", "name"), [(4, 1, (4, 1)), (4, 2, (4, 2)), (5, 0, (5, 0)), (0, 0, (0, 0))])
def test_a_bad_chunk_of_one_message_is_named_and_only_its_pieces_are_zeros(
    host, states, bits, sealed, message, chunk, name
):
    altered = [*sealed]
    altered[message] = flip(sealed[message], 8 * chunk * SEALED_CHUNK_SIZE + 3)
    segments, expected = gathers(altered)
    verdict, found = host.gather_nest(states, bits, segments, blocks=2)
    assert parse_name(verdict) == name
    for (number, *_), got, want in zip(segments, found, expected, strict=True):
        assert (got == want) is (number != message)
        assert all(byte in {0, right} for byte, right in zip(got, want, strict=True))


def test_a_plan_that_was_altered_clears_the_results_of_all_its_messages(host, states, bits, sealed):
    segments, expected = gathers(sealed)
    for verdict in (0, 2**32 - 1, 2**64 - 2):
        found = host.gather_nest(states, bits, segments, blocks=2, plan_verdict=verdict)
        assert found == (name_of(segments[0][0], 0), [bytes(len(each)) for each in expected])


VALUES = [-1, 2**62, 2**63 - 1, 2**32, 2**38, SIZES[4], 100_000]


@pytest.mark.nightly  # by day the same is shown of plans of one message
@pytest.mark.slow
@each("part", ["chunks", "starts", "table"])
@each("value", VALUES)
def test_a_plan_of_several_messages_stays_within_each_of_them(host, states, bits, sealed, part, value):
    """Each number of the plan in turn is another one: of a chunk, of a first piece, an offset, a place or a size.

    The buffers of the launch have fences, and a kernel that reads outside of one is stopped. What a piece takes comes
    from its own message, whose bytes reach only its own result.
    """
    segments, expected = gathers(sealed)
    sizes = {"chunks": 5, "starts": 6, "table": 21}
    for place in range(sizes[part]):

        def change(whole, place=place):
            numbers = getattr(whole, part).reshape(-1)
            assert numbers.size == sizes[part]
            numbers[place] = value

        fresh = gathers(sealed)[0]
        verdict, found = host.gather_nest(states, bits, fresh, blocks=2, change=change)
        message, chunk = parse_name(verdict)
        assert message in {0, 4, 5}
        assert chunk <= SIZES[message] // CHUNK_SIZE
        others = [n for n, (number, *_) in enumerate(segments) if number != message]
        if part != "starts":
            assert all(found[n] == expected[n] for n in others)


def test_a_chunk_number_of_another_message_is_refused(host, states, bits, sealed):
    segments, _ = gathers(sealed)

    def change(whole):
        assert whole.chunks.tolist() == [0, 1, 2, 0, 0]
        whole.chunks[3] = 2  # message 5 has one chunk

    verdict, _ = host.gather_nest(states, bits, segments, change=change)
    assert parse_name(verdict) == (5, 0)


def test_a_piece_that_reaches_into_the_next_result_is_refused(host, states, bits, sealed):
    pieces = as_pieces([0], [0, 1], [(0, 90, 20)])
    other = as_pieces([0], [0, 1], [(0, 0, 20)])
    segments = [(0, SIZES[0], sealed[0], pieces, 100), (7, SIZES[7], sealed[7], other, 200)]
    verdict, (first, second) = host.gather_nest(states, bits, segments)
    assert parse_name(verdict) == (0, 0)
    assert first == bytes([UNTOUCHED]) * 100
    assert second[:20] == PLAIN[7][:20]
    assert np.all(np.frombuffer(second[20:], np.uint8) == UNTOUCHED)
