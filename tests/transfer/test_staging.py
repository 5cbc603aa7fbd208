"""Transfers to a device that stages everything and works later: buffers, overlap, and what goes wrong meanwhile."""

import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import staged as staged_helper
from helpers.staged import Gate, fail_at, staged_channel
from helpers.tampering import tampered

import fastrack
import fastrack._crypto.memcpy
from fastrack import AuthenticationError, ClosedError, DeviceError
from fastrack._crypto import engine as aead

CHUNK_SIZE = 16384


def data(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture
def staged(key):
    with staged_channel(keys=key, threads=2) as channel:
        yield channel


def falling(method):
    """The same, followed by a failure of the device."""

    def fall(*arguments, **options):
        method(*arguments, **options)
        raise DeviceError("the device fell off the bus")

    return fall


def require_wiped(work):
    with pytest.raises(ClosedError):
        aead.get_engine().verify_run(work._opener._schedules[0], np.zeros(16, np.uint8), 0)


def test_starts_with_a_small_slab_and_grows(staged):
    sizes = []
    staged._device.meddle = lambda kind, slab: slab and sizes.append(slab.sealed_size // 16400)
    staged.to_device(data(13 * CHUNK_SIZE))
    assert sizes == [1, 2, 3, 4, 3]


def test_takes_no_more_buffers_than_the_pool_has(staged, key):
    plain = data(100 * CHUNK_SIZE)
    for _ in range(3):
        assert np.array_equal(staged.to_device(plain), plain)
        assert np.array_equal(fastrack.unseal(staged.to_host(plain), key, framework="numpy"), plain)
    assert 1 <= len(staged._device.made) <= fastrack._transfer.channel.DEPTH


def test_hands_over_a_slab_while_another_is_worked_on(staged, key):
    plain, gate = data(20 * CHUNK_SIZE), Gate("seal")
    staged._device.meddle = gate
    with ThreadPoolExecutor(1) as pool:
        sealing = pool.submit(staged.to_host, plain)
        while len(staged._device.made) < 3:
            assert not sealing.done()
        gate.open()
        assert np.array_equal(fastrack.unseal(sealing.result(60), key, framework="numpy"), plain)


@pytest.mark.parametrize("depth", [1, 2])
def test_with_a_short_ring_threads_do_not_wait_for_one_another_forever(key, depth):
    plain = data(15 * CHUNK_SIZE)

    def work(number):
        if number % 2:
            return np.array_equal(channel.to_device(plain), plain)
        return np.array_equal(fastrack.unseal(channel.to_host(plain), key, framework="numpy"), plain)

    with staged_channel(keys=key, depth=depth) as channel, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(64))) == [True] * 64
        assert len(channel._device.made) <= depth


@pytest.mark.parametrize("first", [0, 1, 6, 14], ids=["first", "second", "later", "last"])
def test_a_device_that_fails_is_reported_and_nothing_is_handed_out(staged, key, first):
    plain, out = data(17 * CHUNK_SIZE), np.full(17 * CHUNK_SIZE, 7, np.uint8)
    staged._device.meddle = fail_at("open", first)
    with pytest.raises(DeviceError, match="fell off"):
        staged.to_device(fastrack.seal(plain, key), out=out)
    assert not out.any()
    staged._device.meddle = fail_at("seal", first)
    with pytest.raises(DeviceError, match="fell off"):
        staged.to_host(plain)
    assert np.array_equal(staged.to_device(plain, out=out), plain)
    for work in staged._device.begun:
        require_wiped(work)


def test_the_error_of_one_transfer_is_not_anothers(staged, key):
    plain = data(17 * CHUNK_SIZE)
    good, bad = fastrack.seal(plain, key), tampered(fastrack.seal(plain, key), 56 + 5 * 16400)

    def work(number):
        if number % 2:
            with pytest.raises(AuthenticationError) as caught:
                staged.to_device(bad)
            return caught.value.chunk == 5
        return np.array_equal(staged.to_device(good, framework="numpy"), plain)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(32))) == [True] * 32


def test_a_fault_on_the_host_waits_for_the_device(staged, key, monkeypatch):
    original = staged_helper.StagedWork.open

    def open_or_fail(work, slab, buffer):
        if slab.segments[0].first_chunk == 6:
            raise MemoryError("no memory")
        original(work, slab, buffer)

    monkeypatch.setattr(staged_helper.StagedWork, "open", open_or_fail)
    staged._device.meddle = lambda kind, slab: time.sleep(0.01)
    out = np.full(17 * CHUNK_SIZE, 7, np.uint8)
    with pytest.raises(MemoryError):
        staged.to_device(fastrack.seal(data(17 * CHUNK_SIZE), key), out=out)
    assert not out.any()
    (work,) = staged._device.begun
    assert work.done()
    require_wiped(work)


def test_the_first_of_two_errors_is_told(staged, key, monkeypatch):
    monkeypatch.setattr(staged_helper.StagedWork, "open", Mock(side_effect=MemoryError))
    for name in ("finish", "result"):
        monkeypatch.setattr(staged_helper.StagedWork, name, falling(getattr(staged_helper.StagedWork, name)))
    monkeypatch.setattr(staged._device, "clear", falling(staged._device.clear))
    with pytest.raises(MemoryError):
        staged.to_device(fastrack.seal(data(100), key))


def test_a_device_that_fails_at_the_end_is_waited_for(staged, monkeypatch):
    staged._device.meddle = lambda kind, slab: time.sleep(0.01)
    monkeypatch.setattr(staged_helper.StagedWork, "finish", falling(staged_helper.StagedWork.finish))
    out = np.full(100, 7, np.uint8)
    with pytest.raises(DeviceError):
        staged.to_device(data(100), out=out)
    assert staged._device.begun[0].done()
    assert not out.any()


def test_buffers_come_back_when_a_slab_cannot_be_sealed(staged, key, monkeypatch):
    plain = data(17 * CHUNK_SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(staged_helper.StagedWork, "seal", falling(staged_helper.StagedWork.seal))
        with pytest.raises(DeviceError):
            staged.to_host(plain)
    assert np.array_equal(fastrack.unseal(staged.to_host(plain), key, framework="numpy"), plain)
    assert len(staged._device.made) == sum(len(pool._returned) for pool in staged._pools)


def test_a_key_is_wiped_whether_or_not_the_device_takes_it(staged, monkeypatch):
    seen = []
    original = staged._device.begin

    def begin(messages, note):
        seen.append(messages.keys)
        assert any(messages.keys._flat)
        if len(seen) > 1:
            raise DeviceError("no room for a key")
        return original(messages, note)

    monkeypatch.setattr(staged._device, "begin", begin)
    staged.to_device(data(100))
    for refused in (staged.to_host, staged.to_device):
        with pytest.raises(DeviceError):
            refused(data(100))
    assert [any(keys._flat) for keys in seen] == [False] * 3
