import subprocess
import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.cases import each
from hypothesis import given
from hypothesis import strategies as st

from fastrack._tensors import arrays, dtypes

ROOT = Path(arrays.__file__).parents[2]
SHAPES = [(), (0,), (1,), (5,), (0, 3), (3, 0, 2), (2, 3, 4)]
LAYOUTS = {
    "fortran": np.asfortranarray,
    "transposed": lambda a: a.T,
    "backwards": lambda a: a[::-1],
    "backwards in both": lambda a: a[::-1, ::-1],
    "every other": lambda a: a[::2, ::3],
    "one column": lambda a: a[:, 3],
    "one row, far apart": lambda a: a[::7],
    "one element, far apart": lambda a: a[0][::9],
    "broadcast": lambda a: np.broadcast_to(a[:, None], (7, 3, 9)),
    "swapped": lambda a: np.swapaxes(a.reshape(7, 3, 3), 0, 2),
}


@each("layout", LAYOUTS)
@each("dtype", ["u1", "i2", "f4", "c8"])
def test_the_bytes_of_an_array_are_dense_and_in_c_order(layout, dtype):
    array = LAYOUTS[layout](np.arange(63).astype(dtype).reshape(7, 9))
    assert arrays.bytes_of(array).tobytes() == array.tobytes()


VIEWS = [lambda t: t.T, lambda t: t.flip(0), lambda t: t[None].expand(4, -1, -1), lambda t: t.permute(1, 0)[3:]]
PLACES = [np.s_[::2, ::3], np.s_[:, 3], np.s_[::7], np.s_[0, ::9], np.s_[::7, ::9], np.s_[3, 3]]


@each("view", [*VIEWS, *(lambda t, place=place: t[place] for place in PLACES)])
@each("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex64])
def test_the_bytes_of_a_tensor_are_dense_and_in_c_order(view, dtype):
    tensor = view(torch.arange(63).reshape(7, 9).to(dtype))
    expected = bytes(tensor.clone(memory_format=torch.contiguous_format).reshape(-1).contiguous().untyped_storage())
    assert arrays.bytes_of(tensor).tobytes() == expected


@each("name", [name for name in dtypes.BITS if not name.startswith(("F4", "F6"))])
@each("shape", SHAPES)
def test_an_array_comes_back_from_its_bytes(name, shape):
    array = np.arange(dtypes.nbytes(name, shape), dtype=np.uint8).view(dtypes.to_numpy(name)).reshape(shape)
    memory = arrays.bytes_of(array)
    back = arrays.from_bytes(memory.copy(), name, shape, "numpy")
    assert arrays.dtype_and_shape(array) == arrays.dtype_and_shape(back) == (name, shape)
    assert back.tobytes() == array.tobytes()


@each("name", [name for name in dtypes.BITS if not name.startswith("F6")])
@each("shape", SHAPES)
def test_a_tensor_comes_back_from_its_bytes(name, shape):
    if name == "F4" and not shape:
        return  # torch has no pair without a dimension
    dtype = dtypes.to_torch(name)
    tensor = torch.arange(int(np.prod(shape)) * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(shape)
    described, stored = arrays.dtype_and_shape(tensor)
    memory = arrays.empty_bytes(dtypes.nbytes(described, stored))
    memory[:] = arrays.bytes_of(tensor)
    back = arrays.from_bytes(memory, described, stored, "torch")
    assert described == name
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.view(torch.uint8) if shape else back, tensor.view(torch.uint8) if shape else tensor)


def test_the_bytes_of_a_contiguous_array_are_a_view():
    array, tensor = np.zeros((3, 4), np.float32), torch.zeros(3, 4)
    arrays.bytes_of(array)[:] = 0xFF
    arrays.bytes_of(tensor)[:] = 0xFF
    assert np.isnan(array).all()
    assert tensor.isnan().all()


DENSE = [np.zeros(()), np.zeros((2, 3), "f4"), np.zeros(9)[::9], torch.zeros(()), torch.zeros(2, 3)]
DENSE += [torch.zeros(9)[::9], torch.zeros(3, requires_grad=True).detach()]


@each("array", DENSE)
def test_an_array_to_be_filled_is_filled_in_place(array):
    memory = arrays.bytes_of(array, writable=True)
    memory[:] = 0xFF
    assert np.isnan(array.detach().numpy() if isinstance(array, torch.Tensor) else array).all()


def read_only():
    array = np.zeros(3)
    array.flags.writeable = False
    return array


NOT_DENSE = [np.zeros((3, 4)).T, np.zeros(9)[::2], np.zeros(9)[::-1], torch.zeros(3, 4).T, torch.zeros(1).expand(5)]
CONJUGATED = torch.zeros(3, dtype=torch.complex64).conj()


@each("array", [read_only(), *NOT_DENSE, CONJUGATED, CONJUGATED.imag])
def test_an_array_that_cannot_be_filled_in_place_is_refused(array):
    with pytest.raises(ValueError, match="contiguous"):
        arrays.bytes_of(array, writable=True)


def test_a_conjugated_or_negated_view_gives_the_bytes_it_stands_for():
    conjugated = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    assert conjugated.is_conj()
    assert arrays.bytes_of(conjugated).tobytes() == np.array([1 - 2j, 3 + 4j], np.complex64).tobytes()
    assert conjugated.imag.is_neg()
    assert arrays.bytes_of(conjugated.imag).tobytes() == np.array([-2, 4], np.float32).tobytes()


def test_a_parameter_gives_its_bytes_without_its_gradient():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert arrays.dtype_and_shape(parameter) == ("F32", (3,))
    assert arrays.bytes_of(parameter).tobytes() == np.ones(3, np.float32).tobytes()


@each("thing", [None, 3, 3.0, "text", b"bytes", [1, 2], np.float32(1), memoryview(b"x")])
def test_what_is_no_array_is_refused(thing):
    assert arrays.framework_of(thing) is None
    with pytest.raises(TypeError, match="expected a NumPy array, a torch tensor or a CuPy array, got"):
        arrays.dtype_and_shape(thing)
    with pytest.raises(TypeError, match="expected an array in host memory"):
        arrays.bytes_of(thing)


@pytest.mark.parametrize("tensor", [torch.zeros(3, device="meta"), torch.eye(3).to_sparse()])
def test_a_tensor_that_is_not_dense_in_host_memory_is_refused(tensor):
    with pytest.raises(TypeError, match="expected a dense tensor in host memory"):
        arrays.bytes_of(tensor)


def test_a_cupy_array_is_known_by_its_class_alone(monkeypatch):
    cupy = types.ModuleType("cupy")
    cupy.ndarray = type("ndarray", (), {"dtype": np.dtype("f4"), "shape": (2, 3)})
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    array = cupy.ndarray()
    assert arrays.framework_of(array) == "cupy"
    assert arrays.dtype_and_shape(array) == ("F32", (2, 3))
    with pytest.raises(TypeError, match="host memory"):
        arrays.bytes_of(array)


def test_an_unfinished_module_has_no_arrays(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    assert arrays.framework_of(object()) is None


def test_only_numpy_and_torch_keep_arrays_in_host_memory():
    with pytest.raises(TypeError, match="got 'cupy'"):
        arrays.from_bytes(np.zeros(4, np.uint8), "F32", (1,), "cupy")


def test_asking_what_is_installed_imports_nothing():
    code = "from fastrack._tensors import arrays; import sys; print(arrays.installed('torch'), 'torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).split() == ["True", "False"]
    assert not arrays.installed("no-such-framework")


@given(st.integers(0, 5000))
def test_fresh_memory_is_as_long_as_was_asked_and_aligned(size):
    memory = arrays.empty_bytes(size)
    assert memory.shape == (size,)
    assert memory.flags.writeable
    assert not size or memory.ctypes.data % 64 == 0


@each("dtype", ["?", "u1", "f2", "c8", ml_dtypes.bfloat16], ids=str)
@each("shape", [(), (3, 4), (0,), (3, 0)], ids=str)
def test_memory_to_fill_is_that_of_the_array(dtype, shape):
    array = np.zeros(shape, dtype)
    address, size, owner = arrays.writable_memory(array)
    assert (address, size) == (array.ctypes.data, array.nbytes)
    assert owner is array
