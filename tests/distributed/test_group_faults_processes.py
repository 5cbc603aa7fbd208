"""A hostile network between processes, below DDP and FSDP2: every rank raises in time."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.tampered_transport import TamperedTransport
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastrack import AuthenticationError, ClosedError, Key
from fastrack.distributed import _messages, _process_group, init_process_group
from fastrack.distributed._transport import PointToPoint

KEY = Key.from_bytes(bytes(range(32)))
KINDS = ("flip", "repeat", "swap", "drop")
TIMEOUT = 3  # seconds, of an operation
CONNECT = 30  # seconds, for ranks that a busy machine lets come late
IN_TIME = 60  # seconds, on a busy machine


def check_all(folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    name = [os.urandom(8).hex()]  # of its own: ranks that are started once more would find counts in an old store
    dist.broadcast_object_list(name)
    dist.destroy_process_group()
    _messages.SLAB_CHUNKS = 2
    store = dist.FileStore(f"{folder}/{name[0]}", size)
    for kind in KINDS if size > 2 else ("flip", "drop"):  # the rest is for the night
        check_every_rank_raises(rank, size, kind, ddp, store)
        if size > 2 or kind == "flip":
            check_every_rank_raises(rank, size, kind, fsdp, store)
    if size > 2:  # An all-gather sends all others the same, so that an exchange between them does no harm.
        check_every_rank_raises(rank, size, "misroute", ddp, store)


def check_every_rank_raises(rank, size, kind, wrap, store):
    """Have the second slab of the last rank's first message of gradients or weights tampered with."""

    _process_group.PointToPoint = lambda store, own, ranks, _, name: TamperedTransport(
        PointToPoint(store, own, ranks, CONNECT, name), kind
    )
    init_process_group(KEY, timeout=TIMEOUT, store=store, rank=rank, world_size=size)
    module = wrap()
    if rank == size - 1:
        dist.group.WORLD._group._link.transport.aim(size - 1)
    began = time.monotonic()
    with pytest.raises((RuntimeError, AuthenticationError)) as raised:
        module(torch.randn(4, 64)).sum().backward()
    assert "AuthenticationError" in repr(raised.value), (kind, wrap)  # DDP's RuntimeError names it
    assert time.monotonic() - began < IN_TIME
    with pytest.raises(ClosedError):
        dist.all_reduce(torch.ones(3))
    meet(store, size, f"{kind} {wrap.__name__} ended")
    dist.destroy_process_group()


def meet(store, size, name):
    """Wait for all ranks, whose group has ended."""
    if store.add(name, 1) == size:
        store.set(f"{name} by all", "")
    store.wait([f"{name} by all"])


def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 3000), nn.Tanh(), nn.Linear(3000, 100))


def ddp():
    return DistributedDataParallel(model(), bucket_cap_mb=0.2)


def fsdp():
    return fully_shard(model())


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_raises_in_time(size, tmp_path):
    run_ranks((size, check_all, tmp_path), timeout=300)
