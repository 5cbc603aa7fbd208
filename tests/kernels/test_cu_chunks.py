"""Runs of chunks through the CUDA kernels, against pyca/cryptography: right ones, and wrong ones at every place."""

import numpy as np
import pytest
from helpers import reference
from helpers.buffers import Fenced
from helpers.cases import each
from helpers.kernel_host import (
    SOURCE,
    TICKET,
    State,
    constants,
    pack,
    size_of,
    table_at,
    verdict_of,
    verdict_words,
    wrap,
)
from helpers.kernel_suite import assert_last_chunk, remains_of_secrets
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE, noise
from helpers.runs import flip, plan
from hypothesis import given, settings
from hypothesis import strategies as st

# Around every place where a chunk falls to other threads, and every remainder next to them.
LENGTHS = [48, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1000, 4095, 4096, 4097, 12345]
LENGTHS += [*range(36), *range(8176, 8210), *range(16350, 16384)]
FIRSTS = [0, 1, 2**32 - 3, 2**32 - 1, 2**32, 2**38 - 5]
OFFSETS = st.integers(0, 15)
GRIDS = st.integers(1, 7)
FAR = 2**18  # the plaintext of this chunk begins 4 GiB after that of the first
TABLE_BYTES = 65536


def opened(key, nonce, sealed, first=0):
    """Return the result to expect: the lowest bad number, and the plaintext with zeros for every bad chunk."""
    chunks = reference.open_each(key, nonce, sealed, first)
    sizes = [min(CHUNK_SIZE, size_of(sealed) - index * CHUNK_SIZE) for index in range(len(chunks))]
    plain = [bytes(size) if chunk is None else chunk for size, chunk in zip(sizes, chunks, strict=True)]
    bad = next((first + index for index, chunk in enumerate(chunks) if chunk is None), None)
    return bad, b"".join(plain)


@pytest.fixture(scope="module")
def message(key, nonce):
    """Five chunks, the last of them short."""
    return reference.seal(key, nonce, noise(4 * CHUNK_SIZE + 1234, seed=5).tobytes(), 7)


# Right


@each("length", LENGTHS)
def test_a_last_chunk_of_any_length_opens_and_seals(host, state, key, nonce, length):
    assert_last_chunk(host, state, key, nonce, length)


@pytest.mark.slow
@each("first", FIRSTS)
@each("blocks", [1, 2, 3, 9])
def test_a_run_of_chunks_opens_and_seals_under_any_number(host, state, key, nonce, first, blocks):
    plain = noise(4 * CHUNK_SIZE + 99, seed=first % 1000).tobytes()
    sealed = reference.seal(key, nonce, plain, first)
    assert host.open_run(state, sealed, first, blocks=blocks) == (None, plain)
    assert host.seal_run(state, plain, first, blocks=blocks) == sealed


@each("chunks", [1, 2, 3])
@each("ends", [False, True])
def test_a_run_may_end_with_a_full_chunk_or_an_empty_one(host, state, key, nonce, chunks, ends):
    plain = noise(chunks * CHUNK_SIZE, seed=chunks).tobytes()
    sealed = reference.seal(key, nonce, plain, 11, ends=ends)
    assert host.open_run(state, sealed, 11, blocks=2) == (None, plain)
    assert host.seal_run(state, plain, 11, ends=ends, blocks=2) == sealed


@settings(max_examples=40, deadline=None)
@given(size=st.integers(0, 3 * CHUNK_SIZE), first=st.integers(0, 2**38 - 4), blocks=GRIDS, offset=OFFSETS, seed=OFFSETS)
def test_any_run_opens_and_seals(host, state, key, nonce, size, first, blocks, offset, seed):
    plain = noise(size, seed).tobytes()
    sealed = reference.seal(key, nonce, plain, first)
    assert host.open_run(state, sealed, first, blocks=blocks, offset=offset) == (None, plain)
    assert host.seal_run(state, plain, first, blocks=blocks, offset=offset) == sealed


@settings(max_examples=20, deadline=None)
@given(
    key=st.binary(min_size=16, max_size=16) | st.binary(min_size=32, max_size=32),
    nonce=st.binary(min_size=12, max_size=12),
)
def test_any_key_and_nonce_open_and_seal(host, key, nonce):
    plain = noise(CHUNK_SIZE + 77).tobytes()
    state = host.prepare(key, nonce)
    sealed = reference.seal(key, nonce, plain, 2**37 + 1)
    assert host.open_run(state, sealed, 2**37 + 1) == (None, plain)
    assert host.seal_run(state, plain, 2**37 + 1) == sealed


# Wrong


@pytest.mark.slow
@each("length", [0, 1, 3, 16, 100, 8192, 16383])
def test_every_byte_of_a_tag_counts_and_of_one_every_bit(host, state, key, nonce, length):
    sealed = reference.seal(key, nonce, noise(length).tobytes(), 5)
    for byte in range(TAG_SIZE):
        for bit in range(8) if length == 3 else {0, 7, byte % 8}:
            altered = flip(sealed, 8 * (length + byte) + bit)
            assert host.open_run(state, altered, 5) == (5, bytes(length)), (byte, bit)


@each("length", [1, 15, 16, 17, 33])
def test_every_byte_of_a_short_ciphertext_counts(host, state, key, nonce, length):
    sealed = reference.seal(key, nonce, noise(length).tobytes(), 5)
    for byte in range(length):
        assert host.open_run(state, flip(sealed, 8 * byte + byte % 8), 5) == (5, bytes(length)), byte


@each("byte", [0, 1, 15, 16, 511, 512, 4095, 8175, 8176, 8191, 8192, 8193, 12288, 16367, 16368, 16383, 16384, 16399])
def test_a_byte_at_any_place_of_a_full_chunk_counts(host, state, key, nonce, message, byte):
    altered = flip(message, 8 * (SEALED_CHUNK_SIZE + byte) + 3)
    bad, plain = host.open_run(state, altered, 7, blocks=2)
    assert (bad, plain) == opened(key, nonce, altered, 7)
    assert bad == 8
    assert not any(plain[CHUNK_SIZE : 2 * CHUNK_SIZE])
    assert all(plain[:CHUNK_SIZE] + plain[2 * CHUNK_SIZE :])


def test_a_tag_of_zeros_is_wrong(host, state, message):
    bad, plain = host.open_run(state, message[: 4 * SEALED_CHUNK_SIZE + 1234] + bytes(TAG_SIZE), 7)
    assert bad == 11
    assert not any(plain[4 * CHUNK_SIZE :])


@each("first", [0, 6, 8, 7 + 2**32, 7 ^ 2**37])
def test_a_chunk_under_another_number_is_refused(host, state, message, first):
    assert host.open_run(state, message, first) == (first, bytes(4 * CHUNK_SIZE + 1234))


def test_a_chunk_under_another_key_or_nonce_is_refused(host, state, key, nonce, message):
    zeros = bytes(4 * CHUNK_SIZE + 1234)
    for bit in (0, 31, 64, 8 * len(key) - 1):
        assert host.open_run(host.prepare(flip(key, bit), nonce), message, 7) == (7, zeros)
    for bit in (0, 31, 32, 50, 95):
        assert host.open_run(host.prepare(key, flip(nonce, bit)), message, 7) == (7, zeros)
    assert host.open_run(state, message, 7)[0] is None


def test_swapped_and_repeated_chunks_are_refused(host, state, key, nonce, message):
    chunks = [message[start : start + SEALED_CHUNK_SIZE] for start in range(0, len(message), SEALED_CHUNK_SIZE)]
    for order in ([1, 0, 2, 3, 4], [0, 1, 1, 3, 4], [0, 2, 1, 3, 4]):
        altered = b"".join(chunks[index] for index in order)
        result = host.open_run(state, altered, 7, blocks=3)
        assert result == opened(key, nonce, altered, 7)
        assert result[0] == 7 + next(place for place, index in enumerate(order) if place != index)


@each("cut", [1, 15, 16, 17, 1000, 1234])
def test_a_chunk_that_was_cut_short_is_refused(host, state, key, nonce, message, cut):
    altered = message[:-cut]
    result = host.open_run(state, altered, 7, blocks=2)
    assert result == opened(key, nonce, altered, 7)
    assert result[0] == 11


@pytest.mark.slow
@each("blocks", [1, 2, 3, 5, 8])
@each("bad", [{0, 1, 2, 3, 4}, {4, 1}, {3, 2}, {4}, {0, 4}])
def test_the_lowest_bad_number_is_reported_whatever_the_order(host, state, key, nonce, message, blocks, bad):
    altered = flip(message, *(8 * (chunk * SEALED_CHUNK_SIZE + 50 * chunk) for chunk in bad))
    result = host.open_run(state, altered, 7, blocks=blocks)
    assert result == opened(key, nonce, altered, 7)
    assert result[0] == 7 + min(bad)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(0, 2 * CHUNK_SIZE + 100),
    places=st.lists(st.integers(0, 2**31), max_size=4),
    blocks=GRIDS,
    offset=OFFSETS,
)
def test_any_altered_run_opens_as_far_as_it_is_right(host, state, key, nonce, size, places, blocks, offset):
    sealed = reference.seal(key, nonce, noise(size).tobytes(), 1)
    altered = flip(sealed, *(place % (8 * len(sealed)) for place in places))
    assert host.open_run(state, altered, 1, blocks=blocks, offset=offset) == opened(key, nonce, altered, 1)


def test_a_verdict_that_stands_is_only_ever_lowered(host, state, message):
    altered = flip(message, 8 * 2 * SEALED_CHUNK_SIZE)
    assert host.open_run(state, altered, 7, verdict=8)[0] == 8
    assert host.open_run(state, altered, 7, verdict=9)[0] == 9
    assert host.open_run(state, altered, 7, verdict=10)[0] == 9
    assert host.open_run(state, message, 7, verdict=10)[0] == 10


def test_a_wiped_state_opens_nothing(host, state, message):
    wiped = State(np.zeros_like(state.data), state.bits)
    wiped.data.flags.writeable = False
    assert host.open_run(wiped, message, 7) == (7, bytes(4 * CHUNK_SIZE + 1234))


# Sizes


@pytest.mark.parametrize("size", [2**32, 2**32 + 100, 2**33 + CHUNK_SIZE - 1, 2**51 + 1])
def test_a_chunk_of_a_run_above_4_gib_is_whole(host, state, key, nonce, size):
    """Of such a run only the first chunk is there. A size cut to 32 bits would make the chunk short."""
    if not hasattr(host, "remains"):
        pytest.skip("only the shim takes a size without its bytes")
    plain = noise(CHUNK_SIZE).tobytes()
    sealed = reference.seal(key, nonce, plain, 7)[:SEALED_CHUNK_SIZE]
    assert host.open_run(state, sealed, 7, size=size) == (None, plain)
    assert host.seal_run(state, plain, 7, ends=False, size=size) == sealed


def test_a_chunk_beyond_4_gib_of_a_run_is_where_it_belongs(host, state, key, nonce):
    """Only that chunk is there, and only its block runs. An offset cut to 32 bits would lead to another place."""
    if not hasattr(host, "remains"):
        pytest.skip("only the shim runs one block of many")
    expected, text = reference.seal(key, nonce, noise(700).tobytes(), 7 + FAR), noise(700)
    sealed = np.zeros(FAR * SEALED_CHUNK_SIZE + len(expected), np.uint8)  # pages that nothing touches take no memory
    plain = np.zeros(FAR * CHUNK_SIZE + 700, np.uint8)
    sealed[FAR * SEALED_CHUNK_SIZE :] = np.frombuffer(expected, np.uint8)
    words = verdict_words(ended=FAR)
    table = table_at(plain, 7, plain.size, FAR + 1)
    host.run_last(state, "open", sealed, FAR + 1, 1, words.data, TICKET, table, blocks=FAR + 1)
    assert verdict_of(words) is None
    assert np.array_equal(plain[FAR * CHUNK_SIZE :], text)
    sealed[FAR * SEALED_CHUNK_SIZE :] = 0
    words, told = verdict_words(ended=FAR), Fenced(16, 16)
    arguments = plain, sealed, 7, FAR + 1, plain.size, words.data, TICKET, told.data, wrap([state.row])
    host.run_last(state, "seal", *arguments, blocks=FAR + 1)
    assert verdict_of(words) is None
    assert sealed[FAR * SEALED_CHUNK_SIZE :].tobytes() == expected


# Secrets


def test_no_kernel_leaves_a_secret_in_shared_memory(host, key, nonce):
    if not hasattr(host, "remains"):
        pytest.skip("only the shim shows shared memory")
    assert remains_of_secrets(host, key, nonce) == {"open": [], "seal": [], "gather": []}


def test_all_shared_memory_but_the_tables_is_wiped(host, state, key, nonce):
    """Sums and the start of a keystream are secrets, too, but no part of a key or a plaintext."""
    if not hasattr(host, "remains"):
        pytest.skip("only the shim shows shared memory")
    sizes = constants(SOURCE)
    plain = noise(2 * CHUNK_SIZE + 9).tobytes()
    sealed = reference.seal(key, nonce, plain)
    assert host.open_run(state, sealed) == (None, plain)
    assert not any(host.remains()[TABLE_BYTES : sizes["SHARED_BYTES"]])
    assert host.seal_run(state, plain) == sealed
    assert not any(host.remains()[TABLE_BYTES : sizes["SHARED_BYTES"]])
    pieces, size = plan([(0, 2 * CHUNK_SIZE)])
    packed = pack(sealed, pieces.chunks.tolist())
    assert host.gather(state, packed, pieces, len(plain), size) == (None, plain[:size])
    assert not any(host.remains()[TABLE_BYTES : sizes["GATHER_SHARED_BYTES"]])
