"""Weights that are opened when a library moves them to their device."""

from __future__ import annotations

import threading
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


def lazy_weights(tensors: Mapping[str, SealedTensor], transfer: Callable[..., Any]) -> dict[str, SealedWeight]:
    """Return lazy weights as the state dict of a model. `transfer` opens them, like `to_device` with its keys."""
    local = threading.local()
    return {
        name: SealedWeight(tensor, transfer, local, WIDENED if is_widened(tensor, tensors) else tensor.dtype)
        for name, tensor in tensors.items()
    }


class SealedWeight:
    """A sealed tensor or a part of one, with the methods of safetensors' slices, for transformers.

    ``weight[...]`` and ``weight[:, 2:4]`` open nothing; `to` opens the weight on its device. `local` has the memory
    where each thread opens weights to convert. `kind` is the dtype that they open in, by its safetensors name.
    """

    def __init__(
        self, handle: SealedTensor | SealedRows, transfer: Callable[..., Any], local: threading.local, kind: str
    ) -> None:
        self._handle = handle
        self._transfer = transfer
        self._local = local
        self._kind = kind

    @property
    def shape(self) -> tuple[int, ...]:
        return dtypes.torch_shape(self._kind, self._handle.shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = dtypes.to_torch(self._kind)
        return dtype

    def get_shape(self) -> list[int]:
        """Return the shape, like a slice of safetensors."""
        return list(self._handle.shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype, like a slice of safetensors."""
        return self._kind

    def is_floating_point(self) -> bool:
        """Return True if the dtype is floating point."""
        return self.dtype.is_floating_point

    def __getitem__(self, index: Any) -> SealedWeight:
        if index is Ellipsis:
            return self
        assert isinstance(self._handle, SealedTensor)
        if self._kind != self._handle.dtype:
            raise ValueError(
                f"{self._handle.name!r:.200}: expected the whole weight, got a part of one that is quantised, which "
                "opens whole. Load the model without tensor parallelism, or one that is not quantised"
            )
        return SealedWeight(self._handle[index], self._transfer, self._local, self._kind)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Open and convert the weight on a device."""
        import torch

        handle, kind = self._handle, self._kind
        name = canonical(f"cuda:{device}" if isinstance(device, int) else device)
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

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        import torch

        if function is not torch.cat:
            raise TypeError(f"{function}: expected opened tensors, got sealed ones. Call their method to(device) first")
        return Concatenation(*args, **(kwargs or {}))


class Concatenation:
    """Parts of weights that are opened on one device, and concatenated there."""

    def __init__(self, parts: list[SealedWeight], dim: int = 0) -> None:
        self._parts = parts
        self._dim = dim

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Open all parts on a device, and concatenate them."""
        import torch

        return torch.cat([part.to(device, dtype) for part in self._parts], dim=self._dim)
