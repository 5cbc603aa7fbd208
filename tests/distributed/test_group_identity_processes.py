"""Four processes on gloo, whose rendezvous is an attacker's: groups and runs that are wired crosswise are refused."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from helpers.lying_store import LyingStore
from helpers.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from fastrack import AuthenticationError, Key
from fastrack.distributed import SecureGroup, _link, _transport, init_process_group

pytestmark = pytest.mark.slow

KEY = Key.from_bytes(bytes(range(32)))
TIMEOUT = 60  # seconds, of an operation
IN_TIME = 40  # seconds, on a busy machine: not the timeout
HANDSHAKE = {32}  # bytes of a message before the first of data: random bytes, and MACs


class Sizes(list):
    """The sizes of all messages that this process sends from now on."""

    def __init__(self):
        send = _transport.PointToPoint.send
        _transport.PointToPoint.send = lambda transport, data, target: (
            self.append(data.numel()) or send(transport, data, target)
        )


def begin(folder):
    """Return the rank of this process and a store for all four, in the place of the group that started them."""
    rank = dist.get_rank()
    name = [os.urandom(8).hex()]  # of its own: ranks that are started once more would find counts in an old store
    dist.broadcast_object_list(name)
    dist.destroy_process_group()
    return rank, dist.FileStore(f"{folder}/{name[0]}", 4)


def meet(store, name):
    """Wait for all four processes, whatever became of their groups."""
    if store.add(name, 1) == 4:
        store.set(f"{name} by all", "")
    store.wait([f"{name} by all"])


def sum_of(rank, group=None):
    tensor = torch.full((4,), 10.0**rank)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def refused(action):
    """Require that an action is refused at once, and that nothing but the start of a group is sent meanwhile."""
    sizes, began = Sizes(), time.monotonic()
    with pytest.raises(AuthenticationError, match="group or run="):
        action()
    assert time.monotonic() - began < IN_TIME
    assert set(sizes) == HANDSHAKE


def cross_groups(folder):
    rank, inner = begin(folder)
    store = LyingStore(inner, rank % 2)
    init_process_group(KEY, store=store, rank=rank, world_size=4, timeout=TIMEOUT)
    derived = []
    make = _link.GroupSession
    _link.GroupSession = lambda *given: derived.append(given[-1]) or make(*given)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pair = [rank - rank % 2, rank - rank % 2 + 1]
    apart = dist.new_group(pair, use_local_synchronization=True)
    with SecureGroup(KEY, apart) as own:
        assert [sum_of(rank, group) for group in (mesh.get_group("tp"), apart)] == [[11, 11, 1100, 1100][rank]] * 2
        assert own.broadcast(torch.tensor([rank]), 0).item() == pair[0]
    # Of the next mesh torch makes the groups of 0 and 1, and of 2 and 3, by these names, which the store sees.
    mine, others = ("0//7/", "0//8/")[:: 1 if rank < 2 else -1]
    store.crossed = {mine: others}
    refused(lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    assert store.lies
    assert derived == [dist.group.WORLD.session] * 6
    meet(inner, "refused")

    dist.destroy_process_group()
    store.crossed = {}
    init_process_group(KEY, store=store, rank=rank, world_size=4, timeout=TIMEOUT)  # once more, in the same store
    assert sum_of(rank) == 1111
    meet(inner, "ended")
    dist.destroy_process_group()


def cross_runs(folder):
    number, inner = begin(folder)
    run, rank = divmod(number, 2)
    os.environ["TORCHELASTIC_RUN_ID"] = f"run-{run}"
    mine, others = ("run-0/", "run-1/")[:: 1 if run == 0 else -1]
    store = LyingStore(inner, rank, {mine: others})
    started = {"store": dist.PrefixStore(mine, store), "rank": rank, "world_size": 2, "timeout": TIMEOUT}
    refused(lambda: init_process_group(KEY, **started))
    assert store.lies
    assert not dist.is_initialized()
    meet(inner, "refused")

    store.crossed = {}
    dist.distributed_c10d._world.group_count = 0
    init_process_group(KEY, **started)
    assert sum_of(number) == [11, 11, 1100, 1100][number]
    meet(inner, "ended")
    dist.destroy_process_group()


@pytest.mark.nightly
def test_groups_of_a_run_and_runs_of_a_key_that_are_wired_crosswise_are_refused(tmp_path):
    run_ranks((4, cross_groups, tmp_path), (4, cross_runs, tmp_path))
