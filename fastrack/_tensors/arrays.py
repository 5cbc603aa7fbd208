"""Inspect arrays of any framework, view their bytes, and allocate new ones in host memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from operator import mul
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastrack._tensors import dtypes
from fastrack._util import extras
from fastrack._util.shown import shown

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Framework = Literal["torch", "numpy", "cupy"]

_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64
_BYTE: Any = ctypes.c_char
_SHARED = frozenset(["BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "F32", "F64"])  # dtypes of every NumPy and torch
_SMALL = 1 << 20  # bytes below which allocation dominates the cost of an array


def framework_of(value: object) -> Framework | None:
    """Return the framework of an array, or None for another object. Imports nothing."""
    if isinstance(value, np.ndarray):
        return "numpy"
    if isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ())):
        return "torch"
    if isinstance(value, getattr(sys.modules.get("cupy"), "ndarray", ())):
        return "cupy"
    return None


@cache
def installed(framework: Framework) -> bool:
    """Return whether a framework can be imported, without importing it."""
    return find_spec(framework) is not None


def require_installed(framework: Framework | None) -> None:
    """Raise `ModuleNotFoundError` with advice if torch results are requested and torch is absent."""
    if framework == "torch" and not installed("torch"):
        extras.require("torch", "a torch.Tensor", "torch")


def default_framework() -> Framework:
    """Return the default framework of results: torch if it is installed, else numpy."""
    return "torch" if installed("torch") else "numpy"


def dtype_and_shape(array: Any) -> tuple[str, tuple[int, ...]]:
    """Return the safetensors dtype and shape of a dense array; raise TypeError for anything else."""
    framework = framework_of(array)
    if framework == "torch":
        _require_dense(array)
        dtype = dtypes.from_torch(array.dtype)
        return dtype, dtypes.shape_of_torch(dtype, array.shape)
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask. Call array.filled, or move its data and its mask")
    if framework is None:
        raise TypeError(
            f"expected a NumPy array, a torch tensor or a CuPy array, got {type(array).__name__}. Make one of it first"
        )
    return dtypes.from_numpy(array.dtype), tuple(array.shape)


def bytes_of(array: Any, *, writable: bool = False) -> Bytes:
    """Return the bytes of an array in host memory, as `uint8` (nbytes,): a view if it is contiguous, else a copy."""
    if framework_of(array) == "torch":
        array = flat_torch(array, "cpu", writable=writable).numpy()
    if not isinstance(array, np.ndarray):
        raise TypeError(f"expected an array in host memory, got {type(array).__name__}. Move it to the host first")
    if writable:
        _require_writable(array)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def writable_memory(array: Any) -> tuple[int, int, object]:
    """Return the address and the size in bytes of a host array to fill, and the owner of the memory."""
    if type(array) is np.ndarray:
        _require_writable(array)
        return _address(array), array.nbytes, array
    if framework_of(array) == "torch":
        _require_torch(array, "cpu", writable=True)
        return array.data_ptr(), array.numel() * array.element_size(), array
    memory = bytes_of(array, writable=True)
    return memory.__array_interface__["data"][0], memory.size, memory


def _address(array: npt.NDArray[Any]) -> int:
    """Return the address of the first byte of a contiguous, writable array."""
    try:
        return ctypes.addressof(_BYTE.from_buffer(array))  # takes half as long as the interface
    except (TypeError, ValueError):  # no bytes, or a dtype that NumPy does not know
        return int(array.__array_interface__["data"][0])


def _require_writable(array: npt.NDArray[Any]) -> None:
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError("an array to be filled must be contiguous and writable")


def reader(array: Any) -> Callable[[int, int], Bytes]:
    """Return a function from `(start, stop)`, multiples of the itemsize, to the bytes of an array in host memory.

    An array that is not contiguous is copied range by range, never as a whole.
    """
    if framework_of(array) == "torch" and not (array.is_contiguous() or array.is_conj() or array.is_neg()):
        import torch

        _require_torch(array, "cpu", writable=False)
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[array.element_size()]
        array = array.detach().view(words).numpy()  # with the same strides
    if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
        flat, width = array.flat, array.itemsize
        return lambda start, stop: flat[start // width : stop // width].view(np.uint8)
    memory = bytes_of(array)
    return lambda start, stop: memory[start:stop]


def empty_bytes(size: int) -> Bytes:
    """Allocate `size` bytes, aligned to 64 bytes, or to a huge page from 4 MiB up.

    The first touch of new memory costs more time than decryption. Huge pages make it several times cheaper; NumPy
    requests them from 4 MiB up, and an unaligned buffer would have small pages at both ends.
    """
    alignment = _ALIGNMENT if size < 2 * _HUGE_PAGE else _HUGE_PAGE
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.__array_interface__["data"][0] % alignment
    return memory[start : start + size]


def empty(size: int, dtype: str, shape: Sequence[int], framework: Framework) -> tuple[Any, int, object]:
    """Allocate an array of `size` bytes in host memory; return it, its address, and the owner of the memory.

    Arrays of less than a MiB use the framework's allocator.
    """
    if framework == "torch" and size < _SMALL:
        import torch

        extent = shape if dtype in _SHARED else dtypes.torch_shape(dtype, shape)
        # Without the tuple it takes a third less time, but there must be a dimension.
        tensor = torch.empty(*extent or ((),), dtype=dtypes.to_torch(dtype), device="cpu")
        address = _torch_address(tensor)
        if address or not size:
            return tensor, address or 0, tensor
    if framework == "numpy" and size < _SMALL:
        array = np.empty(tuple(shape), dtypes.NUMPY.get(dtype) or dtypes.to_numpy(dtype))
        return array, _address(array), array
    memory = empty_bytes(size)
    return from_bytes(memory, dtype, shape, framework), memory.__array_interface__["data"][0], memory


def from_bytes(memory: Bytes, dtype: str, shape: Sequence[int], framework: Framework) -> Any:
    """Return an array of `framework` that views `memory`, without a copy."""
    if framework == "torch":
        import torch

        if dtype in _SHARED:  # NumPy's views take a tenth of the time of torch's
            tensor = torch.from_numpy(memory.view(dtypes.to_numpy(dtype)).reshape(shape))
        else:
            tensor = torch.from_numpy(memory).view(dtypes.to_torch(dtype)).reshape(dtypes.torch_shape(dtype, shape))
        if memory.size and _torch_address(tensor) == 0:
            raise _without_memory(tensor)
        return tensor
    if framework == "numpy":
        return memory.view(dtypes.to_numpy(dtype)).reshape(tuple(shape))
    raise TypeError(f"framework= must be 'numpy' or 'torch' for arrays in host memory, got {shown(framework, 40)}")


def _torch_address(tensor: Any) -> int | None:
    """Return the address of a torch tensor, 0 if it has no memory, or None if a transform of torch hides it."""
    if type(tensor).__name__ == "FakeTensor":  # data_ptr() would warn
        return 0
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return None


def _without_memory(tensor: Any) -> TypeError:
    import torch

    kind, scope = "tensor of a transform of torch.func", "that transform"
    if type(tensor).__name__ == "FakeTensor":
        kind, scope = "FakeTensor", "FakeTensorMode"
    elif torch._is_functional_tensor(tensor):  # noqa: SLF001 - the only test there is
        kind, scope = "functional tensor", "torch.func.functionalize and torch.export"
    return TypeError(f"expected a tensor with memory, got a {kind}, which has none. Call fastrack outside of {scope}")


def flat_torch(tensor: Any, device: str, *, writable: bool = False) -> Any:
    """Return the bytes of a torch tensor on `device`, as a torch tensor of `uint8` (nbytes,)."""
    import torch

    _require_torch(tensor, device, writable=writable)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor of one row may have a stride that `view` refuses.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _require_torch(tensor: Any, device: str, *, writable: bool) -> None:
    """Raise unless a torch tensor is dense and on `device`, and, if `writable`, can be filled in place."""
    import torch

    if (device != "cpu" if tensor.is_cpu else device != str(tensor.device)) or tensor.layout != torch.strided:
        expected = "in host memory" if device == "cpu" else f"on {device}"
        advice = "It has no values: load or make them" if tensor.is_meta else "Move it there"
        raise TypeError(f"expected a dense tensor {expected}, got one on {tensor.device} ({tensor.layout}). {advice}")
    if device == "cpu" and tensor.numel() and not _torch_address(tensor):
        raise _without_memory(tensor)
    if not writable:
        return
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "filling a tensor failed: expected a contiguous one that is no conjugate or negated view. Fill a new one"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError("a tensor that requires a gradient cannot be filled: autograd would not know. Pass .detach()")
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)  # so that autograd refuses saved references to the old contents


def in_memory_order(array: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Return an array of torch or NumPy with its dimensions as they follow each other in memory, and its strides.

    The strides, in elements, are None for an array that has those of a new one. They are None too for one that is not
    dense, such as a slice or an expanded tensor, which is returned as it is.
    """
    if isinstance(array, np.ndarray):
        if array.flags.c_contiguous:
            return array, None
        strides = tuple(abs(step) // array.itemsize for step in array.strides)  # one element may have any
        moved = array.transpose(outermost_first(strides))
        return (moved, strides) if moved.flags.c_contiguous else (array, None)
    _require_dense(array)  # others have no strides
    shape, is_contiguous = array.shape, array.is_contiguous()
    if is_contiguous and not (1 in shape or 0 in shape):
        return array, None
    strides = array.stride()
    # The stride of a dimension of one element addresses nothing, but torch tells memory formats by it.
    if is_contiguous and strides == tuple(accumulate((max(size, 1) for size in shape[:0:-1]), mul, initial=1))[::-1]:
        return array, None
    moved = array.permute(outermost_first(strides))
    return (moved, strides) if moved.is_contiguous() else (array, None)


def with_strides(array: Any, strides: Sequence[int]) -> Any:
    """Return an array that `in_memory_order` has moved, or its values in new memory, with its earlier strides.

    NumPy and CuPy arrays get the order of their dimensions back. Raises ValueError unless the strides are those of a
    dense array of the same extents.
    """
    if len(strides) != array.ndim:
        raise ValueError(f"expected the strides of {array.ndim} dimensions, got those of {len(strides)}")
    order = outermost_first(strides)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    is_torch = framework_of(array) == "torch"
    moved = array.permute(inverse) if is_torch else array.transpose(inverse)
    steps = moved.stride() if is_torch else [step // array.itemsize for step in moved.strides]
    if 0 not in moved.shape and any(
        size > 1 and step != stride for size, step, stride in zip(moved.shape, steps, strides, strict=True)
    ):
        raise ValueError(f"expected the strides of a dense array of {list(moved.shape)}, got others")
    # Detached from the array that it views: torch tells a view of another tensor from a tensor of its own.
    return moved.as_strided(moved.shape, strides).detach() if is_torch else moved


def outermost_first(strides: Sequence[int]) -> list[int]:
    """Return the dimensions in the order that they have in memory."""
    return sorted(range(len(strides)), key=strides.__getitem__, reverse=True)


def take_form(array: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return the plain array of a torch tensor or NumPy array, and a function that restores its form on a result.

    The form is its strides if it is dense, such as ``channels_last``, and for torch the subclass with its attributes,
    such as a bounding box of torchvision. Parameters become plain tensors. The function is None if there is nothing to
    restore.
    """
    subclass: Any = None
    moved = array
    if not isinstance(array, np.ndarray):
        import torch

        if type(array) is not torch.Tensor and not isinstance(array, torch.nn.Parameter):
            _require_dense(array)
            subclass = type(array)
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - documented under this name
                moved = array.detach()
    moved, strides = in_memory_order(moved)
    if subclass is None and strides is None:
        return moved, None

    def restore(result: Any) -> Any:
        if strides is not None:
            result = with_strides(result, strides)
        if subclass is not None and framework_of(result) == "torch":
            result = result.as_subclass(subclass)
            result.__dict__.update(array.__dict__)
        return result

    return moved, restore


def _require_dense(tensor: Any) -> None:
    """Raise if a torch tensor is sparse, nested, or of a class with its own storage (``__torch_dispatch__``)."""
    import torch

    if tensor.layout == torch.strided and not tensor.is_nested:
        if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            return
        actual, advice = type(tensor).__qualname__, "full_tensor(), to_local() or dequantize() of such a class"
    elif tensor.is_nested:
        actual, advice = "nested tensor", "tensor.values() and tensor.offsets(), or torch.nested.to_padded_tensor"
    else:
        actual, advice = f"tensor of {tensor.layout}", "its indices and values, or tensor.to_dense()"
    raise TypeError(f"expected a dense tensor, got a {actual}; take the dense tensors that it consists of: {advice}")
