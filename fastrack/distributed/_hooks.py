"""Sealed gradients and weights for `DistributedDataParallel` and FSDP2."""

# No `from __future__ import annotations`: torch compares the annotations of a hook with types.

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from fastrack.distributed._group import SecureGroup
from fastrack.distributed._operation import Reduction


def sealed_allreduce(group: SecureGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks of a group, for `DistributedDataParallel.register_comm_hook`.

    It divides each gradient by the number of ranks and adds the quotients, as torch does without a hook. While one
    bucket is on its way, the backward pass fills the next. It composes with torch's ``bf16_compress_wrapper``.

    Parameters
    ----------
    group : SecureGroup
        Group with the ranks of the model's process group.
    bucket : torch.distributed.GradBucket
        Gradients, in host memory or on a GPU.

    Returns
    -------
    torch.futures.Future
        Averaged gradients. Its error ends the backward pass; torch makes it a `RuntimeError` that names the
        `AuthenticationError`.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> import fastrack
    >>> from fastrack.distributed import SecureGroup, sealed_allreduce
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> group = SecureGroup(fastrack.Key.generate())
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> model.register_comm_hook(group, sealed_allreduce)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> model.module.weight.grad
    tensor([[1., 1.]])
    >>> group.close()
    >>> dist.destroy_process_group()
    """
    buffer = bucket.buffer()
    buffer.div_(group.size)
    future: torch.futures.Future[torch.Tensor] = group.all_reduce(buffer, async_op=True)
    return future.then(lambda done: done.value())  # the reducer takes the exception of another future for its result


def seal_fsdp(model: nn.Module, group: SecureGroup) -> None:
    """Send the weights and gradients of a model that was sharded by `fully_shard` sealed alone.

    Parameters
    ----------
    model : torch.nn.Module
        Model to whose modules `fully_shard` was applied, on one dimension of ranks.
    group : SecureGroup
        Group with the ranks of the model's mesh.

    Raises
    ------
    ValueError
        If no module was sharded, or one over other ranks than those of the group, or over a mesh of several dimensions:
        HSDP and tensor parallelism also have collectives of their own, which would not be sealed.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> from torch.distributed.fsdp import fully_shard
    >>> import fastrack
    >>> from fastrack.distributed import SecureGroup, seal_fsdp
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    >>> model = fully_shard(torch.nn.Linear(2, 1), mesh=mesh)
    >>> group = SecureGroup(fastrack.Key.generate())
    >>> seal_fsdp(model, group)
    >>> model(torch.ones(1, 2)).shape
    torch.Size([1, 1])
    >>> group.close()
    >>> dist.destroy_process_group()
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("sealing FSDP: expected a module that fully_shard was applied to, got none. Apply it first")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            _require_mesh(name, parameter.device_mesh, group)
    for module in modules:
        module.set_custom_all_gather(_SealedAllGather(group))
        module.set_custom_reduce_scatter(_SealedReduceScatter(group))


def _require_mesh(name: str, mesh: DeviceMesh, group: SecureGroup) -> None:
    if mesh.ndim != 1:
        raise ValueError(
            f"sealing FSDP, parameter {name!r:.200}: expected a mesh of one dimension, got {mesh.ndim}. Collectives of "
            "HSDP and of tensor parallelism would not be sealed: shard over all ranks in one dimension"
        )
    if mesh.mesh.tolist() != group.ranks:
        raise ValueError(
            f"sealing FSDP, parameter {name!r:.200}: expected a mesh of the ranks {group.ranks} of the group, got "
            f"{mesh.mesh.tolist()}. Make a SecureGroup on the process group of the mesh"
        )


class _Sealed:
    """A collective of FSDP2 on a group."""

    def __init__(self, group: SecureGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _require_ranks(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        if ranks != self._group.ranks:
            raise ValueError(
                f"sealing FSDP: expected a mesh of the ranks {self._group.ranks} of the group, got {ranks}. Make a "
                "SecureGroup on the process group of the mesh"
            )


class _SealedAllGather(_Sealed, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        self._require_ranks(group)
        self._group.all_gather(output_tensor, input_tensor)


class _SealedReduceScatter(_Sealed, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._require_ranks(group)
        self._group.reduce_scatter(output_tensor, input_tensor, _reduction(op))


def _reduction(op: Any) -> Reduction:
    if op == dist.ReduceOp.AVG:
        return "mean"
    if op == dist.ReduceOp.SUM:
        return "sum"
    raise ValueError(f"sealing FSDP: expected ReduceOp.AVG or SUM, got {op}. Do not set a divide factor of your own")
