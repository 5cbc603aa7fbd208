"""A leaf of a pytree that is a tensor, described once, on entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Framework


@dataclass(slots=True)
class Leaf:
    """A tensor, sealed or plain, and what it is.

    `restore` gives an array made of `value` the order of dimensions and the subclass that the tensor had.
    """

    value: Any  # SealedTensor, SealedRows or array
    framework: Framework | None  # of a plain tensor
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    restore: Callable[[Any], Any] | None = None

    @classmethod
    def of(cls, value: Any, *, in_memory_order: bool) -> Self | None:
        """Return the description of a tensor, or None if the value is no tensor of numbers.

        With `in_memory_order` the dimensions of torch tensors are taken in the order of their memory. A tensor that
        cannot be moved, as one that is sparse, nested or of complex128, raises `TypeError`.
        """
        if isinstance(value, (SealedTensor, SealedRows)):
            return cls(value, None, value.dtype, value.shape)
        framework = arrays.framework_of(value)
        if framework is None or (framework == "numpy" and not dtypes.holds_numbers(value.dtype)):
            return None
        restore = None
        if in_memory_order and framework == "torch":
            value, restore = arrays.in_memory_order(value)
        dtype, shape = arrays.describe(value)
        return cls(value, framework, dtype, shape, restore)

    @property
    def name(self) -> str | None:
        """The name of a sealed tensor."""
        return self.value.name if isinstance(self.value, SealedTensor) else None
