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

    Attributes
    ----------
    value : SealedTensor, SealedRows or array
        The tensor.
    framework : {"torch", "numpy", "cupy"} or None
        Of a plain tensor, the framework that it came from.
    dtype : str
        The dtype, as safetensors calls it.
    shape : tuple of int
        The shape.
    restore : callable or None
        Return an array made of `value` with the order of dimensions and the subclass that the tensor had, or None if
        there is nothing to restore.
    """

    value: Any
    framework: Framework | None
    dtype: str
    shape: tuple[int, ...]
    restore: Callable[[Any], Any] | None = None

    @classmethod
    def of(cls, value: Any, *, in_memory_order: bool) -> Self | None:
        """Return the description of a tensor, or None if the value is no tensor of numbers.

        Parameters
        ----------
        value : object
            A leaf of a pytree.
        in_memory_order : bool
            Take the dimensions of torch tensors in the order of their memory.

        Raises
        ------
        TypeError
            If the value is a tensor that cannot be moved, as one that is sparse, nested or of complex128.
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
