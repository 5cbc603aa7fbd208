"""No two chunks are sealed with one key and nonce: whatever is started again, forked or restored from a checkpoint."""

import gc
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.forking import in_forked_child
from helpers.network import Network, on_ranks
from helpers.nonces import Recorder

from fastrack import ClosedError, Key
from fastrack.distributed import SecureGroup, _link, _session

KEY = Key.from_bytes(bytes(range(32)))
SLAB_CHUNKS = 2  # so that small tensors have several slabs
COUNT = 40_000  # elements of float32: 3 slabs in each shard of two ranks


@pytest.fixture
def recorder(monkeypatch, limited):
    limited(group_slab=SLAB_CHUNKS)
    return Recorder().install(monkeypatch)


def restore():
    """Bring what a checkpoint has of random numbers back to where it was."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 - the one that programs seed


def step(group, count):
    """Do each operation once, as each step of a training run does."""
    tensor = torch.randn(count)
    shard = torch.zeros(count)
    group.all_reduce(tensor)
    group.reduce_scatter(shard, torch.ones(group.size * count))
    group.all_gather(torch.empty(group.size * count), shard)
    group.broadcast(tensor, 0)
    if group.rank < 2:
        (group.send if group.rank == 0 else group.receive)(tensor, 1 - group.rank)


def messages_of(size):
    """Return the number of messages of a step."""
    return size * (size - 1) + size + size * (size - 1) + size + 1 + 1


def train(recorder, size, steps, count=100):
    """Start ranks from one checkpoint, with the key that they always have."""
    recorder.starts += 1

    def action(group):
        restore()
        for _ in range(steps):
            step(group, count)
        return threading.get_native_id(), group._thread.submit(threading.get_native_id).result()

    for threads in on_ranks(Network(size), KEY, action):
        wait_until_gone(threads)


def wait_until_gone(threads):
    """Wait for the kernel to end threads that were joined: a fork meanwhile copies locks that OpenSSL holds then."""
    while any(Path(f"/proc/self/task/{thread}").exists() for thread in threads):
        time.sleep(0.001)


@pytest.mark.slow
def test_no_key_and_nonce_are_used_twice_over_restarts(recorder):
    for size in (2, 3, 4):
        for _ in range(3):
            train(recorder, size, 3)
    train(recorder, 2, 2, COUNT)
    assert recorder.messages == sum(9 * messages_of(size) for size in (2, 3, 4)) + 2 * messages_of(2)
    assert max(map(len, recorder.uses.values())) >= 3  # slabs
    assert recorder.repeats() == []


@pytest.mark.nightly
def test_no_key_and_nonce_are_used_twice_in_a_hundred_thousand_messages(recorder):
    while recorder.messages < 100_000:
        for size in (2, 3, 4):
            train(recorder, size, 50)
        train(recorder, 2, 2, COUNT)
        recorder.add(in_forked_child(lambda: in_child(2)))
    assert recorder.repeats() == []


def in_child(steps):
    """Train in a forked child, with groups of its own, and return only what was recorded there."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        recorder.install(patch)
        train(recorder, 2, steps)
    return recorder.content()


@pytest.mark.slow
def test_no_key_and_nonce_are_used_twice_in_forked_children(recorder):
    restore()
    recorder.starts += 1
    group = SecureGroup.over(Network(1).transports()[0], KEY)

    def child():
        with pytest.raises(ClosedError):
            group.all_reduce(torch.ones(3))
        with pytest.raises(ClosedError):
            group._link.session.seal(_session.Route("all_reduce", 1, 0, -1, "float32", 12))
        return in_child(3)

    gc.collect()
    train(recorder, 2, 3)
    for _ in range(3):  # from one state of the parent
        recorder.add(in_forked_child(child))
    group.all_reduce(torch.ones(3))
    group.close()
    assert recorder.messages == 4 * 3 * messages_of(2) + 1
    assert recorder.repeats() == []


# A check that cannot fail proves nothing.


class FixedBytes:
    """`os` with random bytes that are the same in each process and at each start."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)

    def urandom(self, size):
        return bytes(size - 1) + b"\1"


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        ([_link], ["session"]),  # salts alone keep the keys apart
        ([_session], ["salt"]),  # the session and the numbers of the operations alone do
        ([_link, _session], ["session", "salt", "key", "nonce"]),
    ],
    ids=["session", "salts", "both"],
)
def test_random_bytes_that_repeat_are_noticed(recorder, monkeypatch, modules, found):
    for module in modules:
        monkeypatch.setattr(module, "os", FixedBytes(module.os))
    for _ in range(2):
        train(recorder, 2, 2)
    assert recorder.repeats() == found


def test_slabs_that_begin_with_one_nonce_are_noticed(recorder, monkeypatch):
    find = _link.get_engine
    monkeypatch.setattr(_link, "get_engine", lambda: FromChunk0(find()))
    recorder.starts += 1
    on_ranks(Network(2), KEY, lambda group: group.all_reduce(torch.ones(COUNT)), timeout=2)
    assert recorder.repeats() == ["nonce"]


class FromChunk0:
    """An engine that seals each slab as if it were the first of its message."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def seal_run(self, schedule, source, target, _first):
        self._engine.seal_run(schedule, source, target, 0)
