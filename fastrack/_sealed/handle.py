"""The methods that sealed tensors and handles on their rows have in common with arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, TypeVar, Unpack, overload

from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._tensors.arrays import Array, Framework
from fastrack._util.public import explained
from fastrack._util.registry import METHODS, find

if TYPE_CHECKING:
    import torch

Out = TypeVar("Out")


class Options(TypedDict, total=False):
    """Options of calls that open tensors, with which the type of the result does not change."""

    keys: KeySource | None
    non_blocking: bool
    dtype: object


NOT_OPEN = "which is sealed. Open it with to_device or unseal"


class Handle:
    """Methods of `SealedTensor` and `SealedRows`."""

    __slots__ = ()

    _own_keys: KeyRing | None = None
    """Keys that the dataset of the handle was given in this process, for calls without `keys`."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @overload
    def size(self) -> tuple[int, ...]: ...
    @overload
    def size(self, dim: int) -> int: ...
    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Return the shape, or the extent of one dimension, like `torch.Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements, like `torch.Tensor.numel`."""
        return math.prod(self.shape)

    @overload
    def to(
        self, device: object = None, *, framework: Literal["torch"] | None = None, **options: Unpack[Options]
    ) -> torch.Tensor: ...
    @overload
    def to(self, device: object = None, *, framework: Literal["numpy"], **options: Unpack[Options]) -> Array: ...
    @overload
    def to(self, device: object = None, *, framework: Framework | None = None, **options: Unpack[Options]) -> Any: ...
    @overload
    def to(self, device: object = None, *, framework: None = None, out: Out, **options: Unpack[Options]) -> Out: ...
    @explained
    def to(
        self,
        device: object = None,
        *,
        keys: KeySource | None = None,
        framework: Framework | None = None,
        out: Any = None,
        non_blocking: bool = False,
        dtype: object = None,
    ) -> Any:
        """Open the tensor, like `fastrack.to_device`."""
        options = {"keys": keys, "framework": framework, "out": out, "non_blocking": non_blocking, "dtype": dtype}
        return find(METHODS["to"])(self, device, **options)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"len(): expected one dimension or more, got {self!r}, {NOT_OPEN}")
        return self.shape[0]

    def __array__(self, *_: object, **__: object) -> NoReturn:
        """Refuse the conversion to an array of objects, which NumPy would attempt."""
        raise TypeError(f"expected an array, got {self!r}, {NOT_OPEN}")

    def __dlpack__(self, **_: object) -> NoReturn:
        """Refuse ``torch.tensor``, which would go on to convert each element."""
        raise TypeError(f"expected a tensor, got {self!r}, {NOT_OPEN}")

    __dlpack_device__ = __dlpack__

    def _refuse_arithmetic(self, *_: object) -> NoReturn:
        raise TypeError(
            f"arithmetic: expected a tensor or a number, got {self!r}, {NOT_OPEN}, or the batches of a loader with wrap"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse_arithmetic
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __add__
    __neg__ = __abs__ = __invert__ = __and__ = __or__ = __lt__ = __le__ = __gt__ = __ge__ = __add__
    __float__ = __int__ = __round__ = __add__

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        """Refuse to call a function of torch on a handle, for example in a module that gets a sealed batch."""
        values = [*args, *(kwargs or {}).values()]
        values += [part for value in values if isinstance(value, (list, tuple)) for part in value]
        handle = next((value for value in values if isinstance(value, cls)), cls.__name__)
        name = getattr(function, "__name__", "a function of torch")
        raise TypeError(f"{name}: expected a tensor, got {handle!r}, {NOT_OPEN}, or the batches of a loader with wrap")

    if not TYPE_CHECKING:  # with it, type checkers would accept misspelt names

        def __getattr__(self, name: str) -> NoReturn:
            """Raise `AttributeError` with advice, for example for other methods of arrays."""
            kind = next(base.__name__ for base in type(self).__mro__ if base.__module__ == "fastrack")
            message = f"{kind!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                message += ": it is sealed. Open it with to_device or unseal, and use the array that they return"
            raise AttributeError(message, name=name, obj=self)
