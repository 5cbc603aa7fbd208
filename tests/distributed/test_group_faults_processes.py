"""A hostile network between processes, below DDP and FSDP2: every rank raises in time."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.tampered_transport import TamperedTransport
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastrack import AuthenticationError, ClosedError, Key
from fastrack.distributed import SecureGroup, _messages, seal_fsdp, sealed_allreduce
from fastrack.distributed._transport import PointToPoint

KEY = Key.from_bytes(bytes(range(32)))
KINDS = ("flip", "repeat", "swap", "drop")
TIMEOUT = 3  # seconds
IN_TIME = 60  # seconds, on a busy machine


def start(rank, size, folder):
    torch.set_num_threads(1)
    _messages.SLAB_CHUNKS = 2
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    for kind in KINDS:
        check_every_rank_raises(rank, size, kind, train_ddp)
        if size > 2 or kind == "flip":  # the rest is for the night
            check_every_rank_raises(rank, size, kind, train_fsdp)
    if size > 2:  # An all-gather sends all others the same, so that an exchange between them does no harm.
        check_every_rank_raises(rank, size, "misroute", train_ddp)
    dist.barrier()
    dist.destroy_process_group()


def check_every_rank_raises(rank, size, kind, train):
    """Have the second slab of the last rank's first message of gradients or weights tampered with."""
    transport = PointToPoint(None, TIMEOUT)
    if rank == size - 1:
        transport = TamperedTransport(transport, kind, 3 * (size - 1))
    group = SecureGroup.over(transport, KEY, timeout=TIMEOUT)
    began = time.monotonic()
    with pytest.raises((RuntimeError, AuthenticationError)) as raised:
        train(group)
    assert "AuthenticationError" in repr(raised.value), (kind, train)  # DDP's RuntimeError names it
    assert time.monotonic() - began < IN_TIME
    with pytest.raises(ClosedError):
        group.all_reduce(torch.ones(3))
    dist.barrier()
    group.close()


def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 3000), nn.Tanh(), nn.Linear(3000, 100))


def train_ddp(group):
    module = DistributedDataParallel(model(), bucket_cap_mb=0.2)
    module.register_comm_hook(group, sealed_allreduce)
    module(torch.randn(4, 64)).sum().backward()


def train_fsdp(group):
    mesh = dist.device_mesh.init_device_mesh("cpu", (group.size,))
    module = fully_shard(model(), mesh=mesh)
    seal_fsdp(module, group)
    module(torch.randn(4, 64)).sum().backward()


@pytest.mark.parametrize(
    "size",
    [pytest.param(2, marks=pytest.mark.slow), *(pytest.param(size, marks=pytest.mark.nightly) for size in (3, 4))],
)
def test_every_rank_raises_in_time(size, tmp_path):
    mp.spawn(start, (size, str(tmp_path)), size)
