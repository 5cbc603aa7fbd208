"""In confidential mode staging buffers are of the kind of host memory that is copied faster; all else is the same."""

import time

import numpy as np
import pytest
from helpers.cases import each
from helpers.cuda_rig import MESSAGE, Rig, SmallDevice
from helpers.fake_cuda import MODES, FakeDriver

import fastrack
from fastrack import Channel, DeviceError
from fastrack._devices.cuda import host_memory
from fastrack._devices.cuda.buffers import CudaStagingBuffer
from fastrack._devices.cuda.device import CudaDevice
from fastrack._devices.cuda.driver import CopySpeeds, PageLockedMemoryError
from fastrack._devices.cuda.host_memory import SIZE, measure_copies, staging_memory
from fastrack._devices.cuda.streams import Pipeline
from fastrack.format import CHUNK_SIZE

KEY = fastrack.Key.from_bytes(bytes(range(32)))
FASTER_PAGEABLE = CopySpeeds(page_locked=1.0, pageable=2.0)


class SlowDriver(FakeDriver):
    """A device of confidential mode, of which copies of page-locked memory take this much longer than others."""

    def __init__(self, delay=0.0):
        super().__init__("serial")
        self.pageable, self.delay, self.uploads = True, delay, 0

    def upload(self, pointer, source, size, stream):
        self.uploads += 1
        if any(host.ctypes.data == source for host in self.hosts()):
            time.sleep(self.delay)
        super().upload(pointer, source, size, stream)


def test_the_faster_kind_is_found_and_the_probe_leaves_nothing():
    driver = SlowDriver(delay=0.03)
    speeds = measure_copies(driver)
    assert speeds.pageable > 2 * speeds.page_locked > 0
    assert speeds.prefers_pageable
    assert driver.left() == 0
    assert driver.violations == []


def test_the_probe_ends_in_time_however_slow_copies_are(monkeypatch):
    monkeypatch.setattr(host_memory, "_SECONDS", 0.01)
    driver = SlowDriver(delay=0.05)
    assert measure_copies(driver).prefers_pageable
    assert driver.uploads == 2  # one round, of each kind


@each("call", ["memory", "host", "stream", "upload"])
def test_where_memory_is_short_nothing_is_known_and_staging_stays_page_locked(monkeypatch, call):
    driver = SlowDriver()

    def refuse(*_, **__):
        raise DeviceError("cuda:0 has no memory left")

    with monkeypatch.context() as patched:
        patched.setattr(driver, call, refuse)
        driver.copy_speeds = measure_copies(driver)
    assert driver.copy_speeds is None
    memory = staging_memory(driver, 64)
    assert any(memory is host for host in driver.hosts())


@each(
    ("speeds", "is_pageable"),
    [(None, False), (CopySpeeds(10, 10), False), (CopySpeeds(10, 10.5), False), (CopySpeeds(10, 10.6), True)],
)
def test_a_staging_buffer_is_pageable_only_if_that_is_faster_by_more_than_noise(speeds, is_pageable):
    driver = FakeDriver()
    driver.copy_speeds = speeds
    buffer = CudaStagingBuffer(Pipeline(driver), SIZE)
    assert all(buffer.memory is not host for host in driver.hosts()) is is_pageable


@pytest.mark.parametrize("mode", MODES)
@each("seed", range(10))
@pytest.mark.slow
def test_messages_arrive_through_pageable_buffers_that_are_used_again(mode, seed):
    driver = FakeDriver(mode, seed)
    driver.copy_speeds, driver.pageable = FASTER_PAGEABLE, True
    assert moves(driver, seed)


def moves(driver, seed=0):
    """Move messages there and back, some at once."""
    plain = np.random.default_rng(seed).integers(0, 256, 40 * CHUNK_SIZE + 7, np.uint8)
    sealed = fastrack.seal(plain, KEY)
    with Channel._from_device(SmallDevice(driver), keys=KEY, depth=2) as channel:
        opened = [channel.to_device(sealed, framework="cupy", non_blocking=True) for _ in range(3)]
        back = channel.to_host(opened[1], key=KEY)
        rows = channel.to_device(sealed[::40], framework="cupy")
        assert all(np.array_equal(driver.read(x), plain) for x in opened)
        assert np.array_equal(fastrack.unseal(back, KEY, framework="numpy"), plain)
        assert np.array_equal(driver.read(rows), plain[::40])
    driver.stop()
    assert driver.violations == []
    return True


# Page-locked memory that runs out.


@pytest.mark.parametrize("mode", [*MODES, "held"])
@each("room", [16 << 10, 100 << 10])  # for the keys, and for one buffer
def test_a_process_without_enough_page_locked_memory_goes_on_with_pageable_and_says_so_once(mode, room):
    driver = FakeDriver(mode)
    driver.room, driver.pageable = room, True
    host_memory._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="Transfers go on with pageable memory") as said:
        assert moves(driver)
    assert [str(each.message).partition(".")[0] for each in said] == ["cuda:0 got no page-locked memory"]


def test_what_is_short_without_page_locked_memory_for_keys_is_said():
    driver = FakeDriver()
    device = CudaDevice(driver)  # which has keys for a few messages
    driver.room = 0
    host_memory._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="pageable"):
        assert device.staging_buffer(64).memory.size == 64
    with pytest.raises(PageLockedMemoryError):
        device._states.acquire(40)


def test_another_error_is_no_want_of_page_locked_memory():
    driver = FakeDriver()
    driver.fail_at(1)
    with pytest.raises(DeviceError, match="injected"):
        staging_memory(driver, 64)


# A GPU that was not set ready.


@each("mode", ["serial", "confidential", "held"])
def test_a_gpu_that_is_not_ready_is_an_error_with_what_to_do(mode):
    driver = FakeDriver(mode)
    driver.ready = False
    with pytest.raises(DeviceError, match="nvidia-smi conf-compute -srs 1"):
        CudaDevice(driver)
    driver.ready = True
    rig = Rig(mode)
    array = rig.array(MESSAGE.plain.size)
    assert rig.open(MESSAGE, array).result() is None
    for each_driver in (driver, rig.driver):
        each_driver.stop()
