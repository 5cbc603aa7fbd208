"""Parts of blocks in vLLM's caches, beside memory that a block is sealed from or opened into."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from vllm.distributed import get_tp_group

from fastrack._tensors.arrays import Bytes, empty_bytes
from fastrack.errors import DeviceError


class BlockMemory:
    """Memory for one block, of all layers, which is used again for the next."""

    def __init__(self) -> None:
        self._memory: Bytes = empty_bytes(0)

    def pairs(
        self, caches: Iterable[torch.Tensor], place: int
    ) -> tuple[Bytes, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return memory for a block, and its parts beside those of the caches, which have blocks in dimension 0."""
        pieces = [cache[place] for cache in caches]
        if any(piece.device.type != "cpu" for piece in pieces):
            raise DeviceError(
                "SealedConnector: expected a KV cache in host memory, got one on a GPU, whose blocks it would bring "
                "there unencrypted. Use fastrack.kv.lmcache for blocks that are in host memory already"
            )
        ends = list(itertools.accumulate(piece.nbytes for piece in pieces))
        if self._memory.size < ends[-1]:
            self._memory = empty_bytes(ends[-1])
        memory = self._memory[: ends[-1]]
        parts = [torch.from_numpy(memory[end - piece.nbytes : end]) for end, piece in zip(ends, pieces, strict=True)]
        views = [part.view(piece.dtype).view(piece.shape) for part, piece in zip(parts, pieces, strict=True)]
        return memory, list(zip(views, pieces, strict=True))


def agree(is_whole: bool) -> bool:
    """Return whether all ranks loaded their blocks: what one computes depends on the others."""
    flag = torch.tensor(int(is_whole))
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, get_tp_group().cpu_group)
    return bool(flag)
