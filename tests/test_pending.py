"""Transfers that nobody waits for: they end well, or somebody is told."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers import staged as staged_helper
from helpers.forking import in_forked_child
from helpers.staged import Gate, fail_at, staged_channel
from helpers.tampering import tampered

import fastrack
from fastrack import AuthenticationError, Channel, ClosedError, DeviceError, Key
from fastrack.cobblestone import CHUNK, chunk_offset


@pytest.fixture(scope="module")
def key():
    return Key.generate()


@pytest.fixture(scope="module")
def plain():
    return np.random.default_rng(0).integers(1, 256, 17 * CHUNK, dtype=np.uint8)


@pytest.fixture(scope="module")
def good(key, plain):
    return fastrack.seal(plain, key, name="good")


@pytest.fixture(scope="module")
def bad(key, plain):
    return tampered(fastrack.seal(plain, key, name="bad"), chunk_offset(3), chunk_offset(9))


@pytest.fixture
def channel(key):
    channel = staged_channel(keys=key)
    yield channel
    channel._pending.renew()  # what a test left there
    wait_until_done(channel)
    channel.close()


def start(channel, sealed, **options):
    return channel.to_device(sealed, framework="numpy", non_blocking=True, **options)


def wait_until_done(channel):
    for work in channel._device.begun:
        assert work._over.wait(60)


def pending(channel):
    return len(channel._pending._started)


@pytest.mark.parametrize("rows", [slice(None), slice(5, 100_000, 3)], ids=["whole", "rows"])
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
    few = plain[:CHUNK]
    channel._device.meddle = gate = Gate("end")
    out = {"a": np.zeros_like(few), "b": [torch.zeros(few.size, dtype=torch.uint8), None]}
    moved = channel.to_device({"a": fastrack.seal(few, key), "b": [few, "text"]}, out=out, non_blocking=True)
    assert pending(channel) == 2
    gate.open()
    channel.synchronize()
    assert moved["b"][1] == "text"
    for result in (out["a"], out["b"][0].numpy()):
        assert np.array_equal(result, few)


def test_a_failure_is_raised_by_the_next_synchronize_and_only_there(channel, bad, plain):
    out = np.full_like(plain, 7)
    start_bad = channel.to_device(bad, out=out, non_blocking=True)
    with pytest.raises(AuthenticationError, match=r"'bad', chunk 3.* holds zeros") as caught:
        channel.synchronize()
    assert (caught.value.tensor, caught.value.chunk) == ("bad", 3)
    assert not hasattr(caught.value, "__notes__")
    assert start_bad is out
    expected = plain.copy().reshape(-1, CHUNK)
    expected[[3, 9]] = 0
    assert np.array_equal(out, expected.reshape(-1))
    channel.synchronize()
    assert pending(channel) == 0


@pytest.mark.parametrize("direction", ["to_device", "to_host"])
def test_a_failure_is_raised_by_the_next_call_that_waits_before_it_does_anything(channel, bad, plain, direction):
    start(channel, bad)
    for _ in range(2):
        start(channel, plain)  # does not wait, and raises nothing
    with pytest.raises(AuthenticationError):
        getattr(channel, direction)(plain)
    assert len(channel._device.begun) == 3
    getattr(channel, direction)(plain)


def test_closing_raises_a_failure_and_closes_all_the_same(key, bad):
    channel = staged_channel(keys=key)
    start(channel, bad)
    with pytest.raises(AuthenticationError):
        channel.close()
    assert channel._device.closed
    assert channel._session._secret is None
    assert all(not slot.memory.any() for slot in channel._device.made)
    channel.close()
    with pytest.raises(ClosedError):
        channel.synchronize()


def test_closing_waits_for_what_is_under_way(key, good, plain):
    with staged_channel(keys=key) as channel:
        moved = start(channel, good)
    assert np.array_equal(moved, plain)


def test_of_several_failures_the_first_is_raised_and_the_others_are_counted(channel, key, bad, good):
    other = tampered(fastrack.seal(np.arange(5), key, name="other"), -1)
    for sealed in (good, bad, other, good, other):
        start(channel, sealed)
    with pytest.raises(AuthenticationError, match="'bad'") as caught:
        channel.synchronize()
    assert caught.value.__notes__ == ["2 more of the transfers that were not waited for failed"]
    channel.synchronize()


def test_a_device_that_fails_is_reported_later(channel, good, plain):
    channel._device.meddle = fail_at("open", 3)
    start(channel, good)
    wait_until_done(channel)
    start(channel, plain[:100])
    (failure,) = channel._pending._failures
    assert failure.__traceback__ is None  # it would keep the work, and what that keeps
    with pytest.raises(DeviceError, match="fell off"):
        channel.synchronize()
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


def test_of_what_failed_the_name_and_the_chunk_are_kept(channel, good, bad):
    start(channel, bad)
    wait_until_done(channel)
    for _ in range(3):
        start(channel, good)
        wait_until_done(channel)
    assert pending(channel) == 1
    (failure,) = channel._pending._failures
    assert failure.__traceback__ is None
    with pytest.raises(AuthenticationError) as caught:
        channel.synchronize()
    assert (caught.value.tensor, caught.value.chunk) == ("bad", 3)


def test_however_quick_the_device_is_a_failure_is_told_by_the_next_call(channel, bad, plain, monkeypatch):
    finish = staged_helper.StagedWork.end

    def end(work, **_):
        finish(work, wait=True)

    monkeypatch.setattr(staged_helper.StagedWork, "end", end)
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
    def fill(*_):
        raise MemoryError("no memory")

    monkeypatch.setattr(fastrack.sources.SealedSource, "fill", fill)
    out = np.full_like(plain, 7)
    with pytest.raises(MemoryError):
        channel.to_device(good, out=out, non_blocking=True)
    assert not out.any()
    channel.synchronize()


def test_two_threads_that_synchronize_both_wait(channel, good):
    channel._device.meddle = gate = Gate("end")
    start(channel, good)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(channel.synchronize) for _ in range(2)]
        for one in waiting:
            with pytest.raises(TimeoutError):
                one.result(0.05)
        gate.open()
        for one in waiting:
            one.result(60)


def test_threads_start_transfers_while_another_waits(channel, good, bad, plain):
    over = threading.Event()
    told = []

    def synchronize():
        while not over.is_set():
            try:
                channel.synchronize()
            except AuthenticationError as error:
                told.append(1 + int((getattr(error, "__notes__", None) or ["0"])[0].split()[0]))

    def move(number):
        moved = start(channel, bad if number % 4 == 0 else good)
        return number, moved

    with ThreadPoolExecutor(6) as pool:
        synchronizing = pool.submit(synchronize)
        moved = list(pool.map(move, range(48)))
        wait_until_done(channel)
        over.set()
        synchronizing.result(60)
    try:
        channel.synchronize()
    except AuthenticationError as error:
        told.append(1 + int((getattr(error, "__notes__", None) or ["0"])[0].split()[0]))
    assert sum(told) == 12
    assert all(np.array_equal(result, plain) for number, result in moved if number % 4)


def test_an_interrupted_wait_forgets_nothing(channel, bad, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    start(channel, bad)
    with monkeypatch.context() as patch:
        patch.setattr(staged_helper.StagedWork, "verdict", interrupt)
        with pytest.raises(KeyboardInterrupt):
            channel.synchronize()
    with pytest.raises(AuthenticationError):
        channel.synchronize()


def test_a_forked_child_does_not_wait_for_its_parents_transfers(channel, good, bad, plain):
    channel._device.meddle = gate = Gate("end")
    start(channel, bad)

    def child():
        channel.synchronize()
        channel._device.meddle = Gate("nothing")
        moved = start(channel, good)
        channel.synchronize()
        return np.array_equal(moved, plain)

    assert in_forked_child(child)
    gate.open()
    with pytest.raises(AuthenticationError):
        channel.synchronize()
