"""Transfers that no call waits for: they end well, or their failure is reported."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import staged as staged_helper
from helpers.cuda_on_host import in_confidential_mode
from helpers.forking import in_forked_child
from helpers.staged import Gate, fail_at, staged_channel
from helpers.tampering import tampered

import fastrack
from fastrack import AuthenticationError, Channel, ClosedError, DeviceError
from fastrack._devices.cuda.operation import CudaOperation
from fastrack.format import CHUNK_SIZE, chunk_offset


@pytest.fixture(scope="module")
def plain():
    return np.random.default_rng(0).integers(1, 256, 17 * CHUNK_SIZE, dtype=np.uint8)


@pytest.fixture(scope="module")
def good(key, plain):
    return fastrack.seal(plain, key, name="good")


@pytest.fixture(scope="module")
def bad(key, plain):
    return tampered(fastrack.seal(plain, key, name="bad"), chunk_offset(3), chunk_offset(9))


@pytest.fixture(params=[pytest.param(staged_channel, id="staged"), *in_confidential_mode()])
def new_channel(request):
    return request.param


only_staged = pytest.mark.parametrize("new_channel", [staged_channel], indirect=True)


@pytest.fixture
def channel(new_channel, key):
    channel = new_channel(keys=key)
    yield channel
    wait_until_done(channel)
    channel._owners.reset_after_fork()  # what a test left there
    channel.close()


def start(channel, sealed, **options):
    return channel.to_device(sealed, framework="numpy", non_blocking=True, **options)


def wait_until_done(channel):
    channel._device.settle()


def raised_by(call):
    """The names of the tensors whose failures a call raises, by its error and the notes of it."""
    try:
        call()
    except AuthenticationError as error:
        return re.findall(r"tensor '([^']*)'", "\n".join([str(error), *getattr(error, "__notes__", [])]))
    return []


def pending(channel):
    return len(channel._owners.current()._started)


def known_failures(channel):
    """The failures of this thread that were found so far."""
    channel._owners.current().poll()
    return channel._owners.current()._failures


@pytest.mark.parametrize("rows", [slice(None), slice(5, 100_000, 30)], ids=["whole", "rows"])
def test_the_call_returns_before_the_device_is_done(channel, good, plain, rows):
    channel._device.meddle = gate = Gate("end")
    moved = start(channel, good if rows == slice(None) else good[rows])
    (work,) = channel._device.begun
    assert not work.done()
    gate.open()
    channel.synchronize()
    assert work.done()
    assert np.array_equal(moved, plain[rows])


def test_a_nest_is_filled_without_waiting(channel, key, plain):
    few = plain[:CHUNK_SIZE]
    channel._device.meddle = gate = Gate("end")
    out = {"a": np.zeros_like(few), "b": [torch.zeros(few.size, dtype=torch.uint8), None]}
    moved = channel.to_device({"a": fastrack.seal(few, key), "b": [few, "text"]}, out=out, non_blocking=True)
    assert pending(channel) == 1  # one operation
    gate.open()
    channel.synchronize()
    assert moved["b"][1] == "text"
    for result in (out["a"], out["b"][0].numpy()):
        assert np.array_equal(result, few)


def test_a_failure_is_raised_by_the_next_synchronize_and_only_there(channel, bad, plain):
    out = np.full_like(plain, 7)
    start_bad = channel.to_device(bad, out=out, non_blocking=True)
    with pytest.raises(AuthenticationError, match="zeros") as caught:
        channel.synchronize()
    assert (caught.value.tensor, caught.value.chunk) == ("bad", 3)
    assert not hasattr(caught.value, "__notes__")
    assert start_bad is out
    expected = plain.copy().reshape(-1, CHUNK_SIZE)
    expected[[3, 9]] = 0
    assert np.array_equal(out, expected.reshape(-1))
    channel.synchronize()
    assert pending(channel) == 0


@pytest.mark.parametrize("direction", ["to_device", "to_host"])
def test_a_failure_is_raised_by_the_next_call_that_waits_before_it_does_anything(channel, bad, plain, direction):
    channel._device.meddle = gate = Gate("end")
    start(channel, bad)
    for _ in range(2):
        start(channel, plain[:CHUNK_SIZE])  # does not wait, so it cannot know
    gate.open()
    with pytest.raises(AuthenticationError):
        getattr(channel, direction)(plain)
    assert len(channel._device.begun) == 3
    getattr(channel, direction)(plain)


def test_a_failure_that_is_known_is_raised_by_the_next_call_that_does_not_wait_either(channel, bad, good, plain):
    """A loop that never synchronizes does not train on zeros."""
    raised = 0
    for _ in range(20):
        try:
            start(channel, bad)
        except AuthenticationError:
            raised += 1
        wait_until_done(channel)
    assert raised == 10  # each second call, which starts nothing
    assert len(channel._device.begun) == 10
    moved = start(channel, good)
    channel.synchronize()
    assert np.array_equal(moved, plain)


def test_closing_raises_a_failure_and_closes_all_the_same(new_channel, key, bad):
    channel = new_channel(keys=key)
    start(channel, bad)
    with pytest.raises(AuthenticationError):
        channel.close()
    assert channel._device.closed
    assert channel._session._secret is None
    assert all(not buffer.memory.any() for buffer in channel._device.made)
    channel.close()
    with pytest.raises(ClosedError):
        channel.synchronize()


def test_closing_waits_for_what_is_under_way(new_channel, key, good, plain):
    with new_channel(keys=key) as channel:
        moved = start(channel, good)
    assert np.array_equal(moved, plain)


def test_of_several_failures_the_first_is_raised_and_the_others_are_noted(channel, key):
    good = fastrack.seal(np.arange(5), key)
    bad = [tampered(fastrack.seal(np.arange(5), key, name=name), -1) for name in ("one", "two", "three")]
    channel._device.meddle = gate = Gate("end")
    for sealed in (good, bad[0], good, *bad[1:]):
        start(channel, sealed)
    gate.open()
    with pytest.raises(AuthenticationError, match="'one'") as caught:
        channel.synchronize()
    assert [note.split(",")[0] for note in caught.value.__notes__] == [
        "Another transfer failed as well: tensor 'two'",
        "Another transfer failed as well: tensor 'three'",
    ]
    channel.synchronize()


@only_staged
def test_a_device_that_fails_is_reported_later(channel, good, plain):
    channel._device.meddle = fail_at("open", 3)
    start(channel, good)
    wait_until_done(channel)
    (failure,) = known_failures(channel)
    assert failure.__traceback__ is None  # it would keep the work, and what that keeps
    with pytest.raises(DeviceError, match="fell off"):
        start(channel, plain[:100])
    channel._device.meddle = Gate("nothing")
    assert np.array_equal(channel.to_device(plain), plain)


def test_what_is_done_is_let_go_of(channel, good, plain):
    for _ in range(5):
        start(channel, good)
        wait_until_done(channel)
        assert pending(channel) <= 1
    channel._device.meddle = gate = Gate("end")
    for _ in range(3):
        start(channel, plain[:100])
    assert pending(channel) == 3
    gate.open()


def test_of_what_failed_the_name_and_the_chunk_are_kept(channel, bad):
    start(channel, bad)
    wait_until_done(channel)
    (failure,) = known_failures(channel)
    assert failure.__traceback__ is None
    assert pending(channel) == 0
    with pytest.raises(AuthenticationError) as caught:
        channel.synchronize()
    assert (caught.value.tensor, caught.value.chunk) == ("bad", 3)


@only_staged
def test_however_quick_the_device_is_a_failure_is_told_by_the_next_call(channel, bad, plain, monkeypatch):
    finish = staged_helper.StagedWork.finish

    def end(work, **_):
        finish(work, wait=True)

    monkeypatch.setattr(staged_helper.StagedWork, "finish", end)
    out = np.full_like(plain, 7)
    assert channel.to_device(bad, out=out, non_blocking=True) is out
    with pytest.raises(AuthenticationError, match="holds zeros"):
        channel.synchronize()
    channel.synchronize()


def test_the_host_itself_finishes_at_once(key, bad, good, plain):
    out = np.full_like(plain, 7)
    with Channel(keys=key) as channel:
        assert np.array_equal(start(channel, good), plain)
        with pytest.raises(AuthenticationError):
            channel.to_device(bad, out=out, non_blocking=True)
        channel.synchronize()
    assert not out.any()


def test_a_fault_on_the_host_is_raised_at_once(channel, good, plain, monkeypatch):
    for operation in (staged_helper.StagedWork, CudaOperation):
        monkeypatch.setattr(operation, "open", Mock(side_effect=MemoryError))
    out = np.full_like(plain, 7)
    with pytest.raises(MemoryError):
        channel.to_device(good, out=out, non_blocking=True)
    assert not out.any()
    channel.synchronize()


def test_a_thread_waits_for_its_own_transfers_and_for_no_others(channel, good):
    channel._device.meddle = gate = Gate("end")

    def start_and_wait():
        start(channel, good)
        channel.synchronize()

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(start_and_wait) for _ in range(2)]
        for one in waiting:
            with pytest.raises(TimeoutError):
                one.result(0.05)
        channel.synchronize()
        gate.open()
        for one in waiting:
            one.result(60)


@pytest.mark.slow
def test_each_thread_is_raised_the_failures_of_its_own_transfers(channel, key, plain):
    """While another one synchronizes all the time, and others move what is good."""
    turns = 4 if channel.device == "cuda:0" else 12
    over = threading.Event()
    good = fastrack.seal(plain[: 3 * CHUNK_SIZE], key)

    def synchronize():
        while not over.is_set():
            channel.synchronize()

    def move_bad(thread):
        named = [fastrack.seal(plain[:100], key, name=f"{thread}-{number}") for number in range(turns)]
        calls = [partial(start, channel, tampered(sealed, -1)) for sealed in named]
        return [name for call in [*calls, channel.synchronize] for name in raised_by(call)]

    def move_good():
        while not over.is_set():
            assert np.array_equal(channel.to_device(good, framework="numpy"), plain[: 3 * CHUNK_SIZE])

    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(synchronize), pool.submit(move_good)]
        moving = [pool.submit(move_bad, thread) for thread in range(4)]
        told = [one.result(60) for one in moving]
        over.set()
        for one in others:
            one.result(60)
    for thread, names in enumerate(told):
        assert len(names) == len(set(names))
        assert all(name.startswith(f"{thread}-") for name in names)
    assert sum(map(len, told)) == sum(work.result() is not None for work in channel._device.begun)


def test_an_interrupted_wait_forgets_nothing(channel, bad, monkeypatch):
    start(channel, bad)
    with monkeypatch.context() as patch:
        patch.setattr(type(channel._device.begun[0]), "result", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            channel.synchronize()
    with pytest.raises(AuthenticationError):
        channel.synchronize()


def test_a_forked_child_does_not_wait_for_its_parents_transfers(channel, good, bad, plain):
    channel._device.meddle = gate = Gate("end")
    start(channel, bad)

    def child():
        channel.synchronize()
        if channel.device == "cuda:0":
            with pytest.raises(DeviceError, match="forked"):
                start(channel, good)
            return True
        channel._device.meddle = Gate("nothing")
        moved = start(channel, good)
        channel.synchronize()
        return np.array_equal(moved, plain)

    assert in_forked_child(child)
    gate.open()
    with pytest.raises(AuthenticationError):
        channel.synchronize()


def test_a_forked_child_does_not_wait_for_a_thread_that_uses_its_group(channel, good, plain):
    def child():
        if channel.device == "cuda:0":
            with pytest.raises(DeviceError, match="forked"):
                group(good)
            return True
        moved = group(good, framework="numpy")
        group._owner.drain()
        return np.array_equal(moved, plain)

    has_lock, is_forked = threading.Event(), threading.Event()

    def hold():
        with group._owner._lock:
            has_lock.set()
            is_forked.wait(60)

    with channel.group() as group:
        holder = threading.Thread(target=hold)
        holder.start()
        has_lock.wait(60)
        try:
            assert in_forked_child(child, seconds=20)
        finally:
            is_forked.set()
            holder.join()
