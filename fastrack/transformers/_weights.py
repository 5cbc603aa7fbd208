"""Weights that are opened when transformers asks for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastrack._devices import canonical
from fastrack._keys.keyring import KeyRing
from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes
from fastrack._transfer.api import to_device

if TYPE_CHECKING:
    import torch


def lazy_weights(tensors: Mapping[str, SealedTensor], keys: KeyRing) -> dict[str, SealedWeight]:
    """Return what stands for the state dict of a model."""
    opener = _Opener(keys)
    return {name: SealedWeight(tensor, opener) for name, tensor in tensors.items()}


class SealedWeight:
    """A sealed tensor or a part of one, as transformers expects the slices of safetensors.

    ``weight[...]`` and ``weight[:, 2:4]`` open nothing yet; `to` opens it on its device.
    """

    def __init__(self, handle: SealedTensor | SealedRows, opener: _Opener) -> None:
        self._handle = handle
        self._opener = opener

    @property
    def shape(self) -> tuple[int, ...]:
        return dtypes.torch_shape(self._handle.dtype, self._handle.shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = dtypes.to_torch(self._handle.dtype)
        return dtype

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of safetensors does."""
        return list(self._handle.shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype, as a slice of safetensors does."""
        return self._handle.dtype

    def is_floating_point(self) -> bool:
        """Return True if the dtype is one of floating point."""
        return self.dtype.is_floating_point

    def __getitem__(self, index: Any) -> SealedWeight:
        if index is Ellipsis:
            return self
        assert isinstance(self._handle, SealedTensor)
        return SealedWeight(self._handle[index], self._opener)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Open it on a device, and convert it there."""
        name = canonical(f"cuda:{device}" if isinstance(device, int) else device)
        if dtype is None or dtype == self.dtype or name != "cpu":
            opened = self._opener.open(self._handle, name)
            return opened if dtype is None else opened.to(dtype)
        return self._opener.open_converted(self._handle, dtype)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        import torch

        if function is not torch.cat:
            raise TypeError(f"{function}: expected opened tensors, got sealed ones. Call their method to(device) first")
        return Concatenation(*args, **(kwargs or {}))


class _Opener:
    """The keys of a model's weights, and the memory in which each thread opens those that it then converts."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys
        self._local = threading.local()

    def open(self, handle: SealedTensor | SealedRows, device: str) -> torch.Tensor:
        opened: torch.Tensor = to_device(handle, device, keys=self._keys, framework="torch")
        return opened

    def open_converted(self, handle: SealedTensor | SealedRows, dtype: torch.dtype) -> torch.Tensor:
        """Open it in host memory, and convert it: where others were opened, as fresh memory takes longer than that."""
        import torch

        opened = arrays.from_bytes(self._memory(handle.nbytes), handle.dtype, handle.shape, "torch")
        to_device(handle, "cpu", keys=self._keys, out=opened)
        memory = arrays.empty_bytes(opened.numel() * dtype.itemsize)  # in huge pages
        converted: torch.Tensor = torch.from_numpy(memory).view(dtype).reshape(opened.shape)
        return converted.copy_(opened)

    def _memory(self, size: int) -> Bytes:
        memory: Bytes | None = getattr(self._local, "memory", None)
        if memory is None or memory.size < size:
            memory = self._local.memory = arrays.empty_bytes(size)
        return memory[:size]


class Concatenation:
    """Parts of weights that are opened on one device, and concatenated there."""

    def __init__(self, parts: list[SealedWeight], dim: int = 0) -> None:
        self._parts = parts
        self._dim = dim

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Open all parts on a device, and concatenate them."""
        import torch

        return torch.cat([part.to(device, dtype) for part in self._parts], dim=self._dim)
