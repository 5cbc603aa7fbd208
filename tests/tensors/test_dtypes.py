import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch
from helpers import by_hand
from helpers.cases import each
from hypothesis import given
from hypothesis import strategies as st

from fastrack._tensors import dtypes
from fastrack.errors import FormatError

# What stands for each name in NumPy and in torch.
TYPES = {
    "BOOL": (np.bool_, torch.bool),
    "U8": (np.uint8, torch.uint8),
    "I8": (np.int8, torch.int8),
    "U16": (np.uint16, torch.uint16),
    "I16": (np.int16, torch.int16),
    "F16": (np.float16, torch.float16),
    "BF16": (ml_dtypes.bfloat16, torch.bfloat16),
    "U32": (np.uint32, torch.uint32),
    "I32": (np.int32, torch.int32),
    "F32": (np.float32, torch.float32),
    "U64": (np.uint64, torch.uint64),
    "I64": (np.int64, torch.int64),
    "F64": (np.float64, torch.float64),
    "C64": (np.complex64, torch.complex64),
    "F8_E5M2": (ml_dtypes.float8_e5m2, torch.float8_e5m2),
    "F8_E4M3": (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    "F8_E8M0": (ml_dtypes.float8_e8m0fnu, torch.float8_e8m0fnu),
    "F8_E4M3FNUZ": (ml_dtypes.float8_e4m3fnuz, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": (ml_dtypes.float8_e5m2fnuz, torch.float8_e5m2fnuz),
}
NUMPY = {name: np.dtype(dtype) for name, (dtype, _) in TYPES.items()}
TORCH = {**{name: dtype for name, (_, dtype) in TYPES.items()}, "F4": torch.float4_e2m1fn_x2}


@each(("name", "dtype"), NUMPY.items())
def test_a_numpy_dtype_and_its_safetensors_name_stand_for_each_other(name, dtype):
    assert dtypes.from_numpy(dtype) == name
    assert dtypes.to_numpy(name) == dtype
    assert dtypes.BITS[name] == 8 * dtype.itemsize


@each(("name", "dtype"), TORCH.items())
def test_a_torch_dtype_and_its_safetensors_name_stand_for_each_other(name, dtype):
    assert dtypes.from_torch(dtype) == name
    assert dtypes.to_torch(name) is dtype
    assert dtypes.BITS[name] == (4 if name == "F4" else 8 * dtype.itemsize)


@each("name", dtypes.BITS)
def test_safetensors_knows_every_name_and_counts_the_same_bits(tmp_path, name):
    path = tmp_path / "one.safetensors"
    size = dtypes.nbytes(name, (8,))
    path.write_bytes(by_hand.container({"x": {"dtype": name, "shape": [8], "data_offsets": [0, size]}}, bytes(size)))
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.get_slice("x").get_dtype() == name


@each(
    "dtype",
    [
        *("O", "S3", "U3", "V4", "M8[ns]", "m8[s]", "complex128", "longdouble", "i4,f4", [("x", "f4")], ("u1", 3)),
        *(ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3),
    ],
)
def test_a_numpy_dtype_that_safetensors_lacks_is_refused(dtype):
    with pytest.raises(TypeError, match=r"cannot hold the NumPy dtype .* convert it first"):
        dtypes.from_numpy(np.dtype(dtype))


@each("name", [name for name in NUMPY if name[-2:] in {"16", "32", "64"} and name != "BF16"])
def test_the_other_byte_order_is_refused(name):
    dtype = NUMPY[name]
    assert dtypes.from_numpy(dtype.newbyteorder("=")) == name
    with pytest.raises(TypeError, match="convert it first"):
        dtypes.from_numpy(dtype.newbyteorder("S"))


@each("dtype", [torch.complex128, torch.complex32, torch.qint8, torch.quint8, torch.qint32])
def test_a_torch_dtype_that_safetensors_lacks_is_refused(dtype):
    with pytest.raises(TypeError, match=r"cannot hold torch\..* convert it first"):
        dtypes.from_torch(dtype)


@pytest.mark.parametrize("name", ["F4", "F6_E2M3", "F6_E3M2"])
def test_what_numpy_lacks_is_said_to_be_lacking(name):
    with pytest.raises(TypeError, match=f"NumPy has no {name}; ask for framework='torch', or seal the bytes as U8"):
        dtypes.to_numpy(name)


def test_what_only_ml_dtypes_has_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match="pip install ml_dtypes"):
        dtypes.to_numpy("BF16")


def test_what_this_torch_lacks_is_said_to_be_lacking(monkeypatch):
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    dtypes.to_torch.cache_clear()
    for name in ("F8_E8M0", "F6_E2M3"):
        with pytest.raises(TypeError, match=f"has no {name}; ask for framework='numpy'"):
            dtypes.to_torch(name)


@given(st.sampled_from(sorted(NUMPY)), st.lists(st.integers(0, 6), max_size=4).map(tuple))
def test_bytes_are_counted_as_numpy_counts_them(name, shape):
    assert dtypes.nbytes(name, shape) == np.empty(shape, NUMPY[name]).nbytes


PACKED = [("F4", (2, 3), 3), ("F6_E2M3", (4,), 3), ("F4", (0,), 0), ("F64", (2**63, 2**63), 2**129)]


@each(("name", "shape", "size"), PACKED)
def test_elements_of_a_part_of_a_byte_are_packed_and_no_count_overflows(name, shape, size):
    assert dtypes.nbytes(name, shape) == size


@pytest.mark.parametrize(("name", "shape"), [("F4", ()), ("F4", (3,)), ("F6_E3M2", (2,))])
def test_elements_that_leave_a_byte_half_full_are_refused(name, shape):
    with pytest.raises(FormatError, match="whole bytes"):
        dtypes.nbytes(name, shape)


@each("name", ["f32", "F128", "", "F32 ", "\ud800", None, 4])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(FormatError, match=r"unknown dtype: .*BOOL"):
        dtypes.nbytes(name, ())


@pytest.mark.parametrize("shape", [(2, -1), (-2, -1)])
def test_a_negative_dimension_is_refused(shape):
    with pytest.raises(FormatError, match="negative dimension"):
        dtypes.nbytes("F32", shape)


def test_torch_counts_pairs_where_two_elements_share_a_byte():
    assert dtypes.torch_shape("F4", (3, 8)) == (3, 4)
    assert dtypes.shape_of_torch("F4", (3, 4)) == (3, 8)
    assert dtypes.torch_shape("F32", (3, 7)) == dtypes.shape_of_torch("F32", (3, 7)) == (3, 7)
    assert dtypes.torch_shape("F32", ()) == dtypes.shape_of_torch("F32", ()) == ()
    with pytest.raises(TypeError, match="got 3"):
        dtypes.torch_shape("F4", (2, 3))
    with pytest.raises(TypeError, match=r"call tensor.reshape\(1\) first"):
        dtypes.shape_of_torch("F4", ())


@pytest.mark.parametrize(("dtype", "shape"), [("U" * 10**6, ()), ("F32", (-1,) * 10**5), ("F4", (1,) * 10**5)])
def test_a_message_does_not_repeat_at_length_what_a_file_says(dtype, shape):
    with pytest.raises(FormatError) as caught:
        dtypes.nbytes(dtype, shape)
    assert len(str(caught.value)) < 400


def test_a_size_is_an_integer_whatever_equal_shape_was_asked_for_before():
    with pytest.raises(TypeError):
        dtypes.nbytes("U8", (987_651.0, 0))  # a shape that no other test asks for
    for shape in ((True, 11), (np.int64(5), 3), (1, 11), (5, 3), (987_651, 0)):
        assert type(dtypes.nbytes("U8", shape)) is int
