"""Element types: their names in safetensors, and the dtypes of NumPy and torch that correspond to them."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from fastrack._util.shown import shown
from fastrack.errors import FormatError

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element, by the safetensors name of its type."""

NUMPY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16", "I32": "int32",
    "U32": "uint32", "F32": "float32", "I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64",
}  # fmt: skip
"""NumPy's own types, by their safetensors names."""

_ML_DTYPES = {
    "BF16": "bfloat16", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_TORCH = {**NUMPY, **_ML_DTYPES, "F4": "float4_e2m1fn_x2"}
_FROM_NUMPY = {name: dtype for dtype, name in (NUMPY | _ML_DTYPES).items()}
_FROM_TORCH = {name: dtype for dtype, name in _TORCH.items()}


class Dtype(str):
    """Element type of a tensor: the text of its safetensors name, which is equal to the dtypes of torch and NumPy.

    It is also equal to their names. Its hash is the hash of its text: a dtype of torch or NumPy in a set or a dict does
    not find it. With an unsigned dtype of NumPy it stands on the left: on the right NumPy reads "U8" as a text's.
    """

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if str.__eq__(self, other) is True:
            return True
        name = _name(other)
        return name is not None and _FROM_TORCH.get(name.removeprefix("torch.")) == str(self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce__(self) -> tuple[object, ...]:
        return str, (str(self),)


DTYPES = {name: Dtype(name) for name in BITS}
"""The dtypes, by their safetensors names."""

# Two F4 elements share a byte, and a torch shape counts pairs.
_PAIRED = "F4"


@lru_cache(maxsize=1024)
def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a dense tensor of a dtype and shape; raise FormatError if either is invalid."""
    bits = BITS.get(dtype)
    if bits is None:
        raise FormatError(f"unknown dtype: expected one of safetensors ({', '.join(BITS)}), got {dtype!r:.40}")
    if shape and min(shape) < 0:
        raise FormatError(f"expected a shape without negative dimensions, got {list(shape)!s:.80}")
    # The cache takes (2.0,) for (2,): operator.index refuses floats before a result is kept.
    size, rest = divmod(math.prod(map(operator.index, shape)) * bits, 8)
    if rest:
        raise FormatError(f"expected a shape that fills whole bytes, got {list(shape)!s:.80} of {dtype}")
    return size


@cache
def holds_numbers(dtype: Any) -> bool:
    """Return whether a NumPy dtype is numeric or boolean, rather than of text, objects, dates or records."""
    import numpy as np

    return dtype.kind not in "OSUTMm" and not issubclass(dtype.type, np.void)


@cache  # the name of a dtype takes microseconds to compute
def from_numpy(dtype: Any) -> str:
    """Return the safetensors name of a dtype of NumPy or ml_dtypes; raise TypeError if it has none."""
    name = _FROM_NUMPY.get(dtype.name)
    if name is None or (dtype.byteorder not in "=|" and not dtype.isnative):
        raise TypeError(
            f"a sealed tensor cannot hold the NumPy dtype {dtype!s:.80}; convert it first, {_conversion_of(dtype)}"
        )
    return name


def _conversion_of(dtype: Any) -> str:
    if not holds_numbers(dtype):
        return "text to bytes, as SealedDataset.records takes them, dates to int64, a record field by field"
    if dtype.kind == "c":
        return "with array.astype('complex64'), or seal its two parts, array.real and array.imag"
    return "with array.astype" if dtype.isnative else "with array.astype(array.dtype.newbyteorder('='))"


def to_numpy(dtype: str) -> Any:
    """Return the NumPy dtype of a safetensors name; raise TypeError if NumPy lacks it."""
    import numpy as np

    if dtype in NUMPY:
        return np.dtype(NUMPY[dtype])
    if dtype in _ML_DTYPES:
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(
                f"NumPy has no {dtype} by itself: pip install ml_dtypes, or ask for framework='torch'"
            ) from None
        return np.dtype(getattr(ml_dtypes, _ML_DTYPES[dtype]))
    raise TypeError(f"NumPy has no {dtype}; ask for framework='torch', or seal the bytes as U8")


@cache
def from_torch(dtype: Any) -> str:
    """Return the safetensors name of a torch dtype; raise TypeError if it has none."""
    name = _FROM_TORCH.get(str(dtype).removeprefix("torch."))
    if name is None:
        advice = ", or seal its two parts, torch.view_as_real(tensor)" if dtype.is_complex else ""
        convert = "dequantize" if str(dtype).startswith("torch.q") else "to"
        raise TypeError(f"a sealed tensor cannot hold {dtype}; convert it first, with tensor.{convert}{advice}")
    return name


@cache
def to_torch(dtype: str) -> Any:
    """Return the torch dtype of a safetensors name; raise TypeError if torch lacks it."""
    import torch

    result = getattr(torch, _TORCH.get(dtype, ""), None)
    if result is None:
        raise TypeError(f"torch {torch.__version__} has no {dtype}; ask for framework='numpy', or seal the bytes as U8")
    return result


def name_of(dtype: object) -> str:
    """Return the safetensors name of a dtype: of torch or NumPy, or by its name there or in safetensors.

    Raise TypeError if it has none.
    """
    name = (_name(dtype) or "").removeprefix("torch.")
    found = name if name in BITS else _FROM_TORCH.get(name)
    if found is None:
        told = shown(name or dtype, 40)
        raise TypeError(f"dtype=: expected one of {', '.join(_FROM_TORCH)}, got {told}. Name one of these")
    return found


def _name(dtype: object) -> str | None:
    """Return the text of a dtype of torch or NumPy, or of its name; None for another object. Imports nothing."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy is not None and isinstance(dtype, type) and issubclass(dtype, numpy.generic):
        dtype = numpy.dtype(dtype)
    kinds = str, getattr(torch, "dtype", str), getattr(numpy, "dtype", str)
    return str(dtype) if isinstance(dtype, kinds) else None


def torch_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the torch shape of a tensor whose safetensors shape is `shape`."""
    if dtype == _PAIRED and shape:
        if shape[-1] % 2:
            raise TypeError(
                f"torch packs {dtype} in pairs: expected an even last dimension, got {shape[-1]}. Seal the bytes as U8"
            )
        return (*shape[:-1], shape[-1] // 2)
    return tuple(shape)


def shape_of_torch(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the safetensors shape of a tensor whose torch shape is `shape`."""
    if dtype == _PAIRED:
        if not shape:
            raise TypeError(f"a tensor of {dtype} needs a dimension to be sealed; call tensor.reshape(1) first")
        return (*shape[:-1], shape[-1] * 2)
    return tuple(shape)
