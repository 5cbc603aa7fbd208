"""Sealed collectives, DDP and FSDP2 among processes, on gloo: bit for bit what plain training gives."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastrack import AuthenticationError, ClosedError, Key
from fastrack.distributed import SecureGroup, init_process_group

pytestmark = pytest.mark.slow

KEY = Key.from_bytes(bytes(range(32)))


def model():
    torch.manual_seed(5)
    inner = nn.Sequential(nn.Linear(300, 200), nn.Tanh())
    return nn.Sequential(nn.Linear(64, 300), nn.Tanh(), inner, nn.Linear(200, 10))


def train(module, rank, steps):
    """Return the weights after some steps, each rank on data of its own."""
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    return [getattr(weight, "to_local", weight.detach)().detach() for weight in module.parameters()]


def added_in_rank_order(_, bucket):
    """Average without sealing what a sealed group averages, in the same order."""
    buffer = bucket.buffer().mul_(1 / dist.get_world_size())
    parts = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, buffer)
    buffer.copy_(parts[0])
    for part in parts[1:]:
        buffer.add_(part)
    future = torch.futures.Future()
    future.set_result(buffer)
    return future


def equal(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def ddp(rank, steps, hook=None):
    module = DistributedDataParallel(model(), bucket_cap_mb=0.2)  # several buckets
    if hook is not None:
        module.register_comm_hook(None, hook)
    return train(module, rank, steps)


def check_ddp(folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = ddp(rank, 10, added_in_rank_order)
    plain = ddp(rank, 5)
    dist.destroy_process_group()
    init_process_group(KEY, init_method=f"file://{folder}/sealed", rank=rank, world_size=size)
    assert equal(ddp(rank, 10), expected)
    if size == 2:
        assert equal(ddp(rank, 5), plain)
        compressed = bf16_compress_wrapper(allreduce_hook)
        compressed.__name__ = "compressed"  # under its own name torch wants a GPU for it
        ddp(rank, 2, compressed)


def sharded():
    module = model()
    for part in (module[0], module[2][0], module[2], module):
        fully_shard(part)
    return module


def check_training(folder):
    rank = dist.get_rank()
    expected = train(sharded(), rank, 20)
    check_ddp(folder)
    assert equal(train(sharded(), rank, 20), expected)


def test_ddp_and_fsdp_end_with_the_weights_of_plain_training(tmp_path):
    run_ranks((2, check_training, tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("size", [3, 4])
def test_ddp_of_more_ranks_ends_with_the_weights_of_plain_training(tmp_path, size):
    run_ranks((size, check_ddp, tmp_path))


def check_failures():
    rank = dist.get_rank()
    group = SecureGroup(KEY, timeout=4)
    tensor = torch.ones(5000)
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(AuthenticationError):
            group.all_reduce(tensor)  # without the others
        assert time.monotonic() - began < 30
        assert not tensor.any()
    dist.barrier()
    group.close()

    group = SecureGroup(KEY)
    dist.barrier()
    if rank == 1:
        child = os.fork()
        if child == 0:
            group.close()
            del group  # does not wait for threads that are the parent's
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert group.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]  # after what a child did to its copy
    group.close()

    init_process_group(KEY, timeout=60)
    module = DistributedDataParallel(model())
    if rank == 0:  # as after a chunk that was altered
        dist.group.WORLD._group._link.transport.close()
    with pytest.raises(RuntimeError, match="AuthenticationError"):
        train(module, rank, 1)
    with pytest.raises(ClosedError):
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.nightly
def test_a_failure_of_one_rank_is_one_of_all():
    run_ranks((2, check_failures))
