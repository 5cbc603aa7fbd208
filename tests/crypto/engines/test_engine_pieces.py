"""Gathers: pieces of chunks, each verified whole, scattered into a result."""

import numpy as np
import pytest
from helpers import reference
from helpers.buffers import Fenced, as_array
from helpers.cases import each
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, noise
from helpers.runs import Runs, as_pieces, flip, plain_size_of, plan, ranges_within, zeroed
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fastrack._crypto.gather import GatherPlan

KEY = bytes(range(32))
NONCE = bytes(range(12))
SIZE = 5 * CHUNK_SIZE + 1234
PLAIN = noise(SIZE).tobytes()
SEALED = reference.seal(KEY, NONCE, PLAIN)
RANGES = ranges_within(SIZE, 12)


@pytest.fixture(scope="session")
def runs(engine_under_test):
    return Runs(engine_under_test, KEY, NONCE)


@settings(max_examples=60, deadline=None)
@given(ranges=RANGES)
@example(ranges=[])
def test_pieces_are_slices_of_the_plaintext(runs, ranges):
    expected = [PLAIN[start : start + length] for start, length in ranges]
    assert runs.gather(SEALED, ranges) == (None, expected)


@settings(max_examples=60, deadline=None)
@given(ranges=RANGES, bad=st.sets(st.integers(0, 5), min_size=1), byte=st.integers(0, 1234))
def test_pieces_of_bad_chunks_are_zeros_and_all_others_right(runs, ranges, bad, byte):
    altered = flip(SEALED, *(8 * (chunk * SEALED_CHUNK_SIZE + byte) for chunk in bad))
    touched = set(plan(ranges)[0].chunks.tolist())
    expected = [zeroed(PLAIN, bad)[start : start + length] for start, length in ranges]
    assert runs.gather(altered, ranges) == (min(bad & touched, default=None), expected)


def test_the_order_of_the_chunks_is_free_and_the_lowest_bad_one_reported(runs):
    altered = flip(SEALED, 8 * 4 * SEALED_CHUNK_SIZE, 8 * 1 * SEALED_CHUNK_SIZE)
    ranges = [(chunk * CHUNK_SIZE + 3, 5) for chunk in (5, 4, 0, 1, 3)]
    zero = bytes(5)
    expected = [PLAIN[start : start + 5] for start, _ in ranges]
    assert runs.gather(altered, ranges) == (1, [expected[0], zero, expected[2], zero, expected[4]])


@each("key", [KEY, KEY[:16]])
def test_pieces_that_begin_and_end_anywhere_are_slices_of_the_plaintext(engine_under_test, key):
    # Pieces of every length up to a few blocks, and those that begin and end about the edges of a group of vectors.
    sealed = reference.seal(key, NONCE, PLAIN[:20_000])
    runs = Runs(engine_under_test, key, NONCE)
    ranges = [(start, length) for start in range(20) for length in range(1, 40)]
    edges = [edge + more for edge in (0, 128, 256, 512, 1024, 4096, CHUNK_SIZE) for more in (-17, -1, 0, 1, 16)]
    ranges += [(start, stop - start) for start in edges for stop in edges if 0 <= start < stop]
    ranges += [(start, 20_000 - start) for start in (CHUNK_SIZE, CHUNK_SIZE + 1, 19_999, 19_983)]
    for start, length in ranges:
        expected = [PLAIN[start : start + length]]
        assert (start, length, *runs.gather(sealed, [(start, length)])) == (start, length, None, expected)
    assert runs.gather(sealed, ranges) == (None, [PLAIN[start : start + length] for start, length in ranges])
    bad, pieces = runs.gather(flip(sealed, 8 * 9000), ranges)
    assert bad == 0
    altered = zeroed(PLAIN[:20_000], {0})
    assert pieces == [altered[start : start + length] for start, length in ranges]


def test_a_chunk_without_pieces_is_still_verified(runs):
    target = Fenced(0)
    pieces = as_pieces([2, 3], [0, 0, 0], [])
    gather = runs.engine.open_gather
    assert gather(runs.schedule, as_array(SEALED), target.data, pieces) is None
    assert gather(runs.schedule, as_array(flip(SEALED, 8 * 3 * SEALED_CHUNK_SIZE)), target.data, pieces) == 3


def test_what_no_piece_names_is_left_alone(runs):
    target = np.full(100, 0xA5, np.uint8)
    pieces = as_pieces([1, 5], [0, 2, 3], [[7, 10, 5], [0, 30, 10], [1230, 90, 4]])
    assert runs.engine.open_gather(runs.schedule, as_array(SEALED), target, pieces) is None
    expected = np.full(100, 0xA5, np.uint8)
    expected[10:15] = as_array(PLAIN[CHUNK_SIZE + 7 : CHUNK_SIZE + 12])
    expected[30:40] = as_array(PLAIN[CHUNK_SIZE : CHUNK_SIZE + 10])
    expected[90:94] = as_array(PLAIN[-4:])
    assert target.tobytes() == expected.tobytes()


LONG = noise(300 * CHUNK_SIZE).tobytes()
LONG_SEALED = reference.seal(KEY, NONCE, LONG)
ROWS = [(start, 1000) for start in range(0, len(LONG) - 1000, 40000)]
ROWS += [(0, 3 * CHUNK_SIZE), (9 * CHUNK_SIZE, CHUNK_SIZE)]


@each("threads", [1, 2, 16])
def test_a_long_gather_is_right_on_any_number_of_threads(make_engine, threads):
    expected = [LONG[start : start + length] for start, length in ROWS]
    assert Runs(make_engine(threads), KEY, NONCE).gather(LONG_SEALED, ROWS) == (None, expected)


@each("threads", [2, 16])
def test_threads_never_see_each_other_at_work_on_parts_of_chunks(make_engine, threads):
    # Every part goes through memory of the thread's own. Were it shared, the parts of one would be those of another.
    runs = Runs(make_engine(threads), KEY, NONCE)
    altered = as_array(flip(LONG_SEALED, *(8 * SEALED_CHUNK_SIZE * chunk for chunk in (83, 171))))
    starts = [chunk * CHUNK_SIZE + 77 for chunk in range(300)]
    pieces, size = plan([(start, 9000) for start in starts])
    parts = (bytes(9000) if start // CHUNK_SIZE in {83, 171} else LONG[start : start + 9000] for start in starts)
    expected = as_array(b"".join(parts))
    target = np.empty(size, np.uint8)
    for _ in range(150 if runs.engine.threads > 1 else 1):
        assert runs.engine.open_gather(runs.schedule, altered, target, pieces) == 83
        assert np.array_equal(target, expected)


# Plans that reach outside

GOOD = {"chunks": [1, 5], "starts": [0, 2, 3], "table": [[7, 10, 5], [0, 30, 10], [1230, 90, 4]]}
HUGE = 2**63 - 1
MALFORMED = {
    "a chunk before the first": {"chunks": [-1, 5]},
    "a chunk after the last": {"chunks": [1, 6]},
    "a chunk whose place overflows": {"chunks": [2**50, 5]},
    "too few starts": {"starts": [0, 3]},
    "too many starts": {"starts": [0, 1, 2, 3]},
    "no starts": {"starts": []},
    "starts that begin late": {"starts": [1, 2, 3]},
    "starts that end early": {"starts": [0, 1, 2]},
    "starts that end late": {"starts": [0, 2, 4]},
    "starts that go back": {"starts": [0, 4, 3]},
    "starts that go back over an empty table of zeros": {"starts": [0, 9, 3], "table": [[0, 0, 0]] * 3},
    "starts that go below zero": {"starts": [0, -5, 3]},
    "a negative offset": {"table": [[-1, 10, 5], [0, 30, 10], [1230, 90, 4]]},
    "a negative place": {"table": [[7, -10, 5], [0, 30, 10], [1230, 90, 4]]},
    "a negative length": {"table": [[7, 10, -5], [0, 30, 10], [1230, 90, 4]]},
    "a piece past its chunk": {"table": [[CHUNK_SIZE - 4, 10, 5], [0, 30, 10], [1230, 90, 4]]},
    "a piece past a short chunk": {"table": [[7, 10, 5], [0, 30, 10], [1231, 90, 4]]},
    "a piece past the result": {"table": [[7, 10, 5], [0, 30, 10], [1230, 97, 4]]},
    "an offset that overflows": {"table": [[HUGE, 10, 5], [0, 30, 10], [1230, 90, 4]]},
    "a place that overflows": {"table": [[7, HUGE, 5], [0, 30, 10], [1230, 90, 4]]},
    "a length that overflows": {"table": [[7, 10, HUGE], [0, 30, 10], [1230, 90, 4]]},
    "a table of two columns": {"table": [[7, 10], [0, 30], [1230, 90]]},
    "a table of four columns": {"table": [[7, 10, 5, 0], [0, 30, 10, 0], [1230, 90, 4, 0]]},
}


@each("change", MALFORMED.values())
def test_a_plan_that_reaches_outside_is_refused(runs, change):
    target = np.full(100, 0xA5, np.uint8)
    pieces = as_pieces(**(GOOD | change))
    with pytest.raises(ValueError, match="reaches outside"):
        pieces.locate(len(SEALED), SIZE, target.size)
    with pytest.raises(ValueError, match="reaches outside"):
        runs.engine.open_gather(runs.schedule, as_array(SEALED), target, pieces)
    assert (target == 0xA5).all()


def test_the_plan_that_the_malformed_ones_differ_from_is_taken():
    as_pieces(**GOOD).locate(len(SEALED), SIZE, 100)


@each("field", ["chunks", "starts", "table"])
@each("dtype", [np.int32, np.uint64, np.float64])
def test_a_plan_of_other_numbers_is_refused(field, dtype):
    good = as_pieces(**GOOD)
    arrays = {name: getattr(good, name) for name in GOOD}
    with pytest.raises(ValueError, match="reaches outside"):
        GatherPlan(**(arrays | {field: arrays[field].astype(dtype)})).locate(len(SEALED), SIZE, 100)


@each("field", ["chunks", "starts", "table"])
def test_a_plan_that_is_scattered_in_memory_is_refused(runs, field):
    good = as_pieces(**GOOD)
    arrays = {name: getattr(good, name) for name in GOOD}
    scattered = GatherPlan(**(arrays | {field: np.repeat(arrays[field], 2, axis=0)[::2]}))
    with pytest.raises(ValueError, match="reaches outside"):
        runs.engine.open_gather(runs.schedule, as_array(SEALED), np.empty(100, np.uint8), scattered)


NUMBER = st.integers(-3, 8) | st.sampled_from(
    [CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 1234, 1235, 100, 101, HUGE, -HUGE, 2**62]
)


@settings(max_examples=300)
@given(data=st.data(), changes=st.integers(0, 3))
@pytest.mark.slow
def test_a_plan_is_taken_exactly_if_every_piece_lies_inside(data, changes):
    plan = {name: np.array(part, object) for name, part in GOOD.items()}
    for _ in range(changes):
        part = plan[data.draw(st.sampled_from(list(plan)))].reshape(-1)
        part[data.draw(st.integers(0, part.size - 1))] = data.draw(NUMBER)
    lists = {name: part.tolist() for name, part in plan.items()}
    if lies_inside(**lists):
        as_pieces(**lists).locate(len(SEALED), SIZE, 100)
    else:
        with pytest.raises(ValueError, match="reaches outside"):
            as_pieces(**lists).locate(len(SEALED), SIZE, 100)


def lies_inside(chunks, starts, table):
    """The same question, asked piece by piece in numbers that cannot overflow."""
    if len(starts) != len(chunks) + 1 or starts[0] != 0 or starts[-1] != len(table) or sorted(starts) != starts:
        return False
    for chunk, low, high in zip(chunks, starts, starts[1:], strict=False):
        size = min(CHUNK_SIZE, SIZE - chunk * CHUNK_SIZE)
        if not 0 <= chunk <= 5 or not all(
            min(offset, place, length) >= 0 and offset + length <= size and place + length <= 100
            for offset, place, length in table[low:high]
        ):
            return False
    return True


@given(size=st.integers(0, 3 * SEALED_CHUNK_SIZE), chunk=st.integers(-2, 5))
def test_a_chunk_is_taken_exactly_if_the_message_has_it(size, chunk):
    assume(size % SEALED_CHUNK_SIZE == 0 or size % SEALED_CHUNK_SIZE >= 16)
    pieces = as_pieces([chunk], [0, 1], [[0, 0, 0]])
    if 0 <= chunk < -(-size // SEALED_CHUNK_SIZE):
        pieces.locate(size, plain_size_of(size), 0)
    else:
        with pytest.raises(ValueError, match="reaches outside"):
            pieces.locate(size, plain_size_of(size), 0)
