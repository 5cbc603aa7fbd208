"""Rows of a sealed tensor: the same as NumPy's, out of the chunks that hold them and no others."""

import numpy as np
import pytest
import torch
from helpers.cases import each
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fastrack
from fastrack import Key
from fastrack._crypto import gather as plans
from fastrack._sealed.indexing import plan_rows
from fastrack.format import CHUNK_SIZE

# Bytes in a row: none, a few, next to a chunk, and more than one.
WIDTHS = st.sampled_from([0, 1, 3, 64, 1000, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE + 5])
COUNTS = st.integers(0, 40)


@st.composite
def tables(draw):
    width = draw(WIDTHS)
    count = draw(COUNTS if width <= 1000 else st.integers(0, 6))
    if draw(st.booleans()) and width in (3, 64):
        count *= 300
    return np.random.default_rng(count).integers(0, 256, (count, width), dtype=np.uint8)


def indices(count):
    """Everything that chooses rows among so many."""
    bounds = st.none() | st.integers(-count - 3, count + 3)
    steps = st.none() | st.integers(-7, 7).filter(bool)
    masks = st.tuples(st.integers(0, 1000), st.sampled_from([0, 0.01, 0.5, 1])).map(
        lambda drawn: np.random.default_rng(drawn[0]).random(count) < drawn[1]
    )
    kinds = [st.builds(slice, bounds, bounds, steps), masks]
    if count:
        row = st.integers(-count, count - 1)
        several = st.lists(row, max_size=60)
        kinds += [row, row.map(np.int64), row.map(np.array), row.map(torch.tensor)]
        kinds += [several, several.map(_vector(np.int64)), several.map(_vector(np.int16))]
        unsigned = st.lists(st.integers(0, count - 1), max_size=60).map(_vector(np.uint32))
        kinds += [several.map(torch.LongTensor), unsigned]
    return st.one_of(kinds)


def _vector(dtype):
    return lambda rows: np.array(rows, dtype)


def as_numpy_takes_it(index):
    return index.numpy() if isinstance(index, torch.Tensor) else index


def gather(pieces, plain, size, gaps=0):
    """Do by hand what an engine does with a plan, which leaves so many bytes as they were."""
    result = np.full(size, 0xEE, np.uint8)
    written = np.zeros(size, int)
    for i, chunk in enumerate(pieces.chunks):
        content = plain[chunk * CHUNK_SIZE : (chunk + 1) * CHUNK_SIZE]
        for start, target, length in pieces.table[pieces.starts[i] : pieces.starts[i + 1]]:
            assert length > 0
            assert start + length <= content.size
            result[target : target + length] = content[start : start + length]
            written[target : target + length] += 1
    assert (written <= 1).all()
    assert written.sum() == size - gaps
    return result


def chunks_that_hold(rows, width):
    return sorted(
        {chunk for row in rows for chunk in range(row * width // CHUNK_SIZE, -(-(row + 1) * width // CHUNK_SIZE))}
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(st.data(), tables())
def test_rows_are_those_that_numpy_chooses_out_of_the_chunks_that_hold_them(data, table):
    count, width = table.shape
    index = data.draw(indices(count))
    by_numpy = as_numpy_takes_it(index)
    expected = table[by_numpy]

    plan = plan_rows(index, table.shape, table.nbytes)
    assert plan.shape == expected.shape
    assert plan.nbytes == expected.nbytes
    pieces = plan.ranges().pieces()
    assert gather(pieces, table.reshape(-1), plan.nbytes).tobytes() == expected.tobytes()
    chosen = np.atleast_1d(np.arange(count)[by_numpy])
    assert pieces.chunks.tolist() == (chunks_that_hold(chosen, width) if width else [])


@settings(deadline=None, max_examples=100)
@given(st.data(), tables())
def test_rows_unseal_to_those_that_numpy_chooses(data, table):
    key = Key.from_bytes(bytes(range(16)))
    index = data.draw(indices(len(table)))
    rows = fastrack.seal(table, key)[index]
    assert np.array_equal(fastrack.unseal(rows, key, framework="numpy"), table[as_numpy_takes_it(index)])


@given(st.integers(1, 5), st.integers(-12, 12))
def test_a_row_out_of_range_is_refused_wherever_it_stands(count, row):
    for index in (row, [row], np.array([0, row]), torch.tensor([row]), np.int8(row)):
        if -count <= row < count:
            plan_rows(index, (count, 3), 3 * count)
        else:
            with pytest.raises(IndexError, match=rf"row {row} .* {count} rows"):
                plan_rows(index, (count, 3), 3 * count)


@given(st.lists(st.booleans(), max_size=9).filter(lambda mask: len(mask) != 5))
@example([True])
def test_a_mask_of_another_length_is_refused(mask):
    for index in (np.array(mask, bool), torch.tensor(mask, dtype=torch.bool), *([mask] if mask else [])):
        with pytest.raises(IndexError, match=f"got {len(mask)}"):
            plan_rows(index, (5, 3), 15)


NO_INDICES = [None, ..., True, 1.0, "1", b"\1", (), (1, 2), (slice(None), 1), {1: 2}, object()]
NO_INDICES += [[1.5], [[1]], [[]], [2**70]]
NO_INDICES += [np.True_, np.float32(1), np.array([]), np.array([1.0]), np.array([[1]]), np.array(1.0)]
NO_INDICES += [torch.tensor(True), torch.tensor([[1]]), torch.tensor([1.0])]


@each("index", NO_INDICES)
def test_what_chooses_no_rows_is_refused(index):
    with pytest.raises(TypeError, match="first dimension"):
        plan_rows(index, (5, 3), 15)


def test_a_step_of_zero_is_refused():
    with pytest.raises(ValueError, match="step"):
        plan_rows(slice(None, None, 0), (5, 3), 15)


def test_a_tensor_of_one_index_chooses_one_row_and_keeps_its_dimension():
    assert plan_rows(torch.tensor([3]), (5, 3), 15).shape == (1, 3)
    assert plan_rows(torch.tensor(3), (5, 3), 15).shape == (3,)
    assert plan_rows(torch.tensor([True]), (1, 3), 3).shape == (1, 3)


def test_a_tensor_without_dimensions_has_no_rows():
    for index in (0, slice(None), [0], []):
        with pytest.raises(IndexError, match="one dimension"):
            plan_rows(index, (), 4)


def test_rows_that_end_inside_a_byte_are_refused():
    with pytest.raises(TypeError, match="whole bytes"):
        plan_rows(0, (4, 3), 6)


def test_neighbouring_rows_are_one_piece():
    pieces = plan_rows([3, 4, 5, 9], (100, 8), 800).ranges().pieces()
    assert pieces.table.tolist() == [[24, 0, 24], [72, 24, 8]]


def test_a_row_that_is_chosen_twice_opens_its_chunk_once():
    pieces = plan_rows([7, 7, 7], (10, CHUNK_SIZE), 10 * CHUNK_SIZE).ranges().pieces()
    assert pieces.chunks.tolist() == [7]
    assert pieces.table[:, 1].tolist() == [0, CHUNK_SIZE, 2 * CHUNK_SIZE]


def test_a_million_strided_rows_are_planned_without_a_loop():
    plan = plan_rows(slice(None, None, -2), (2_000_000, 8), 16_000_000)
    pieces = plan.ranges().pieces()
    assert pieces.table.shape == (1_000_000, 3)
    assert pieces.chunks.size == 977


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 5 * CHUNK_SIZE), st.integers(0, 3 * CHUNK_SIZE), st.integers(0, 2)), max_size=12)
)
@pytest.mark.slow
def test_ranges_of_any_size_arrive_with_gaps_between_them(wanted):
    plain = np.random.default_rng(0).integers(0, 200, 8 * CHUNK_SIZE, dtype=np.uint8)
    expected, place, places = [], 0, []
    for start, size, gap in wanted:
        places.append(place)
        expected += [plain[start : start + size], np.full(gap, 0xEE, np.uint8)]
        place += size + gap
    starts, sizes = (np.array([each[index] for each in wanted], np.int64) for index in (0, 1))
    pieces = plans.ByteRanges(starts, sizes, np.array(places, np.int64)).pieces()
    result = gather(pieces, plain, place, gaps=sum(gap for _, _, gap in wanted))
    assert np.array_equal(result, np.concatenate([np.empty(0, np.uint8), *expected]))
    assert (np.diff(pieces.chunks) > 0).all()


@pytest.mark.parametrize("row", [2**64 - 1, 2**63, 300])
def test_an_unsigned_row_does_not_wrap_round(row):
    with pytest.raises(IndexError, match=f"row {row}"):
        plan_rows(np.array([0, row], np.uint64), (300,), 300)


def use_loops(monkeypatch, loops):
    """Have plans be made by compiled loops, or by the same ones as Python runs them."""
    if loops == "interpreted":
        monkeypatch.setattr(plans, "_loops", lambda: plans)


@each("chunks", [1, 3, 255, 256, 257, 70_000, 2**33])
@each("loops", ["compiled", "interpreted"])
@pytest.mark.slow
def test_rows_in_any_order_are_sorted_by_their_chunks(chunks, loops, monkeypatch):
    use_loops(monkeypatch, loops)
    random = np.random.default_rng(chunks)
    for count in (0, 1, 2, 33, 400):
        for size in (1, 100, CHUNK_SIZE + 1):
            rows = random.integers(0, chunks * 100, count)
            pieces = plans.EvenRanges(rows, CHUNK_SIZE // 100, size).pieces()
            expected = []
            for place, start in enumerate((rows * (CHUNK_SIZE // 100)).tolist()):
                for first in range(start - start % CHUNK_SIZE, start + size, CHUNK_SIZE):
                    low, high = max(start, first), min(start + size, first + CHUNK_SIZE)
                    expected.append((first // CHUNK_SIZE, low - first, place * size + low - start, high - low))
            expected.sort(key=lambda piece: piece[0])
            numbers = np.repeat(pieces.chunks, np.diff(pieces.starts))
            assert np.array_equal(np.column_stack([numbers, pieces.table]), np.reshape(expected, (-1, 4)))
            elsewhere = random.permutation(count) if count > 2 else np.arange(count)
            for order in (None, elsewhere, np.sort(elsewhere)):
                ranges = plans.EvenRanges(rows, CHUNK_SIZE // 100, size, order)
                same = ranges.expand().pieces()
                for made in ("chunks", "starts", "table"):
                    assert np.array_equal(getattr(same, made), getattr(ranges.pieces(), made))


@pytest.mark.parametrize("loops", ["compiled", "interpreted"])
def test_neighbouring_rows_are_one_piece_if_they_are_neighbours_in_the_result(loops, monkeypatch):
    use_loops(monkeypatch, loops)
    rows = np.array([3, 4, 5, 6])
    for order, lengths in (([0, 1, 2, 3], [32]), ([5, 6, 1, 2], [16, 16]), ([3, 2, 1, 0], [8] * 4), (None, [32])):
        pieces = plans.EvenRanges(rows, 8, 8, order and np.array(order)).pieces()
        assert pieces.table[:, 2].tolist() == lengths
    with pytest.raises(ValueError, match="place"):
        _ = plans.EvenRanges(rows, 8, 8, np.array([1])).pieces().chunks


@each("loops", ["compiled", "interpreted"])
@each("size", [1, 100, CHUNK_SIZE + 1])
def test_rows_are_located_exactly_if_all_of_them_lie_inside(loops, size, monkeypatch):
    use_loops(monkeypatch, loops)
    count = 50
    plain = count * size
    sealed = plain + 16 * -(-plain // CHUNK_SIZE)
    for rows, order in (
        ([0, 7, 49], None), ([49, 49], None), ([3], [2]), ([], None), ([50], None), ([0, -1], None), ([2**40], None),
        ([-(2**40)], None), ([1, 2, 3, 4], None), ([1], [3]), ([1], [-1]), ([1], [2**40]),
    ):  # fmt: skip
        places = None if order is None else np.array(order)
        ranges = plans.EvenRanges(np.array(rows, np.int64), size, size, places)
        lies_inside = all(0 <= row < count for row in rows) and all(
            0 <= place < 3 for place in (range(len(rows)) if order is None else order)
        )
        if lies_inside:
            found, asked = ranges.pieces(), ranges.pieces()
            assert found.locate(sealed, plain, 3 * size)[0] == asked.chunks.size == found.chunks.size
            assert np.array_equal(found.table, asked.table)
            assert asked.locate(sealed, plain, 3 * size)[0] == asked.chunks.size
        else:
            pieces = ranges.pieces()
            for _ in range(2):
                with pytest.raises(ValueError, match="reaches outside"):
                    pieces.locate(sealed, plain, 3 * size)
                assert pieces.starts[-1] == len(pieces.table)  # now it has arrays, which are compared as well
