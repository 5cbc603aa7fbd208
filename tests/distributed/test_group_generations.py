"""A group that loses a member forms again with fewer or other ranks, and takes no message of the old group."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from helpers.network import Network, on_ranks
from helpers.ranks import run_ranks

from fastrack import AuthenticationError, Key
from fastrack.distributed import SecureGroup
from fastrack.errors import GrantError
from fastrack.grants import Grants, Identity, Signer

KEY = Key.from_bytes(bytes(range(32)))
COUNT = 100


def step(group):
    """Do operations whose messages have one size in groups of any size, and one whose messages differ."""
    tensor = torch.full((COUNT,), group.rank + 1.0)
    group.broadcast(tensor, 0)
    group.all_gather(torch.empty(group.size * COUNT), tensor)
    return group.all_reduce(tensor).sum().item()


class Replay:
    """A network's `tamper` that puts an old message in the place of message number `victim`, of its way and size."""

    def __init__(self, old, victim):
        self.old = old
        self.victim = victim
        self.target = None  # the rank that got an old message

    def __call__(self, number, source, target, data):
        if number == self.victim:
            for at, to, other in self.old:
                if (at, to, len(other)) == (source, target, len(data)) and other != data:
                    self.target = target
                    return [(source, target, other)]
        return [(source, target, data)]


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_no_message_of_the_old_group_is_accepted_at_any_place(size):
    old = Network(4)
    assert on_ranks(old, KEY, step) == [4 * COUNT] * 4
    new = Network(size)
    assert on_ranks(new, KEY, step) == [size * COUNT] * size
    replaced = 0
    for victim in range(len(new.sent)):
        replay = Replay(old.sent, victim)
        results = on_ranks(Network(size, replay), KEY, step, timeout=5)
        if replay.target is not None:
            replaced += 1
            assert isinstance(results[replay.target], AuthenticationError), victim
        # Others have no error where the message was a confirmation of the last operation, which they had already.
        assert {result for result in results if not isinstance(result, AuthenticationError)} <= {size * COUNT}
    assert replaced >= 0.7 * len(new.sent)  # the shards of all_reduce have another size than in the old group


class NotGranted:
    """A provider that has the key by grants for another."""

    def get_key(self, key_id):
        return None

    def get_sealing_key(self):
        grants = Grants.issue(KEY, [Identity.generate().recipient], signer=Signer.generate())
        return grants.unlock(Identity.generate()).first


def form_again(folder):
    """Go on as three ranks after the fourth has gone."""
    rank = dist.get_rank()
    began = time.monotonic()
    # A machine that was not granted ends with its own error, and the others at once with theirs.
    with pytest.raises(GrantError if rank == 3 else AuthenticationError):
        SecureGroup(NotGranted() if rank == 3 else KEY, timeout=60)
    assert time.monotonic() - began < 20
    dist.barrier()
    group = SecureGroup(KEY, timeout=60)
    assert group.all_reduce(torch.ones(3)).tolist() == [4, 4, 4]
    if rank == 3:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(AuthenticationError, match="start the ranks again"):
        group.all_reduce(torch.ones(3))
    assert time.monotonic() - began < 20  # as the connection is lost, not after the timeout
    group.close()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=3)
    with SecureGroup(KEY) as group:
        assert group.all_reduce(torch.ones(3)).tolist() == [3, 3, 3]
        dist.barrier()


@pytest.mark.nightly
def test_the_others_notice_a_lost_member_at_once_and_form_a_group_in_their_processes(tmp_path):
    run_ranks((4, form_again, tmp_path))
