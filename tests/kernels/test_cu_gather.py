"""Gathers through the CUDA kernels: pieces of packed chunks, scattered into a result."""

import numpy as np
import pytest
from helpers import reference
from helpers.cases import each
from helpers.kernel_host import TICKET, pack, table_at, verdict_of, verdict_words
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, noise
from helpers.runs import as_pieces, flip, plan, plan_of_rows, ranges_within, zeroed
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 5 * CHUNK_SIZE + 1234
PLAIN = noise(SIZE, seed=1).tobytes()
GRIDS = st.integers(1, 7)
OFFSETS = st.integers(0, 15)
RANGES = ranges_within(SIZE, 40)
UNTOUCHED = 0xA5


@pytest.fixture(scope="module")
def sealed(key, nonce):
    return reference.seal(key, nonce, PLAIN)


def gather(host, state, sealed, pieces, size, **options):
    """Stage the chunks that a plan names, as they are staged for a device, and gather out of them."""
    return host.gather(state, pack(sealed, pieces.chunks.tolist()), pieces, SIZE, size, **options)


def slices(plain, ranges):
    return b"".join(plain[start : start + length] for start, length in ranges)


@settings(max_examples=50, deadline=None)
@given(ranges=RANGES, blocks=GRIDS, offset=OFFSETS)
def test_pieces_are_slices_of_the_plaintext(host, state, sealed, ranges, blocks, offset):
    pieces, size = plan(ranges)
    assert gather(host, state, sealed, pieces, size, blocks=blocks, offset=offset) == (None, slices(PLAIN, ranges))


@settings(max_examples=50, deadline=None)
@given(
    ranges=RANGES, bad=st.sets(st.integers(0, 5), min_size=1), byte=st.integers(0, 1249), blocks=GRIDS, offset=OFFSETS
)
def test_pieces_of_bad_chunks_are_zeros_and_all_others_right(host, state, sealed, ranges, bad, byte, blocks, offset):
    altered = flip(sealed, *(8 * (chunk * SEALED_CHUNK_SIZE + byte) for chunk in bad))
    pieces, size = plan(ranges)
    lowest = min(bad & set(pieces.chunks.tolist()), default=None)
    result = gather(host, state, altered, pieces, size, blocks=blocks, offset=offset)
    assert result == (lowest, slices(zeroed(PLAIN, bad), ranges))


# SIZE is 83154 = 2 * 3 * 13859 bytes.
@pytest.mark.slow
@each("row_bytes", [1, 2, 3, 6, 13859, 27718, 41577])
def test_rows_are_those_that_numpy_chooses(host, state, sealed, row_bytes):
    rows = np.frombuffer(PLAIN, np.uint8).reshape(-1, row_bytes)
    random = np.random.default_rng(row_bytes)
    count = len(rows)
    picks = [
        random.integers(-count, count, min(count, 300)),
        random.integers(0, count, 3),
        np.repeat(random.integers(0, count, 2), 5),
        np.arange(count)[::-1][:200],
        random.random(count) < 0.01,
        slice(None),
        slice(1, None, 2) if row_bytes > 6 else slice(3, 4000, 7),
        count - 1,
        [],
    ]
    for blocks, pick in enumerate(picks, start=1):
        chosen = plan_of_rows(pick, rows.shape, SIZE)
        result = gather(host, state, sealed, chosen.ranges().pieces(), chosen.nbytes, blocks=blocks, offset=blocks)
        assert result == (None, rows[pick].tobytes())


@each("offset", range(16))
def test_any_alignment_of_source_and_target_is_copied(host, state, sealed, offset):
    # Of every length from 0 to 40, so that heads, words and tails of every kind are met; many pieces, then one by one.
    ranges = [(1000 + 50 * length + length % 16, length) for length in range(41)]
    pieces, size = plan(ranges)
    assert gather(host, state, sealed, pieces, size, offset=offset) == (None, slices(PLAIN, ranges))
    alone = [(3, 1), (17, 5), (CHUNK_SIZE - 9, 9), (offset, CHUNK_SIZE - offset), (SIZE - 7, 7), (SIZE - 1, 1)]
    for start, length in alone:
        pieces, size = plan([(start, length)])
        assert gather(host, state, sealed, pieces, size, offset=offset) == (None, PLAIN[start : start + length])


@each("count", [1, 2, 15, 16, 17, 31, 33, 100])
def test_a_chunk_may_have_few_pieces_or_many(host, state, sealed, count):
    ranges = [(97 * index % 16000, 1 + 53 * index % 700) for index in range(count)]
    pieces, size = plan([(start, min(length, CHUNK_SIZE - start)) for start, length in ranges])
    expected = b"".join(PLAIN[start : start + min(length, CHUNK_SIZE - start)] for start, length in ranges)
    assert gather(host, state, sealed, pieces, size) == (None, expected)


def test_what_no_piece_names_is_left_alone(host, state, sealed):
    pieces = as_pieces([1, 5], [0, 2, 3], [(0, 3, 5), (100, 50, 0), (1230, 90, 4)])
    for altered, bad in ((sealed, None), (flip(sealed, 8 * SEALED_CHUNK_SIZE), 1)):
        expected = bytearray([UNTOUCHED] * 100)
        expected[3:8] = PLAIN[CHUNK_SIZE : CHUNK_SIZE + 5] if bad is None else bytes(5)
        expected[90:94] = PLAIN[-4:]
        assert gather(host, state, altered, pieces, 100) == (bad, bytes(expected))
    pieces = as_pieces([2, 3], [0, 0, 0], [])  # without pieces a chunk is still verified
    assert gather(host, state, sealed, pieces, 0) == (None, b"")
    assert gather(host, state, flip(sealed, 8 * 3 * SEALED_CHUNK_SIZE), pieces, 0) == (3, b"")


def test_the_order_of_the_chunks_is_free_and_the_lowest_bad_one_reported(host, state, sealed):
    altered = flip(sealed, 8 * 4 * SEALED_CHUNK_SIZE, 8 * 1 * SEALED_CHUNK_SIZE)
    for order in ((3, 4, 0, 1), (3, 0, 1, 4)):
        ranges = [(chunk * CHUNK_SIZE + 3, 5) for chunk in order]
        pieces, size = plan(ranges)
        expected = slices(zeroed(PLAIN, {1, 4}), ranges)
        for blocks in (1, 2, 5):
            assert gather(host, state, altered, pieces, size, blocks=blocks) == (1, expected), order


@each(
    ("number", "after"),
    [(2**38 - 2, 700), *((3, after) for after in (2**32, 2**32 + 100, 2**33 + CHUNK_SIZE - 1, 2**51 + 1))],
)
def test_a_chunk_of_any_number_and_far_from_the_end_is_whole(host, state, key, nonce, number, after):
    """Of a message above 4 GiB only the gathered chunk is there. A size cut to 32 bits would make the chunk short."""
    size = min(after, CHUNK_SIZE)
    sealed = reference.seal(key, nonce, PLAIN[:size], number)[:SEALED_CHUNK_SIZE]
    pieces = as_pieces([number], [0, 2], [(size - 50, 0, 50), (0, 50, 20)])
    total = number * CHUNK_SIZE + after
    assert host.gather(state, sealed, pieces, total, 70) == (None, PLAIN[size - 50 : size] + PLAIN[:20])
    assert host.gather(state, flip(sealed, 0), pieces, total, 70) == (number, bytes(70))


@each("last", [0, 1, 15, 16, 17, 8192, CHUNK_SIZE - 1])
def test_a_last_chunk_of_any_length_is_gathered(host, state, key, nonce, last):
    plain = noise(CHUNK_SIZE + last, seed=last).tobytes()
    sealed = reference.seal(key, nonce, plain)
    table = [(0, 0, last)] if last else []
    pieces = as_pieces([1], [0, len(table)], table)
    result = host.gather(state, sealed[SEALED_CHUNK_SIZE:], pieces, CHUNK_SIZE + last, last, offset=5)
    assert result == (None, plain[CHUNK_SIZE:])


@pytest.mark.slow
@each(
    ("part", "value"),
    [(part, value) for part in ("chunks", "starts", "table") for value in (-1, 2**62, 2**63 - 1, SIZE, 100_000)]
    + [("chunks", 6), ("starts", 5), ("starts", 6)],
)
def test_a_plan_that_reaches_outside_is_reported_and_writes_nowhere_else(host, state, sealed, part, value):
    """The buffers of the launch have fences, and a kernel that reads outside of one is stopped."""
    chunks, starts, table = [0, 2, 5], [0, 2, 3, 4], [[0, 0, 40], [100, 40, 10], [7, 50, 30], [0, 80, 20]]
    packed = pack(sealed, chunks)
    for place in range({"chunks": 3, "starts": 4, "table": 12}[part]):
        pieces = as_pieces(chunks, starts, table)
        getattr(pieces, part).reshape(-1)[place] = value
        bad, _ = host.gather(state, packed, pieces, SIZE, 100)
        assert bad is not None


@each("chunk", [1, 5])
@each("before", [0, 20])
def test_a_piece_may_reach_a_bound_and_no_further(host, state, sealed, chunk, before):
    """The piece is alone, which all threads copy, or follows empty ones, each of which falls to a warp."""
    length, limit = min(CHUNK_SIZE, SIZE - chunk * CHUNK_SIZE), 100
    cases = [
        *(((length - 3, 0, 3), True), ((length, 0, 0), True), ((length - 3, 0, 4), False), ((length + 1, 0, 0), False)),
        *(((0, limit - 3, 3), True), ((0, limit, 0), True), ((0, limit - 3, 4), False), ((0, limit + 1, 0), False)),
        *(((0, 0, limit), True), ((0, 0, limit + 1), False), ((length - limit, 0, limit), True)),
    ]
    for (offset, place, size), fits in cases:
        pieces = as_pieces([chunk], [0, before + 1], [(0, 0, 0)] * before + [(offset, place, size)])
        expected = bytearray([UNTOUCHED] * limit)
        if fits:
            start = chunk * CHUNK_SIZE + offset
            expected[place : place + size] = PLAIN[start : start + size]
        result = gather(host, state, sealed, pieces, limit)
        assert result == (None if fits else chunk, bytes(expected)), (offset, place, size)


def test_pieces_beyond_4_gib_are_where_they_belong(host, state, key, nonce):
    """Of the packed chunks only the last is there, and only its block runs."""
    if not hasattr(host, "remains"):
        pytest.skip("only the shim runs one block of many")
    before, place = 2**18, 2**32 + 5
    chunk = np.frombuffer(reference.seal(key, nonce, PLAIN[:700], 3), np.uint8)
    packed = np.zeros(before * SEALED_CHUNK_SIZE + chunk.size, np.uint8)  # pages that nothing touches take no memory
    packed[before * SEALED_CHUNK_SIZE :] = chunk
    target = np.zeros(place + 600, np.uint8)
    opened = np.zeros(2 * before + 3 + 3, np.int64)  # chunks, starts, and the piece
    opened[before], opened[2 * before + 2], opened[-3:] = 3, 1, (50, place, 600)
    words = verdict_words(ticket=TICKET, opened=TICKET, ended=before)
    table = table_at(target, 0, 3 * CHUNK_SIZE + 700, target.size)
    arguments = (packed, before + 1, 1, words.data, TICKET + 1, opened, 1, table)
    host.run_last(state, "gather", *arguments, blocks=before + 1)
    assert verdict_of(words, TICKET + 1) is None
    assert target[place:].tobytes() == PLAIN[50:650]


@each("size", [0, 1, 511, 100_000])
def test_a_plan_that_was_altered_is_not_read_and_the_result_is_zeros(host, state, sealed, size):
    pieces = as_pieces([2**62], [2**62, 2**62], [(2**62, 2**62, 2**62)])
    for blocks, offset in ((1, 0), (3, 5)):
        result = gather(host, state, sealed, as_pieces([0], [0, 0], []), size, blocks=blocks, offset=offset)
        assert result == (None, bytes([UNTOUCHED]) * size)
        for verdict in (0, 2**32 - 1, 2**64 - 2):
            options = {"blocks": blocks, "offset": offset, "plan_verdict": verdict}
            assert host.gather(state, sealed[:SEALED_CHUNK_SIZE], pieces, SIZE, size, **options) == (0, bytes(size))
