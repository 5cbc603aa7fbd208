"""Tensors to write, described before their bytes are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastrack._files.reader import SealedFile
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """Dtype and shape of a plain tensor, and access to its bytes.

    `load` may be slow and take memory. It returns a function that returns the bytes from a start to a stop, both
    multiples of 16 KiB. All bytes are read, in order. Where `push` is given it is called instead, with a
    function that it calls with all bytes in order, in slabs of the writer's size, the last of which may be shorter.
    """

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Callable[[int, int], Bytes]]
    push: Callable[[Callable[[Bytes], None]], None] | None = None

    @classmethod
    def of(cls, array: Any) -> PlainTensor:
        """Describe an array in memory, which may be mapped."""
        dtype, shape = arrays.dtype_and_shape(array)
        if getattr(array, "is_meta", False):
            raise TypeError("expected a tensor with values, got one on the device meta. Load or make them")
        return cls(dtype, shape, lambda: arrays.reader(array))

    @classmethod
    def stored(cls, file: SealedFile, name: str) -> PlainTensor:
        """Describe a tensor by its stored dtype and shape."""
        dtype, shape, _, _ = file.describe(name)
        return cls(dtype, shape, lambda: arrays.reader(file.stored(name)[2]))

    @property
    def nbytes(self) -> int:
        return dtypes.nbytes(self.dtype, self.shape)
