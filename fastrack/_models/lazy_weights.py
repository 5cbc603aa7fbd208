"""Weights that are opened when a library moves them to their device, or uses them as tensors."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastrack._devices import canonical
from fastrack._sealed.scales import WIDENED
from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._sets.folder import is_widened
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes

if TYPE_CHECKING:
    import torch

# Attributes of torch's tensors that follow from dtype and shape.
_DESCRIBED = {"dim", "element_size", "is_complex", "itemsize", "nbytes", "ndim", "ndimension", "nelement", "numel"}
_DESCRIBED |= {"is_floating_point", "is_sparse", "layout", "requires_grad", "size"}
# Operators of torch's tensors, which Python looks up only in classes.
_ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_OPERATORS = [f"__{prefix}{name}__" for name in _ARITHMETIC for prefix in ("", "r", "i")]
_OPERATORS += [f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert")]
_OPERATORS += [f"__{name}__" for name in ("bool", "int", "float", "complex", "index", "len", "iter", "contains")]
_OPERATORS += ["__array__", "__setitem__"]


def lazy_weights(
    tensors: Mapping[str, SealedTensor], transfer: Callable[..., Any], device: str = "cpu"
) -> dict[str, SealedWeight]:
    """Return lazy weights as the state dict of a model.

    `transfer` opens them, like `to_device` with its keys. `device` is where they open if none is named.
    """
    local = threading.local()
    return {
        name: SealedWeight(
            tensor, transfer, local, WIDENED if is_widened(tensor, tensors) else tensor.dtype, device=device
        )
        for name, tensor in tensors.items()
    }


class LazyTensor(ABC):
    """A stand-in for a torch tensor. `to` opens it on a device; any other use opens it on its own, and it stays open.

    Where a tensor of torch is filled from it, it is opened on the device of that tensor.
    """

    _opened: torch.Tensor | None = None

    @abstractmethod
    def to(
        self, device: Any = None, dtype: torch.dtype | None = None, non_blocking: bool = False, copy: bool = False
    ) -> torch.Tensor:
        """Open and convert the tensor on a device."""

    def fill(self, target: torch.Tensor) -> bool:
        """Open the tensor into another one, if that takes no more than this, and return whether it did."""
        return False

    def cpu(self) -> torch.Tensor:
        """Open the tensor in host memory."""
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> torch.Tensor:
        """Open the tensor on a GPU."""
        import torch

        return self.to(torch.cuda.current_device() if device is None else device, non_blocking=non_blocking)

    def _open(self) -> torch.Tensor:
        """Return the tensor on its own device: the same each time, as it may be changed in place."""
        if self._opened is None:
            self._opened = self.to()
        return self._opened

    def __getattr__(self, name: str) -> Any:
        import torch

        if name.startswith("_") or not hasattr(torch.Tensor, name):  # what other classes have is asked for as well
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self._open(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        import torch

        named = dict(kwargs or {})
        if function is torch.cat and "out" not in named:
            parts = args[0] if args else named["tensors"]
            if all(isinstance(part, LazyTensor) for part in parts):
                return Concatenation(*args, **named)
        if function is torch.Tensor.copy_ and isinstance(args[0], torch.Tensor) and isinstance(args[1], LazyTensor):
            target = args[0]
            if target.device.type in {"cpu", "cuda"}:
                return target if args[1].fill(target) else target.copy_(args[1].to(target.device), *args[2:], **named)
        return function(*_opened(args), **{name: _opened(value) for name, value in named.items()})

    __hash__ = object.__hash__


def _opened(value: Any) -> Any:
    """Return a lazy tensor open, also one in a list or tuple; return other values unchanged."""
    if isinstance(value, LazyTensor):
        return value._open()  # noqa: SLF001 - of this module
    return type(value)(map(_opened, value)) if type(value) in {list, tuple} else value


def _on_opened(name: str) -> Callable[..., Any]:
    def operate(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._open(), name)(*args, **kwargs)

    operate.__name__ = name
    return operate


for _name in _OPERATORS:
    setattr(LazyTensor, _name, _on_opened(_name))


class SealedWeight(LazyTensor):
    """A sealed tensor or a part of one, with the methods of safetensors' slices, for transformers.

    ``weight[...]`` and ``weight[:, 2:4]`` open nothing, and neither do `shape`, `dtype` and what follows from these.
    `local` has the memory where each thread opens weights to convert. `kind` is the dtype that they open in, by its
    safetensors name.
    """

    def __init__(
        self,
        handle: SealedTensor | SealedRows,
        transfer: Callable[..., Any],
        local: threading.local,
        kind: str,
        *,
        device: str = "cpu",
    ) -> None:
        self._handle = handle
        self._transfer = transfer
        self._local = local
        self._kind = kind
        self._device = device

    @property
    def shape(self) -> tuple[int, ...]:
        return dtypes.torch_shape(self._kind, self._handle.shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = dtypes.to_torch(self._kind)
        return dtype

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device(self._device)

    def get_shape(self) -> list[int]:
        """Return the shape, like a slice of safetensors."""
        return list(self._handle.shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype, like a slice of safetensors."""
        return self._kind

    def __getattr__(self, name: str) -> Any:
        if name in _DESCRIBED:
            import torch

            return getattr(torch.empty(self.shape, dtype=self.dtype, device="meta"), name)
        return super().__getattr__(name)

    def __getitem__(self, index: Any) -> Any:
        handle = self._handle
        if self._opened is not None or not isinstance(handle, SealedTensor):
            return self._open()[index]
        if _is_all_of(index, handle.shape):
            return self._of(handle)
        if self._kind != handle.dtype:
            raise ValueError(
                f"{handle.name!r:.200}: expected the whole weight, got a part of one that is quantised, which "
                "opens whole. Load the model without tensor parallelism, or one that is not quantised"
            )
        with contextlib.suppress(TypeError):
            return self._of(handle[index])
        return self._open()[index]  # of an index that torch has, and that needs more than parts of the rows

    def narrow(self, dim: int, start: int, length: int) -> Any:
        """Return a part of the weight along one dimension, like ``torch.Tensor.narrow``, and open nothing."""
        is_inside = dim < len(self.shape) and 0 <= start <= start + length <= self.shape[dim]
        if self._opened is not None or self._kind != self._handle.dtype or dim < 0 or not is_inside:
            return self._open().narrow(dim, start, length)  # torch counts from the end, or says what is wrong
        return self[(*(slice(None),) * dim, slice(int(start), int(start) + length))]

    def fill(self, target: torch.Tensor) -> bool:
        """Open the weight into a tensor of its shape and dtype, without a copy. It holds zeros after an error."""
        fits = target.dtype == self.dtype and tuple(target.shape) == tuple(self.shape) and target.is_contiguous()
        if self._opened is not None or not fits or target.requires_grad:
            return False
        self._transfer(self._handle, str(target.device), out=target, dtype=self._kind)
        return True

    def _of(self, handle: SealedTensor | SealedRows) -> SealedWeight:
        return SealedWeight(handle, self._transfer, self._local, self._kind, device=self._device)

    def to(
        self, device: Any = None, dtype: torch.dtype | None = None, non_blocking: bool = False, copy: bool = False
    ) -> torch.Tensor:
        """Open and convert the weight on a device, like ``torch.Tensor.to``."""
        import torch

        if isinstance(device, torch.dtype):
            device, dtype = None, device
        elif isinstance(device, (torch.Tensor, LazyTensor)):
            device, dtype = device.device, device.dtype
        if self._opened is not None:
            return self._opened.to(self._device if device is None else device, dtype, non_blocking, copy)
        handle, kind = self._handle, self._kind
        name = canonical(f"cuda:{device}" if isinstance(device, int) else self._device if device is None else device)
        if dtype is None or dtype == self.dtype or name != "cpu":
            whole: torch.Tensor = self._transfer(handle, name, framework="torch", dtype=kind)
            return whole if dtype is None else whole.to(dtype)
        # Weights to convert are opened in reused memory: fresh memory takes longer than the conversion.
        memory: Bytes | None = getattr(self._local, "memory", None)
        size = dtypes.nbytes(kind, handle.shape)
        if memory is None or memory.size < size:
            memory = self._local.memory = arrays.empty_bytes(size)
        opened = arrays.from_bytes(memory[:size], kind, handle.shape, "torch")
        self._transfer(handle, "cpu", out=opened, dtype=kind)
        huge_pages = torch.from_numpy(arrays.empty_bytes(opened.numel() * dtype.itemsize))
        return huge_pages.view(dtype).reshape(opened.shape).copy_(opened)


def _is_all_of(index: Any, shape: tuple[int, ...]) -> bool:
    """Return True if an index is ``...``, or of slices that take in the whole of a shape."""
    if index is Ellipsis:
        return True
    items = index if isinstance(index, tuple) else (index,)
    if len(items) > len(shape) or not all(isinstance(item, slice) for item in items):
        return False
    spans = [item.indices(extent) for item, extent in zip(items, shape, strict=False)]
    return spans == [(0, extent, 1) for extent in shape[: len(items)]]


class Concatenation(LazyTensor):
    """Parts of weights that are opened on one device, and concatenated there."""

    def __init__(self, tensors: list[LazyTensor], dim: int = 0) -> None:
        self._parts = tensors
        self._dim = dim

    def to(
        self, device: Any = None, dtype: torch.dtype | None = None, non_blocking: bool = False, copy: bool = False
    ) -> torch.Tensor:
        """Open all parts on a device, and concatenate them."""
        import torch

        if self._opened is not None:
            return self._opened.to(device, dtype, non_blocking, copy)
        return torch.cat([part.to(device, dtype) for part in self._parts], dim=self._dim)
