"""DTensors: the local part of a tensor, and its position in the whole."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_sharded(tensor: object) -> bool:
    """Return True for a DTensor. Imports nothing."""
    kind: Any = type(tensor)
    return _is_dtensor(kind)


@lru_cache
def _is_dtensor(kind: type) -> bool:
    return issubclass(kind, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local_part(tensor: Any) -> torch.Tensor:
    """Return the local part of a tensor, detached and without a copy; the whole tensor if it is no DTensor."""
    import torch

    part: torch.Tensor = tensor
    if is_sharded(tensor):
        with torch.no_grad():
            part = tensor.to_local()
    return part.detach()


def sharding_problem(tensor: Any) -> str | None:
    """Return the reason why the local part of a DTensor is not one box of the whole, or None."""
    mesh, problem = tensor.device_mesh, None
    if mesh.get_coordinate() is None:
        return "expected a tensor of a device mesh that this process belongs to"
    for number, placement in enumerate(tensor.placements):
        if placement.is_partial():
            problem = "expected a tensor that is sharded or replicated, got partial sums. Redistribute it first"
        elif hasattr(placement, "split_factor"):  # strided: FSDP on top of tensor parallelism
            later = range(number + 1, mesh.ndim)
            parts = math.prod(mesh.size(other) for other in later if tensor.placements[other].is_shard(placement.dim))
            if placement.split_factor != parts or tensor.shape[placement.dim] % (mesh.size(number) * parts):
                problem = f"expected shards that are one range of rows each, got {placement}. Redistribute it first"
    return problem


def named_part(tensor: Any, name: str) -> tuple[torch.Tensor, str]:
    """Return the local part of a DTensor, and its name: the name of the whole with the position of the part."""
    if (problem := sharding_problem(tensor)) is not None:
        raise ValueError(f"{name!r:.200}: {problem}")
    position = ", ".join(f"{start}:{start + size}" for start, size in zip(*local_box(tensor), strict=True))
    return local_part(tensor), f"{name}[{position}]"


def local_box(tensor: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Return offsets and sizes of the local part of a DTensor."""
    [chunk] = tensor.__create_chunk_list__()  # DTensor's protocol for checkpoints
    return chunk.offsets, chunk.sizes
