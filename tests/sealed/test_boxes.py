"""Parts along several dimensions of a sealed tensor: the same as NumPy's, out of the chunks that hold them."""

import pickle

import numpy as np
import pytest
from helpers.cases import each
from hypothesis import given, settings
from hypothesis import strategies as st

import fastrack
from fastrack import Key, SealedTensor
from fastrack.format import CHUNK_SIZE, chunk_offset

KEY = Key.from_bytes(bytes(range(32)))
SHAPES = [(7,), (300, 100), (3, 5, 4096), (2, 3, 4, 700), (40, 0, 3), ()]
ARRAYS = {shape: np.random.default_rng(0).random(shape, np.float32) for shape in SHAPES}
SEALED = {shape: fastrack.seal(array, KEY, name="x") for shape, array in ARRAYS.items()}


@st.composite
def indices(draw):
    shape = draw(st.sampled_from(SHAPES))
    given_dimensions = draw(st.integers(0, len(shape)))
    index = []
    for extent in shape[:given_dimensions]:
        bounds = st.none() | st.integers(-extent - 2, extent + 2)
        kinds = [st.builds(slice, bounds, bounds)]
        if extent:
            kinds += [st.integers(-extent, extent - 1), st.integers(-extent, extent - 1).map(np.int64)]
        index.append(draw(st.one_of(kinds)))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(index)))
        index = [*index[:place], ..., *draw_tail(draw, shape, len(index) - place)]
    return shape, tuple(index)


def draw_tail(draw, shape, count):
    tail = []
    for extent in shape[len(shape) - count :]:
        start = draw(st.integers(0, extent))
        tail.append(slice(start, draw(st.integers(start, extent))))
    return tail


@settings(max_examples=300, deadline=None)
@given(indices())
@pytest.mark.slow
def test_any_index_selects_what_numpy_selects(chosen):
    shape, index = chosen
    part = SEALED[shape][index]
    expected = ARRAYS[shape][index]
    assert part.shape == expected.shape
    for opened in (
        fastrack.unseal(part, KEY, framework="numpy"),
        fastrack.to_device(part, "cpu", keys=KEY, framework="numpy"),
    ):
        assert opened.shape == expected.shape
        assert opened.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_only_the_chunks_that_hold_the_part_are_opened():
    """Every other chunk may be altered."""
    array, sealed = ARRAYS[(3, 5, 4096)], SEALED[(3, 5, 4096)]  # a chunk holds one row of 4096
    message = bytearray(sealed.message)
    for number in range(15):
        if number % 5 != 2:
            message[chunk_offset(number) + 5] ^= 1
    meddled = SealedTensor(sealed.context, np.frombuffer(bytes(message), np.uint8), sealed.key_id)
    assert CHUNK_SIZE == 4 * 4096
    part = fastrack.unseal(meddled[:, 2, 10:20], KEY, framework="numpy")
    assert np.array_equal(part, array[:, 2, 10:20])
    with pytest.raises(fastrack.AuthenticationError, match="chunk 1"):
        fastrack.unseal(meddled[:, 1:3, 10:20], KEY)


def test_a_part_survives_a_pickle():
    part = SEALED[(300, 100)][3:9, -1]
    copy = pickle.loads(pickle.dumps(part))
    assert copy.shape == (6,)
    assert np.array_equal(fastrack.unseal(copy, KEY, framework="numpy"), ARRAYS[(300, 100)][3:9, -1])


@each("index", [(0, 0, 0), (..., ...), (300,), (0, -101), (0, slice(0), 0)], ids=str)
def test_an_index_that_does_not_fit_is_refused_as_numpy_does(index):
    with pytest.raises(IndexError):
        ARRAYS[(300, 100)][index]
    with pytest.raises(IndexError):
        SEALED[(300, 100)][index]


@each("index", [(slice(None), [1, 2]), (slice(0, 9, 2), 1), (None, 1), (1.0, 1), (True, 1), (np.arange(2), 0)], ids=str)
def test_an_index_of_another_kind_is_refused(index):
    with pytest.raises(TypeError):
        SEALED[(300, 100)][index]


def test_rows_of_a_box_are_refused():
    with pytest.raises(TypeError, match="got a box"):
        SEALED[300, 100][:10, 2:4][0]
