"""Boxes of sealed tensors: a range of indices of each dimension, such as a shard."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastrack._sealed.indexing import EvenRanges
from fastrack._sealed.tensor import SealedRows, SealedTensor, TensorSlice
from fastrack._tensors import dtypes
from fastrack._util.pickles import unpickle
from fastrack._util.shown import shown


def select_box(tensor: SealedTensor, offsets: Sequence[int], sizes: Sequence[int]) -> SealedTensor | SealedRows:
    """Return the part of a tensor from `offsets` on that has the shape `sizes`: a handle, or the tensor if it is all.

    Raise IndexError if the box is not inside the tensor, and TypeError if elements of less than a byte are cut.
    """
    offsets, sizes = tuple(offsets), tuple(sizes)
    shape = tensor.shape
    if not len(offsets) == len(sizes) == len(shape) or not all(
        0 <= offset <= offset + size <= extent for offset, size, extent in zip(offsets, sizes, shape, strict=True)
    ):
        raise IndexError(
            f"part of tensor {tensor.name!r:.200}: expected one inside {list(shape)}, got {list(sizes)} at "
            f"{list(offsets)}. Shard it by its own shape"
        )
    if sizes == shape:
        return tensor
    _require_whole_bytes(tensor)
    return TensorBox(tensor, offsets, sizes)


def select_slices(tensor: SealedTensor, index: tuple[Any, ...]) -> SealedRows:
    """Return the part of a tensor that an index of integers and slices of step 1 selects, as NumPy does.

    Raise IndexError if it does not fit the tensor, and TypeError for what else NumPy takes as an index.
    """
    count = sum(each is Ellipsis for each in index)
    missing = len(tensor.shape) - len(index) + count
    if count > 1 or missing < 0:
        raise IndexError(
            f"index of tensor {tensor.name!r:.200}: expected at most {len(tensor.shape)} dimensions, and ... once, got "
            f"{shown(index, 100)}"
        )
    place = next((number for number, each in enumerate(index) if each is Ellipsis), len(index))
    whole = (slice(None),) * missing
    ranges, kept = [], []
    for each, extent in zip(index[:place] + whole + index[place + 1 :], tensor.shape, strict=True):
        if isinstance(each, slice):
            start, stop, step = each.indices(extent)
            if step != 1:
                raise TypeError(f"index of tensor {tensor.name!r:.200}: expected slices of step 1, got {shown(each)}")
            ranges.append((start, max(stop - start, 0)))
            kept.append(ranges[-1][1])
            continue
        if isinstance(each, bool) or not hasattr(each, "__index__") or getattr(each, "shape", ()) != ():
            raise TypeError(f"index of tensor {tensor.name!r:.200}: expected integers and slices, got {shown(each)}")
        row = operator.index(each)
        if not -extent <= row < extent:
            raise IndexError(f"index {row} of tensor {tensor.name!r:.200} is out of range: {extent} are there")
        ranges.append((row % extent, 1))
    offsets, sizes = tuple(offset for offset, _ in ranges), tuple(size for _, size in ranges)
    _require_whole_bytes(tensor)
    return TensorBox(tensor, offsets, sizes, tuple(kept))


def _require_whole_bytes(tensor: SealedTensor) -> None:
    if dtypes.BITS[tensor.dtype] % 8:
        raise TypeError(
            f"part of tensor {tensor.name!r:.200}: expected elements of whole bytes, got {tensor.dtype}. Open it whole"
        )


@dataclass(frozen=True, slots=True)
class _Box:
    """Offsets and sizes of a box in a tensor of some shape, of elements of `itemsize` bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int

    def ranges(self) -> EvenRanges:
        """Return the byte ranges of the box, each as long as its bytes follow one another in the tensor."""
        if 0 in self.sizes:
            return EvenRanges(np.empty(0, np.int64), 0, 0)
        inner = len(self.shape)  # dimensions from this on are one range
        while inner and self.sizes[inner - 1] == self.shape[inner - 1]:
            inner -= 1
        inner = max(inner - 1, 0)
        starts = np.zeros(1, np.int64)
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            stride = math.prod(self.shape[dimension + 1 :]) * self.itemsize
            indices = np.arange(offset, offset + size) if dimension < inner else np.array([offset])
            starts = (starts[:, None] + indices * stride).reshape(-1)
        return EvenRanges(starts, 1, math.prod(self.sizes[inner:]) * self.itemsize)


class TensorBox(SealedRows):
    """Handle on a box of one sealed tensor. Its shape is `sizes`, or another of as many elements."""

    __slots__ = ("_box", "_shape", "_tensor")

    def __init__(
        self,
        tensor: SealedTensor,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.name = tensor.name
        self.dtype = tensor.dtype
        self.key_id = tensor.key_id
        self._tensor = tensor
        self._box = _Box(offsets, sizes, tensor.shape, dtypes.BITS[tensor.dtype] // 8)
        self._shape = sizes if shape is None else shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def slices(self) -> Sequence[TensorSlice]:
        return (TensorSlice(self._tensor, self._box.ranges),)

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("TensorBox", self._tensor, self._box.offsets, self._box.sizes, self._shape)
