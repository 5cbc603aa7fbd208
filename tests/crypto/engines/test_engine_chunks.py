"""Test every engine on one chunk and on many, good and bad, against plain AES-GCM."""

from itertools import permutations, product
from random import Random

import pytest
from helpers import reference
from helpers.buffers import Fenced
from helpers.cases import each
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE, noise
from helpers.runs import Runs, flip, zeroed
from hypothesis import given, settings
from hypothesis import strategies as st

NONCE = bytes.fromhex("f0e1d2c3b4a5968778695a4b")
# One turn of the main loop works 512 bytes on 512-bit vectors and 256 on 256-bit ones, with 128 on the narrowest.
SHORT = [0, 1, 15, 16, 17, 127, 128, 255, 256, 257, 511, 512, 513, 1000]
LONG = [CHUNK_SIZE - 17, CHUNK_SIZE - 1, CHUNK_SIZE]
NUMBERS = [0, 1, 255, 2**32 - 1, 2**32 + 3, 2**38 - 1]


@pytest.fixture
def runs(engine_under_test, key):
    return Runs(engine_under_test, key, NONCE)


# Good chunks


def test_a_chunk_is_what_plain_aes_gcm_makes_of_it(runs, key):
    for size, chunk in product(SHORT + LONG, NUMBERS):
        plain = noise(size, seed=size).tobytes()
        sealed = reference.seal(key, NONCE, plain, chunk, ends=False)
        assert (size, chunk, runs.seal(plain, chunk, ends=False)) == (size, chunk, sealed)
        assert (size, chunk, *runs.open(sealed, chunk)) == (size, chunk, None, plain)


def test_a_chunk_of_any_short_size_is_what_plain_aes_gcm_makes_of_it(runs, key):
    for size in range(1100):
        plain = noise(size, seed=size).tobytes()
        sealed = reference.seal(key, NONCE, plain, 9)
        assert (size, runs.seal(plain, 9)) == (size, sealed)
        assert (size, *runs.open(sealed, 9)) == (size, None, plain)


@settings(max_examples=30, deadline=None)
@given(
    key=st.sampled_from([16, 32]).flatmap(lambda size: st.binary(min_size=size, max_size=size)),
    nonce=st.binary(min_size=12, max_size=12),
    first=st.integers(0, 2**38 - 8),
    size=st.integers(0, 6 * CHUNK_SIZE),
)
def test_a_run_is_what_plain_aes_gcm_makes_of_it(engine_under_test, key, nonce, first, size):
    plain = noise(size, seed=size).tobytes()
    sealed = reference.seal(key, nonce, plain, first)
    runs = Runs(engine_under_test, key, nonce)
    assert runs.seal(plain, first) == sealed
    assert runs.open(sealed, first) == (None, plain)


@pytest.mark.slow
def test_a_run_longer_than_a_thread_works_alone_is_what_plain_aes_gcm_makes_of_it(make_engine, key):
    plain = noise(700 * CHUNK_SIZE + 333).tobytes()
    sealed = reference.seal(key, NONCE, plain, 2**32 - 350)
    for threads in (1, 2, 16):
        runs = Runs(make_engine(threads), key, NONCE)
        assert runs.seal(plain, 2**32 - 350) == sealed
        assert runs.open(sealed, 2**32 - 350) == (None, plain)


def test_a_run_without_chunks_is_no_work_and_no_error(runs):
    assert runs.open(b"", 5) == (None, b"")


# Bad chunks


def assert_refused(runs, sealed, chunk, bits):
    """Every one of these bits, turned over, must leave zeros and give the number of the chunk."""
    source, target = Fenced.holding(sealed), Fenced(len(sealed) - TAG_SIZE)
    engine, schedule = runs.engine, runs.schedule
    for bit in bits:
        source.data[bit // 8] ^= 1 << bit % 8
        target.data.fill(0xA5)
        bad = engine.open_run(schedule, source.data, target.data, chunk)
        assert (bit, bad, bool(target.data.any())) == (bit, chunk, False)
        assert (bit, engine.verify_run(schedule, source.data, chunk)) == (bit, chunk)
        source.data[bit // 8] ^= 1 << bit % 8
    assert target.stands
    assert engine.open_run(schedule, source.data, target.data, chunk) is None


@each("size", SHORT)
def test_every_flipped_bit_of_a_short_chunk_is_found(runs, key, size):
    chunk = NUMBERS[size % len(NUMBERS)]
    sealed = reference.seal(key, NONCE, noise(size).tobytes(), chunk)
    assert_refused(runs, sealed, chunk, range(8 * len(sealed)))


@each("size", LONG)
@pytest.mark.slow
def test_a_flipped_bit_anywhere_in_a_long_chunk_is_found(runs, key, size):
    sealed = reference.seal(key, NONCE, noise(size).tobytes(), 2**32 + 3, ends=False)
    tag = range(8 * size, 8 * len(sealed))
    assert_refused(runs, sealed, 2**32 + 3, [*range(0, 8 * size, 29), *tag])


@each("size", [0, 1, 16, 300, CHUNK_SIZE - 1])
def test_a_chunk_in_the_place_of_another_or_under_another_key_or_nonce_is_refused(runs, key, size):
    plain = noise(size).tobytes()
    for chunk, other in permutations(NUMBERS, 2):
        assert runs.open(reference.seal(key, NONCE, plain, chunk), other) == (other, bytes(size))
    assert runs.open(reference.seal(key[::-1], NONCE, plain), 0) == (0, bytes(size))
    assert runs.open(reference.seal(key, NONCE[::-1], plain), 0) == (0, bytes(size))


@each("size", [1, 16, 17, 300])
def test_every_truncation_of_a_chunk_is_refused(runs, key, size):
    sealed = reference.seal(key, NONCE, noise(size).tobytes())
    for length in range(TAG_SIZE, len(sealed)):
        assert runs.open(sealed[:length]) == (0, bytes(length - TAG_SIZE))
        assert runs.open(sealed[len(sealed) - length :]) == (0, bytes(length - TAG_SIZE))


def test_two_chunks_that_changed_places_are_both_refused(runs, key):
    plain = noise(4 * CHUNK_SIZE + 5).tobytes()
    sealed = reference.seal(key, NONCE, plain)
    parts = [sealed[start : start + SEALED_CHUNK_SIZE] for start in range(0, len(sealed), SEALED_CHUNK_SIZE)]
    parts[1], parts[3] = parts[3], parts[1]
    assert runs.open(b"".join(parts)) == (1, zeroed(plain, {1, 3}))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), count=st.integers(1, 7), last=st.integers(0, CHUNK_SIZE), first=st.sampled_from([0, 7, 2**33]))
def test_only_the_places_of_bad_chunks_hold_zeros(engine_under_test, data, count, last, first):
    key = b"0123456789abcdef"
    runs = Runs(engine_under_test, key, NONCE)
    plain = noise((count - 1) * CHUNK_SIZE + last, seed=count).tobytes()
    sealed = reference.seal(key, NONCE, plain, first, ends=last == 0 and count > 1)
    bad = data.draw(st.sets(st.integers(0, count - 1)), label="bad")
    flips = [
        data.draw(st.integers(8 * SEALED_CHUNK_SIZE * chunk, 8 * min(SEALED_CHUNK_SIZE * (chunk + 1), len(sealed)) - 1))
        for chunk in bad
    ]
    assert runs.open(flip(sealed, *flips), first) == (first + min(bad) if bad else None, zeroed(plain, bad))


@each("threads", [1, 3, 16])
def test_the_first_of_several_bad_chunks_is_reported_however_many_threads_look(make_engine, threads):
    runs = Runs(make_engine(threads), bytes(32), NONCE)
    count, first = 400, 2**32 - 123
    plain = noise(count * CHUNK_SIZE + 10).tobytes()
    sealed = runs.seal(plain, first)
    random = Random(threads)
    for amount in (1, 2, 5, 40, count + 1):
        bad = random.sample(range(count + 1), amount)
        altered = flip(sealed, *(8 * (SEALED_CHUNK_SIZE * chunk + random.randrange(10)) for chunk in bad))
        reported, opened = runs.open(altered, first)
        assert reported == first + min(bad)
        assert opened == zeroed(plain, bad)
