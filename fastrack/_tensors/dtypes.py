"""Element types: the names safetensors gives them, and what NumPy and torch call the same thing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from fastrack.errors import FormatError

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element, by the safetensors name of its type."""

_NUMPY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16", "I32": "int32",
    "U32": "uint32", "F32": "float32", "I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64",
}  # fmt: skip
_ML_DTYPES = {
    "BF16": "bfloat16", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_TORCH = {**_NUMPY, **_ML_DTYPES, "F4": "float4_e2m1fn_x2"}

# Two F4 elements share a byte, and torch counts the pairs.
_PAIRED = "F4"


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes that a tensor of this type and shape takes, dense and in C order.

    Raises
    ------
    FormatError
        If there is no such type, a dimension is negative, or the bits do not fill whole bytes.
    """
    bits = BITS.get(dtype)
    if bits is None:
        message = f"no such dtype: {dtype!r:.40}; safetensors knows {', '.join(BITS)}"
        raise FormatError(message)
    if any(extent < 0 for extent in shape):
        message = f"a shape has no negative dimension: {list(shape)!s:.80}"
        raise FormatError(message)
    size, rest = divmod(math.prod(shape) * bits, 8)
    if rest:
        message = f"a tensor of {dtype} and shape {list(shape)!s:.80} does not fill whole bytes"
        raise FormatError(message)
    return size


@cache
def holds_numbers(dtype: Any) -> bool:
    """Return whether a NumPy dtype is one of numbers or booleans, and not of text, objects, dates or records."""
    import numpy as np

    return dtype.kind not in "OSUTMm" and not issubclass(dtype.type, np.void)


@cache  # a dtype takes microseconds to tell its name
def from_numpy(dtype: Any) -> str:
    """The safetensors name of a NumPy dtype, those of the package ml_dtypes included.

    Raises
    ------
    TypeError
        If safetensors has none, as for objects, strings, records and numbers in the other byte order.
    """
    name = _by_numpy_name().get(dtype.name)
    if name is None or (dtype.byteorder not in "=|" and not dtype.isnative):
        message = (
            f"a sealed tensor cannot hold the NumPy dtype {dtype!s:.80}; convert it first, {_conversion_of(dtype)}"
        )
        raise TypeError(message)
    return name


def _conversion_of(dtype: Any) -> str:
    if not holds_numbers(dtype):
        return "text to bytes, as SealedDataset.records takes, dates to int64, a record by its fields"
    if dtype.kind == "c":
        return "with array.astype('complex64'), or seal its two parts, array.real and array.imag"
    return "with array.astype" if dtype.isnative else "with array.astype(array.dtype.newbyteorder('='))"


def to_numpy(dtype: str) -> Any:
    """The NumPy dtype of that safetensors name.

    Raises
    ------
    TypeError
        If NumPy has none, or has it only with the package ml_dtypes and that is not installed.
    """
    import numpy as np

    if dtype in _NUMPY:
        return np.dtype(_NUMPY[dtype])
    if dtype in _ML_DTYPES:
        try:
            import ml_dtypes
        except ImportError:
            message = f"NumPy has no {dtype} by itself: pip install ml_dtypes, or ask for framework='torch'"
            raise TypeError(message) from None
        return np.dtype(getattr(ml_dtypes, _ML_DTYPES[dtype]))
    message = f"NumPy has no {dtype}; ask for framework='torch', or seal the bytes as U8"
    raise TypeError(message)


def from_torch(dtype: Any) -> str:
    """The safetensors name of a torch dtype.

    Raises
    ------
    TypeError
        If safetensors has none, as for quantised and complex128 tensors.
    """
    name = _by_torch_name().get(str(dtype).removeprefix("torch."))
    if name is None:
        advice = ", or seal its two parts, torch.view_as_real(tensor)" if dtype.is_complex else ""
        message = f"a sealed tensor cannot hold {dtype}; convert it first, with tensor.to{advice}"
        raise TypeError(message)
    return name


def to_torch(dtype: str) -> Any:
    """The torch dtype of that safetensors name.

    Raises
    ------
    TypeError
        If this torch has none.
    """
    import torch

    found = getattr(torch, _TORCH.get(dtype, ""), None)
    if found is None:
        message = f"torch {torch.__version__} has no {dtype}; ask for framework='numpy', or seal the bytes as U8"
        raise TypeError(message)
    return found


def torch_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape torch gives a tensor that safetensors says has `shape`.

    Raises
    ------
    TypeError
        If its last dimension does not fall into pairs.
    """
    if dtype == _PAIRED and shape:
        if shape[-1] % 2:
            message = f"torch keeps {dtype} in pairs, so a last dimension cannot be {shape[-1]}; seal the bytes as U8"
            raise TypeError(message)
        return (*shape[:-1], shape[-1] // 2)
    return tuple(shape)


def shape_of_torch(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape safetensors gives a tensor that torch says has `shape`.

    Raises
    ------
    TypeError
        If it is a pair without a dimension to count it along.
    """
    if dtype == _PAIRED:
        if not shape:
            message = f"a tensor of {dtype} needs a dimension to be sealed; call tensor.reshape(1) first"
            raise TypeError(message)
        return (*shape[:-1], shape[-1] * 2)
    return tuple(shape)


@cache
def _by_numpy_name() -> dict[str, str]:
    return {name: dtype for dtype, name in (*_NUMPY.items(), *_ML_DTYPES.items())}


@cache
def _by_torch_name() -> dict[str, str]:
    return {name: dtype for dtype, name in _TORCH.items()}
