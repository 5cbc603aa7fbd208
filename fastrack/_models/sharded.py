"""Write DTensors, each process with its own part, into one sealed file, and select the part of a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.writer import write_sealed
from fastrack._keys.keyring import KeyLike, sealing_key
from fastrack._sealed.contexts import Kind
from fastrack._sealed.tensor import SealedRows, SealedTensor, require_whole_bytes, restore_box
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes
from fastrack._tensors.sharded import is_sharded
from fastrack._util.locations import locate

_DONE, _FAILED = -1, -2


def save_gathered(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    key: KeyLike | None,
    *,
    metadata: Mapping[str, str] | None = None,
    kind: Kind = "tensor",
) -> None:
    """Seal tensors into a file, like `save_file`, with DTensors gathered one at a time. All processes call this.

    The process of rank 0 writes. If it fails, the others raise RuntimeError.
    """
    import torch.distributed as dist

    sharded = [tensor for tensor in tensors.values() if is_sharded(tensor)]
    if dist.get_rank() != 0:
        while (number := _broadcast()) >= 0:
            _gather(sharded[number])
        if number == _FAILED:
            raise RuntimeError(f"{os.fspath(path)}: saving failed in the process of rank 0, whose error says why")
        return
    outcome = _FAILED
    try:
        described = {name: PlainTensor.of(tensor) for name, tensor in tensors.items() if not is_sharded(tensor)}
        numbers = iter(range(len(sharded)))
        for name, tensor in tensors.items():
            if is_sharded(tensor):
                described[name] = _plain_tensor(tensor, next(numbers))
        write_sealed(described, locate(path), sealing_key(key), frozenset(), metadata or {}, None, kind=kind)
        outcome = _DONE
    finally:
        _broadcast(outcome)


def _plain_tensor(tensor: Any, number: int) -> PlainTensor:
    def load() -> Callable[[int, int], Bytes]:
        _broadcast(number)
        return arrays.reader(_gather(tensor))

    dtype = dtypes.from_torch(tensor.dtype)
    return PlainTensor(dtype, dtypes.shape_of_torch(dtype, tensor.shape), load)


def _broadcast(number: int = 0) -> int:
    """Return the `number` of rank 0 in every process: the next tensor to gather, or an outcome."""
    import torch
    import torch.distributed as dist

    message = torch.tensor([number])
    dist.broadcast(message, 0)
    return int(message)


def _gather(tensor: Any) -> Any:
    import torch

    with torch.no_grad():
        return tensor.full_tensor()


def select_box(tensor: SealedTensor, offsets: Sequence[int], sizes: Sequence[int]) -> SealedTensor | SealedRows:
    """Return a handle on the box of a tensor at `offsets` with the shape `sizes`, or the tensor if this is all of it.

    Raise IndexError if the box is not inside the tensor, and TypeError for elements smaller than a byte.
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
    require_whole_bytes(tensor)
    return restore_box(tensor, offsets, sizes, sizes)
