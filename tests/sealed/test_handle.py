"""Test the operations that sealed tensors and handles share with arrays, and those they refuse."""

import itertools

import numpy as np
import pytest
import torch
from helpers.cases import each

import fastrack

SHAPE = (5, 2, 3)


@pytest.fixture
def sealed(key):
    return fastrack.seal(np.zeros(SHAPE, np.float32), key, name="x")


def test_they_have_the_extents_of_what_is_sealed(sealed):
    for index in (None, slice(1, 4), 2, [0, 4]):
        handle, array = sealed, np.zeros(SHAPE)
        if index is not None:
            handle, array = sealed[index], array[index]
        assert handle.ndim == array.ndim
        assert handle.size() == array.shape
        assert [handle.size(dim) for dim in range(array.ndim)] == list(array.shape)
        assert handle.size(-1) == array.shape[-1]
        assert handle.numel() == array.size


INDICES = [0, -1, 1, slice(None), slice(1, 4), slice(2, 2), slice(None, None, 2), slice(None, None, -1)]
INDICES += [slice(4, 1, -2), [1, 0], [-1], [], np.array([1, 1, 0])]


@each("shape", [(5, 2, 3), (4, 1, 2), (1, 1), (2, 0, 3), (0, 2), (30_000, 2)])
@pytest.mark.slow
def test_rows_of_rows_are_those_of_the_array(key, shape):
    array = np.arange(np.prod(shape)).reshape(shape)
    sealed = fastrack.seal(array, key)
    for chain in itertools.product(INDICES, repeat=3):
        handle, rows = sealed, array
        for index in chain:
            try:
                np.arange(rows.shape[0])[index]  # as some versions of NumPy check no index of an array without elements
                rows = rows[index]
            except IndexError:
                with pytest.raises((IndexError, TypeError)):
                    handle[index]
                break
            handle = handle[index]
            assert handle.shape == np.shape(rows), chain
        else:
            assert np.array_equal(fastrack.unseal(handle, key, framework="numpy"), rows), chain


@each("name", ["mean", "numpy", "cpu", "cuda", "T", "device", "unseal", "decrypt", "tobytes"])
def test_other_attributes_of_arrays_say_how_to_open_them(sealed, name):
    for handle in (sealed, sealed[0]):
        assert not hasattr(handle, name)
        with pytest.raises(AttributeError, match="to_device") as caught:
            getattr(handle, name)
        assert (caught.value.name, caught.value.obj) == (name, handle)


@each(
    "compute",
    [
        lambda handle: handle + 1,
        lambda handle: 1 - handle,
        lambda handle: 2 / handle,
        lambda handle: handle @ handle,
        lambda handle: -handle,
        lambda handle: handle < 3,
        lambda handle: handle >= 2,
        lambda handle: torch.ones(3) * handle,
        lambda handle: np.ones(3) * handle,
        float,
        int,
    ],
)
def test_arithmetic_says_how_to_open_them(sealed, compute):
    for handle in (sealed, sealed[0]):
        with pytest.raises(TypeError, match=r"which is sealed\. Open it with to_device or unseal"):
            compute(handle)


def test_private_names_are_refused_as_by_any_object(sealed):
    with pytest.raises(AttributeError) as caught:
        _ = sealed._nothing
    assert "to_device" not in str(caught.value)


def test_a_handle_that_was_never_set_up_is_no_endless_loop():
    for kind in (fastrack.SealedTensor, fastrack.SealedRows):
        with pytest.raises(AttributeError):
            _ = kind.__new__(kind).name


@each(
    "convert",
    [
        np.array,
        np.asarray,
        np.from_dlpack,
        lambda handle: np.ones(10) + handle,
        torch.tensor,
        torch.as_tensor,
        torch.from_dlpack,
        lambda handle: torch.tensor([handle, handle]),
        lambda handle: torch.stack([handle, handle]),
        torch.nn.Linear(3, 3),
        lambda handle: torch.nn.functional.mse_loss(input=torch.ones(3), target=handle),
        lambda handle: torch.ones(3).copy_(handle),
    ],
)
def test_a_conversion_says_what_it_was_given_and_what_opens_it(sealed, key, convert):
    for handle in (sealed, sealed[1:3], sealed[2], fastrack.seal(np.array(1.0), key, name="x")):
        with pytest.raises(TypeError, match=r"got <Sealed\w+ (of )?'x' .*sealed\. Open it"):
            convert(handle)
