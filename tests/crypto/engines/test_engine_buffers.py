"""Test the buffers that an engine takes, and those it refuses before a byte is touched."""

from itertools import product

import numpy as np
import pytest
from helpers import reference
from helpers.buffers import as_array
from helpers.cases import each
from helpers.messages import raw_key
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE, noise
from helpers.runs import Runs, plan
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastrack._crypto import base, cobblestone

KEY = bytes(range(32))
PLAIN = noise(2 * CHUNK_SIZE + 777).tobytes()
SEALED = reference.seal(KEY, bytes(12), PLAIN)


@pytest.fixture
def runs(engine_under_test):
    return Runs(engine_under_test, KEY)


def target():
    return np.full(len(PLAIN), 0xA5, np.uint8)


def untouched(array):
    return bool((array == 0xA5).all())


def test_buffers_may_lie_at_any_address(runs):
    for offset in range(64):
        assert (offset, runs.seal(PLAIN, offset=offset)) == (offset, SEALED)
        assert (offset, *runs.open(SEALED, offset=offset)) == (offset, None, PLAIN)


@each("size", [0, 1, 15, 16, 17, 255, 256, 257, 511, 512, 513])
def test_short_chunks_may_lie_at_any_address(runs, size):
    sealed = reference.seal(KEY, bytes(12), PLAIN[:size])
    for offset in (0, 1, 15, 33, 63):
        assert (offset, runs.seal(PLAIN[:size], offset=offset)) == (offset, sealed)
        assert (offset, *runs.open(sealed, offset=offset)) == (offset, None, PLAIN[:size])


def test_a_read_only_source_is_taken_and_a_read_only_target_is_refused(runs):
    engine, schedule, sealed, out = runs.engine, runs.schedule, as_array(SEALED), target()
    assert not sealed.flags.writeable
    assert engine.open_run(schedule, sealed, out, 0) is None
    assert out.tobytes() == PLAIN
    out.flags.writeable = False
    for attempt in (
        lambda: engine.open_run(schedule, sealed, out, 0),
        lambda: engine.open_gather(schedule, sealed, out, plan([(0, 10)])[0]),
        lambda: engine.seal_run(schedule, sealed[: len(PLAIN) - 3 * TAG_SIZE], out, 0),
    ):
        with pytest.raises(ValueError, match="read-only"):
            attempt()
    assert out.tobytes() == PLAIN


UNFIT = {
    "scattered": lambda array: np.repeat(array, 2)[::2],
    "backwards": lambda array: array[::-1],
    "in rows": lambda array: array[: array.size // 2 * 2].reshape(2, -1),
    "of words": lambda array: array.astype(np.uint16),
    "of signed bytes": lambda array: array.view(np.int8),
}


@each("unfit", UNFIT.values())
def test_a_buffer_that_is_not_a_row_of_bytes_is_refused_and_no_other(runs, unfit):
    engine, schedule, sealed, out = runs.engine, runs.schedule, as_array(SEALED), target()
    odd = unfit(out)
    for attempt in (
        lambda: engine.open_run(schedule, unfit(sealed), out, 0),
        lambda: engine.open_run(schedule, sealed, odd, 0),
        lambda: engine.verify_run(schedule, unfit(sealed), 0),
        lambda: engine.seal_run(schedule, unfit(as_array(PLAIN)), sealed.copy(), 0),
        lambda: engine.seal_run(schedule, as_array(PLAIN), unfit(sealed.copy()), 0),
        lambda: engine.open_gather(schedule, unfit(sealed), out, plan([(0, 10)])[0]),
        lambda: engine.open_gather(schedule, sealed, odd, plan([(0, 10)])[0]),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            attempt()
    assert untouched(out)
    assert untouched(odd.astype(np.uint8))
    assert base.check_buffers(sealed, out) is None
    assert base.check_buffers(as_array(b"")) is None


# Sizes


def is_a_run(sealed, plain):
    """By the format: whole chunks, then one that may be shorter, each with a tag."""
    if sealed == plain == 0:
        return True
    count, rest = divmod(sealed, SEALED_CHUNK_SIZE)
    # A last chunk may be full; then nothing follows it, or an empty one that is all tag.
    return plain == sealed - (count + (rest > 0)) * TAG_SIZE and (rest == 0 or rest >= TAG_SIZE)


def assert_judged(sealed, plain):
    if is_a_run(sealed, plain):
        assert cobblestone.chunks_between(sealed, plain) == -(-sealed // SEALED_CHUNK_SIZE)
    else:
        with pytest.raises(ValueError, match="run of"):
            cobblestone.chunks_between(sealed, plain)


@given(st.integers(0, 5 * SEALED_CHUNK_SIZE), st.integers(0, 5 * CHUNK_SIZE))
def test_only_sizes_of_runs_are_taken(sealed, plain):
    assert_judged(sealed, plain)


def test_only_sizes_of_runs_are_taken_at_the_edges():
    for sealed, plain in product((0, CHUNK_SIZE, SEALED_CHUNK_SIZE), (0, CHUNK_SIZE)):
        for more, less in product((-1, 0, TAG_SIZE - 1, TAG_SIZE, 2 * TAG_SIZE), (-TAG_SIZE, 0, TAG_SIZE)):
            assert_judged(max(0, sealed + more), max(0, plain + less))


@given(st.integers(0, 40 * CHUNK_SIZE), st.booleans())
def test_the_sizes_of_every_run_are_taken(plain, ends):
    count = plain // CHUNK_SIZE + 1 if ends else -(-plain // CHUNK_SIZE)
    assert cobblestone.chunks_between(plain + count * TAG_SIZE, plain) == count


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2 * SEALED_CHUNK_SIZE + 40), st.integers(0, 2 * CHUNK_SIZE + 40))
@example(SEALED_CHUNK_SIZE, CHUNK_SIZE - 1)
@example(SEALED_CHUNK_SIZE, CHUNK_SIZE + 1)
@example(0, 1)
@example(15, 0)
def test_an_engine_refuses_other_sizes(engine_under_test, sealed, plain):
    runs = Runs(engine_under_test, KEY)
    if is_a_run(sealed, plain):
        return
    closed, opened = np.full(sealed, 0xA5, np.uint8), np.full(plain, 0xA5, np.uint8)
    with pytest.raises(ValueError, match="run of"):
        runs.engine.open_run(runs.schedule, closed, opened, 0)
    with pytest.raises(ValueError, match="run of"):
        runs.engine.seal_run(runs.schedule, opened, closed, 0)
    assert untouched(closed)
    assert untouched(opened)


@each("size", [1, TAG_SIZE - 1, SEALED_CHUNK_SIZE + 1, SEALED_CHUNK_SIZE + TAG_SIZE - 1, 5 * SEALED_CHUNK_SIZE + 3])
def test_a_run_that_ends_within_a_tag_is_refused(runs, size):
    closed, out = np.zeros(size, np.uint8), target()
    with pytest.raises(ValueError, match="run of"):
        runs.engine.verify_run(runs.schedule, closed, 0)
    with pytest.raises(ValueError, match="run of"):
        runs.engine.open_gather(runs.schedule, closed, out, plan([(0, 1)])[0])
    assert untouched(out)


@each("first", [-1, 2**38, 2**38 - 1, 2**62])
def test_a_run_outside_the_38_bits_of_chunk_numbers_is_refused(make_engine, first):
    engine = make_engine(1)
    schedule = engine.expand_key(raw_key(bytes(16)))
    plain, sealed = np.zeros(20_000, np.uint8), np.zeros(20_032, np.uint8)
    calls = (engine.seal_run, plain, sealed), (engine.open_run, sealed, plain), (engine.verify_run, sealed)
    for run, *buffers in calls:
        with pytest.raises(ValueError, match="2\\^38"):
            run(schedule, *buffers, first)
