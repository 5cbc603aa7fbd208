"""In confidential mode staging buffers are of the kind of host memory that is copied faster; all else is the same."""

import time
from dataclasses import astuple

import numpy as np
import pytest
from helpers.cases import each
from helpers.cuda_rig import MESSAGE, Rig, SmallDevice
from helpers.fake_cuda import MODES, FakeDriver
from helpers.tampering import tampered

import fastrack
from fastrack import AuthenticationError, Channel, DeviceError
from fastrack._devices.cuda import buffers, device, host_memory, streams
from fastrack._devices.cuda import driver as choice
from fastrack.format import CHUNK_SIZE, chunk_offset

KEY = fastrack.Key.from_bytes(bytes(range(32)))
LOCKED, PAGEABLE = choice.Speeds((2.0, 2.0), (1.0, 1.0)), choice.Speeds((1.0, 1.0), (2.0, 2.0))
SMALL_PAGEABLE = choice.Speeds(page_locked=(1.0, 2.0), pageable=(2.0, 1.0))  # its toll is less, its rate too


class SlowDriver(FakeDriver):
    """A device of confidential mode, of which the copies that `slow` names take this much longer."""

    def __init__(self, delay=0.0, slow=lambda **_: True):
        super().__init__("serial")
        self.pageable, self.delay, self.slow, self.copies = True, delay, slow, 0
        self.now = 0.0  # seconds: what copies take is not left to the machine

    def upload(self, pointer, source, size, stream):
        self._hold_up("up", source, size)
        super().upload(pointer, source, size, stream)

    def download(self, target, pointer, size, stream):
        self._hold_up("down", target, size)
        super().download(target, pointer, size, stream)

    def _hold_up(self, way, host, size):
        self.copies += 1
        is_locked = any(each.ctypes.data == host for each in self.hosts())
        self.now += size / 1e10 + (self.delay if self.slow(way=way, is_locked=is_locked, size=size) else 0)


@each("way", ["up", "down"])
@each("is_locked", [False, True])
@each("size", [choice.SMALL, choice.LARGE])
def test_each_way_kind_and_size_is_timed_by_itself_and_the_probe_leaves_nothing(
    monkeypatch, limited, way, is_locked, size
):
    limited(copies_measured=0.1)
    chosen = {"way": way, "is_locked": is_locked, "size": size}
    driver = SlowDriver(delay=0.05, slow=lambda **copy: copy == chosen)
    monkeypatch.setattr(time, "perf_counter", lambda: driver.now)
    speeds = host_memory.measure_copies(driver)
    found = speeds.uploads if way == "up" else speeds.downloads
    assert found.prefers_pageable(size) is is_locked
    speed = (found.page_locked if is_locked else found.pageable)[size == choice.LARGE]
    assert size / speed / 1e9 >= 0.05
    kinds = (each_kind for each_way in (speeds.uploads, speeds.downloads) for each_kind in astuple(each_way))
    assert min(kind[size == choice.LARGE] for kind in kinds) == speed
    assert driver.left() == 0
    assert driver.violations == []


def test_the_probe_ends_in_time_however_slow_copies_are(monkeypatch, limited):
    limited(copies_measured=0.01)
    driver = SlowDriver(delay=0.02)
    monkeypatch.setattr(time, "perf_counter", lambda: driver.now)
    assert host_memory.measure_copies(driver) is not None
    assert driver.copies == 8  # one round: each way, kind and size


@each("call", ["memory", "host", "stream", "upload"])
def test_where_memory_is_short_nothing_is_known_and_staging_stays_page_locked(monkeypatch, call):
    driver = SlowDriver()

    def refuse(*_, **__):
        raise DeviceError("cuda:0 has no memory left")

    with monkeypatch.context() as patched:
        patched.setattr(driver, call, refuse)
        driver.copy_speeds = host_memory.measure_copies(driver)
    assert driver.copy_speeds is None
    buffer = buffers.CudaStagingBuffer(streams.Pipeline(driver), 64)
    assert buffer.memory is buffer.source(64) is buffer.landing(64)
    assert any(buffer.memory is host for host in driver.hosts())


@each(
    ("speeds", "size", "is_pageable"),
    [
        (choice.Speeds((10, 10), (10, 10)), choice.LARGE, False),
        (choice.Speeds((10, 10), (10, 10.5)), choice.LARGE, False),
        (choice.Speeds((10, 10), (10, 10.6)), choice.LARGE, True),
        (choice.Speeds((10, 10), (10, 10.6)), 2 * choice.LARGE, True),
        (choice.Speeds((10, 10), (10, 10.6)), choice.SMALL, False),
        (choice.Speeds((10, 10), (10.5, 10)), choice.SMALL, False),
        (choice.Speeds((10, 10), (10.6, 10)), choice.SMALL, True),
        (choice.Speeds((10, 10), (10.6, 10)), 1, True),
        (choice.Speeds((10, 10), (10.6, 10)), choice.LARGE, False),
        (
            choice.Speeds((choice.SMALL / 100, choice.LARGE / 200), (choice.SMALL / 400, choice.LARGE / 195)),
            2 * choice.LARGE,
            False,
        ),  # as at 4 MiB
        (
            choice.Speeds((choice.SMALL / 100, choice.LARGE / 1500), (choice.SMALL / 95, choice.LARGE / 1000)),
            1,
            True,
        ),  # as at 64 KiB
        # 100 us and 1 GB/s a byte against 10 us and half of that: as fast at about 150 KB.
        (choice.Speeds((choice.SMALL / 165536, 1.0), (choice.SMALL / 141072, 0.5)), 64 << 10, True),
        (choice.Speeds((choice.SMALL / 165536, 1.0), (choice.SMALL / 141072, 0.5)), 256 << 10, False),
    ],
)
def test_a_kind_is_chosen_by_the_time_of_a_copy_and_if_it_is_faster_by_more_than_noise(speeds, size, is_pageable):
    assert speeds.prefers_pageable(size) is is_pageable


@each("uploads", [LOCKED, PAGEABLE, SMALL_PAGEABLE])
@each("downloads", [LOCKED, PAGEABLE, SMALL_PAGEABLE])
def test_each_way_and_size_has_memory_of_the_kind_that_is_faster_for_it(uploads, downloads):
    driver = FakeDriver()
    driver.copy_speeds = choice.CopySpeeds(uploads, downloads)
    buffer = buffers.CudaStagingBuffer(streams.Pipeline(driver), choice.LARGE)
    for size in (choice.SMALL, choice.LARGE):
        for memory, speeds in ((buffer.source(size), uploads), (buffer.landing(size), downloads)):
            assert all(memory is not host for host in driver.hosts()) is speeds.prefers_pageable(size)
            assert memory.size == choice.LARGE
            assert memory is buffer.memory or memory is buffer._other
    assert buffer.memory is buffer.source(choice.LARGE)
    assert (buffer._other is None) is (uploads is downloads is not SMALL_PAGEABLE)


def test_both_kinds_of_memory_are_wiped():
    driver = FakeDriver()
    driver.copy_speeds = choice.CopySpeeds(LOCKED, PAGEABLE)
    buffer = buffers.CudaStagingBuffer(streams.Pipeline(driver), choice.LARGE)
    memories = buffer.source(choice.LARGE), buffer.landing(choice.LARGE)
    for memory in memories:
        memory.fill(1)
    buffer.wipe()
    assert [memory.any() for memory in memories] == [False, False]


@pytest.mark.parametrize("mode", MODES)
@each("seed", range(10))
@pytest.mark.slow
def test_messages_arrive_through_pageable_buffers_that_are_used_again(mode, seed):
    driver = FakeDriver(mode, seed)
    driver.copy_speeds, driver.pageable = choice.CopySpeeds(PAGEABLE, PAGEABLE), True
    assert moves(driver, seed)


@pytest.mark.parametrize("mode", [*MODES, "held"])
@each("uploads", [LOCKED, PAGEABLE, SMALL_PAGEABLE])
@each("downloads", [LOCKED, PAGEABLE, SMALL_PAGEABLE])
def test_each_slab_is_copied_in_memory_of_the_kind_that_is_faster_for_it(
    monkeypatch, limited, mode, uploads, downloads
):
    limited(small_copy=CHUNK_SIZE, large_copy=3 * CHUNK_SIZE)  # so that a slab of four chunks is a large copy
    driver, used = FakeDriver(mode), set()
    driver.copy_speeds, driver.pageable = choice.CopySpeeds(uploads, downloads), True
    held = driver._held

    def note(address, size, what):
        found = held(address, size, what)
        if size >= CHUNK_SIZE:  # else it is of keys and verdicts
            used.add((what, size, not found.page_locked))
        return found

    monkeypatch.setattr(driver, "_held", note)
    with Channel._from_device(SmallDevice(driver), keys=KEY) as channel:
        for size in (CHUNK_SIZE, 9 * CHUNK_SIZE):
            plain = np.random.default_rng(size).integers(0, 256, size, np.uint8)
            opened = channel.to_device(fastrack.seal(plain, KEY), framework="cupy")
            assert np.array_equal(driver.read(opened), plain)
            assert np.array_equal(fastrack.unseal(channel.to_host(opened, key=KEY), KEY, framework="numpy"), plain)
        driver._held = held
        plain = np.arange(200, dtype=np.uint8)  # sealed by the host, in `memory`
        assert np.array_equal(driver.read(channel.to_device(plain, framework="cupy")), plain)
    driver.stop()
    assert driver.violations == []
    for what, speeds in (("uploaded", uploads), ("downloaded to", downloads)):
        found = {size: is_pageable for way, size, is_pageable in used if way == what}
        assert found == {size: speeds.prefers_pageable(size) for size in found}
        assert (min(found) < 2 * CHUNK_SIZE, max(found) > 3 * CHUNK_SIZE) == (True, True)


@pytest.mark.parametrize("mode", [*MODES, "held"])
@each(("speeds", "own"), [(None, False), (LOCKED, False), (PAGEABLE, True)])
def test_large_runs_go_up_from_where_they_lie_if_pageable_memory_is_faster(limited, mode, speeds, own):
    limited(recorder_memory=3 * CHUNK_SIZE)
    driver, sources = FakeDriver(mode, multiprocessors=1), []
    if speeds:
        driver.copy_speeds, driver.pageable = choice.CopySpeeds(speeds, speeds), True
    plain = np.random.default_rng(0).integers(0, 256, 30 * CHUNK_SIZE + 5, np.uint8)
    sealed = fastrack.seal(plain, KEY, name="x")
    start, upload = sealed.memory.address, driver.upload

    def note(pointer, source, size, stream):
        sources.append((start <= source < start + sealed.memory.size, size))
        upload(pointer, source, size, stream)

    driver.upload = note
    with Channel._from_device(SmallDevice(driver), keys=KEY) as channel:
        del sources[:]
        opened = channel.to_device(sealed, framework="cupy")
        assert np.array_equal(driver.read(opened), plain)
        # The slab that brings the key does not, nor those that are small.
        assert [size for is_own, size in sources if is_own and size < 3 * CHUNK_SIZE] == []
        assert (sources[0][0], any(is_own for is_own, _ in sources)) == (False, own)
        for chunk in (0, 9, 30):
            bad = tampered(sealed, chunk_offset(chunk))
            with pytest.raises(AuthenticationError, match=f"chunk {chunk}"):
                channel.to_device(bad, out=opened)
            assert not driver.read(opened).any()
        rows = sealed[:: CHUNK_SIZE // 3]
        assert np.array_equal(driver.read(channel.to_device(rows, framework="cupy")), plain[:: CHUNK_SIZE // 3])
    driver.stop()
    assert driver.violations == []


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
@each("room", [0, 16 << 10, 100 << 10])  # for nothing, for verdicts, and for one buffer
def test_a_process_without_enough_page_locked_memory_goes_on_with_pageable_and_says_so_once(mode, room):
    driver = FakeDriver(mode)
    driver.room, driver.pageable = room, True
    host_memory._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="Transfers go on with pageable memory") as said:
        assert moves(driver)
    assert [str(each.message).partition(".")[0] for each in said] == ["cuda:0 got no page-locked memory"]


def test_another_error_is_no_want_of_page_locked_memory():
    driver = FakeDriver()
    driver.fail_at(1)
    with pytest.raises(DeviceError, match="injected"):
        host_memory.staging_memory(driver, 64, pageable=False)


# A GPU that was not set ready.


@each("mode", ["serial", "confidential", "held"])
def test_a_gpu_that_is_not_ready_is_an_error_with_what_to_do(mode):
    driver = FakeDriver(mode)
    driver.ready = False
    with pytest.raises(DeviceError, match="nvidia-smi conf-compute -srs 1"):
        device.CudaDevice(driver)
    driver.ready = True
    rig = Rig(mode)
    array = rig.array(MESSAGE.plain.size)
    assert rig.open(MESSAGE, array).result() is None
    for each_driver in (driver, rig.driver):
        each_driver.stop()
