"""Arrays on the host, whatever framework they are of: what they are, their bytes, and fresh ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from fastrack._tensors import dtypes

Bytes = npt.NDArray[np.uint8]
Framework = Literal["torch", "numpy", "cupy"]

_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64


def framework_of(thing: object) -> Framework | None:
    """Which framework's array this is, or None if it is no array. Imports nothing."""
    if isinstance(thing, np.ndarray):
        return "numpy"
    for name, attribute in (("torch", "Tensor"), ("cupy", "ndarray")):
        module = sys.modules.get(name)
        if module is not None and isinstance(thing, getattr(module, attribute, ())):
            return cast("Framework", name)
    return None


def holds_numbers(thing: object) -> bool:
    """Return whether this is an array, and one of numbers: not of text, objects, dates or records."""
    framework = framework_of(thing)
    return framework is not None and (framework != "numpy" or dtypes.holds_numbers(cast("Any", thing).dtype))


@cache
def installed(framework: Framework) -> bool:
    """Whether it can be imported, found out without importing it."""
    return find_spec(framework) is not None


def default_framework() -> Framework:
    """What a sealed tensor becomes where nobody says: torch if it is installed, else numpy."""
    return "torch" if installed("torch") else "numpy"


def describe(array: Any) -> tuple[str, tuple[int, ...]]:
    """The safetensors dtype and shape of an array.

    Raises
    ------
    TypeError
        If it is no array, has no dense elements, or is of a type that safetensors lacks.
    """
    framework = framework_of(array)
    if framework == "torch":
        _require_dense(array)
        dtype = dtypes.from_torch(array.dtype)
        return dtype, dtypes.shape_of_torch(dtype, array.shape)
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask; fill it first, with array.filled, or move its two parts")
    if framework is None:
        message = f"expected a NumPy array, a torch tensor or a CuPy array, not {type(array).__name__}"
        raise TypeError(message)
    return dtypes.from_numpy(array.dtype), tuple(array.shape)


def bytes_of(array: Any, *, writable: bool = False) -> Bytes:
    """The bytes of an array in host memory, as `uint8` (nbytes,).

    A view, unless the array is not contiguous: then a copy, which `writable` refuses.

    Raises
    ------
    TypeError
        If it is no array, or lies on another device.
    ValueError
        If it is to be written and is not contiguous or is read-only.
    """
    if framework_of(array) == "torch":
        array = flat_torch(array, "cpu", writable=writable).numpy()
    if not isinstance(array, np.ndarray):
        message = f"expected an array in host memory, not {type(array).__name__}; move it to the host first"
        raise TypeError(message)
    if writable and not (array.flags.c_contiguous and array.flags.writeable):
        message = "an array to be filled must be contiguous and writable"
        raise ValueError(message)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def reader(array: Any) -> Callable[[int, int], Bytes]:
    """A function that gives the bytes of an array in host memory from a start to a stop, on multiples of its element.

    An array that is not contiguous is put in order piece by piece, so that there is never a copy of all of it.

    Raises
    ------
    TypeError
        If it is no array in host memory.
    """
    if framework_of(array) == "torch" and not (array.is_contiguous() or array.is_conj() or array.is_neg()):
        array = _torch_words(array)
    if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
        flat, width = array.flat, array.itemsize
        return lambda start, stop: flat[start // width : stop // width].view(np.uint8)
    memory = bytes_of(array)
    return lambda start, stop: memory[start:stop]


def empty_bytes(size: int) -> Bytes:
    """Fresh memory for `size` bytes, on a 64-byte boundary, or that of a huge page.

    The first touch of fresh memory costs more than the cipher does. Huge pages make it several times cheaper, and NumPy
    asks the kernel for them from 4 MiB up; what begins between two of them has small ones at both ends.
    """
    alignment = _ALIGNMENT if size < 2 * _HUGE_PAGE else _HUGE_PAGE
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.__array_interface__["data"][0] % alignment
    return memory[start : start + size]


def from_bytes(memory: Bytes, dtype: str, shape: Sequence[int], framework: Framework) -> Any:
    """An array of `framework` on this host memory, without a copy.

    Raises
    ------
    TypeError
        If the framework has no such dtype, or keeps no arrays in host memory.
    """
    if framework == "torch":
        import torch

        wanted = dtypes.to_torch(dtype)
        return torch.from_numpy(memory).view(wanted).reshape(dtypes.torch_shape(dtype, shape))
    if framework == "numpy":
        return memory.view(dtypes.to_numpy(dtype)).reshape(tuple(shape))
    message = f"framework= must be 'numpy' or 'torch' for arrays in host memory, not {framework!r:.40}"
    raise TypeError(message)


def flat_torch(tensor: Any, device: str, *, writable: bool = False) -> Any:
    """The bytes of a torch tensor on that device, as a tensor of `uint8` (nbytes,) there. Else as `bytes_of`."""
    import torch

    here = "cpu" if tensor.device.type == "cpu" else str(tensor.device)
    if here != device or tensor.layout != torch.strided:
        place = "in host memory" if device == "cpu" else f"on {device}"
        message = f"expected a dense tensor {place}, not one on {tensor.device} ({tensor.layout})"
        raise TypeError(message)
    if writable and (not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()):
        message = "a tensor to be filled must be contiguous, and no view that conjugates or negates; fill a fresh one"
        raise ValueError(message)
    if writable and tensor.requires_grad:
        raise ValueError("a tensor that requires a gradient cannot be filled: autograd would not know; pass .detach()")
    if writable and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)  # what autograd saved of it is no longer what it holds
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor of one row may keep a stride that `view` refuses.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def in_memory_order(tensor: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return a torch tensor with its dimensions in the order of memory, and what gives an array made of it its form.

    The form is the order of the dimensions, such as that of ``channels_last``, and in torch the subclass with its
    attributes, such as a bounding box of torchvision has. Parameters become plain tensors. None stands for no change.

    Raises
    ------
    TypeError
        If the tensor has no dense elements.
    """
    import torch

    _require_dense(tensor)
    kind = type(tensor)
    is_plain = kind is torch.Tensor or isinstance(tensor, torch.nn.Parameter)
    order: list[int] = []
    moved = tensor
    if not is_plain:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - what torch's documentation calls it
            moved = tensor.detach()
    if not moved.is_contiguous():
        order = sorted(range(moved.dim()), key=moved.stride, reverse=True)
        if moved.permute(order).is_contiguous():
            moved = moved.permute(order)
        else:
            order = []
    if is_plain and not order:
        return moved, None
    places = [order.index(place) for place in range(len(order))]

    def formed(array: Any) -> Any:
        if places:
            array = array.permute(places) if isinstance(array, torch.Tensor) else array.transpose(places)
        if not is_plain and isinstance(array, torch.Tensor):
            array = array.as_subclass(kind)
            array.__dict__.update(tensor.__dict__)
        return array

    return moved, formed


def storage_key(array: Any) -> Hashable:
    """Return a key that two arrays of one framework share if and only if they view the same memory in the same way.

    An array without memory, which is empty or on torch's meta device, shares its key with no other. A key is valid as
    long as its array lives.
    """
    if isinstance(array, np.ndarray):
        if not array.size:
            return id(array)
        return array.__array_interface__["data"][0], array.dtype, array.shape, array.strides
    if not array.numel() or array.is_meta:
        return id(array)
    shown = (array.dtype, tuple(array.shape), array.stride(), array.is_conj(), array.is_neg())
    return str(array.device), array.data_ptr(), *shown


def _require_dense(tensor: Any) -> None:
    """Refuse a torch tensor that is not made of elements in rows and columns: sparse, nested, or of its own kind."""
    import torch

    if tensor.layout == torch.strided and not tensor.is_nested:
        if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            return
        found, advice = type(tensor).__qualname__, "full_tensor(), to_local() or dequantize() of such a class"
    elif tensor.is_nested:
        found, advice = "nested tensor", "tensor.values() and tensor.offsets(), or torch.nested.to_padded_tensor"
    else:
        found, advice = f"tensor of {tensor.layout}", "its indices and values, or tensor.to_dense()"
    raise TypeError(f"expected a dense tensor, got a {found}; take the dense tensors that it is made of: {advice}")


def _torch_words(tensor: Any) -> Any:
    """A tensor's elements as integers of the same size, in NumPy and in their places."""
    import torch

    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(words).numpy()
