"""A CUDA device issues its commands in few calls, on the right threads, and no caller's work holds up another's."""

import threading
import types

import numpy as np
import pytest
from helpers.cases import each
from helpers.cuda_rig import MESSAGE, Message, Rig, within
from helpers.fake_cuda import PER_THREAD, FakeArray, FakeDriver

import fastrack
from fastrack import Channel, Key
from fastrack._devices.cuda.device import CudaDevice
from fastrack._devices.cuda.streams import CONNECTIONS, LANES
from fastrack.format import CHUNK_SIZE

KEY = Key.from_bytes(bytes(range(32)))
SLABS = 40


class SmallDevice(CudaDevice):
    max_slab_size = first_slab_size = 2 * CHUNK_SIZE


@pytest.fixture(params=["lazy", "threads", "serial"])
def opened(request):
    driver = FakeDriver(request.param)
    opened = Channel._from_device(SmallDevice(driver), keys=KEY)
    yield driver, opened
    within(60, opened.close)
    driver.stop()
    assert driver.violations == []


# Returns to the interpreter, each of which may cost a busy one's whole turn.


def returns(driver, action):
    before = driver.returns
    action()
    return driver.returns - before


def test_a_sealed_message_returns_to_the_interpreter_once_for_many_slabs(opened):
    driver, channel = opened
    plain = np.random.default_rng(0).integers(0, 256, SLABS * 2 * CHUNK_SIZE - 5, np.uint8)
    sealed = fastrack.seal(plain, KEY)
    out = channel.to_device(sealed, framework="cupy")
    assert returns(driver, lambda: channel.to_device(sealed, out=out)) <= 4 + SLABS // 16
    assert np.array_equal(driver.read(out), plain)
    assert returns(driver, lambda: channel.to_host(out, key=KEY)) <= 4 + SLABS // 16
    # A plain one is sealed by another native call, slab by slab: each waits for its staging buffer, and is handed over.
    assert returns(driver, lambda: channel.to_device(plain, out=out)) <= 4 + 2 * SLABS


def test_a_small_message_returns_at_most_four_times(opened):
    driver, channel = opened
    sealed = fastrack.seal(np.arange(4096, dtype=np.uint8), KEY)
    out = channel.to_device(sealed, framework="cupy")
    for _ in range(20):
        driver.finish()
        assert returns(driver, lambda: channel.to_device(sealed, out=out)) <= 4


def test_a_small_message_to_an_idle_device_keeps_the_interpreters_lock():
    driver = FakeDriver("serial")
    driver.confidential = False  # a device that is done with everything at once
    with Channel._from_device(SmallDevice(driver), keys=KEY) as opened:
        sealed = fastrack.seal(np.arange(4096, dtype=np.uint8), KEY)
        out = opened.to_device(sealed, framework="cupy")
        assert returns(driver, lambda: opened.to_device(sealed, out=out)) == 0
        assert np.array_equal(driver.read(out), np.arange(4096, dtype=np.uint8))


def test_the_lock_is_given_up_for_a_caller_whose_stream_is_busy():
    rig = Rig("threads")
    gate = threading.Event()
    rig.driver.later(lambda: gate.wait(20))
    array = rig.array(100)
    message = Message(100)
    assert returns(rig.driver, lambda: rig.open(message, array)) >= 1  # what it puts there might block
    gate.set()
    rig.driver.finish()
    assert np.array_equal(rig.driver.read(array), message.plain)
    rig.close()


# Threads.


@each("seed", range(20))
def test_a_stream_that_belongs_to_a_thread_waits_for_the_result(seed):
    """In confidential mode too, where another thread issues: the same handle is another stream there."""
    rig = Rig("lazy", seed=2 * seed)
    rig.driver.confidential = rig.device._pipeline.threaded = True
    array = FakeArray(rig.driver, "u1", MESSAGE.plain.shape, stream=types.SimpleNamespace(ptr=PER_THREAD))
    memory = rig.driver.space.at(array.pointer, array.nbytes)
    before = []
    rig.driver.later(lambda: before.append(memory.copy()), array.stream)
    work = rig.open(MESSAGE, array)
    found = []
    rig.driver.later(lambda: found.append(memory.copy()), array.stream)
    rig.driver.finish()
    assert (before[0] == 0xA5).all(), "the array was written to while its owner was still at work on it"
    assert np.array_equal(found[0], MESSAGE.plain), "the caller's stream went on before the result was there"
    assert work.result() is None
    rig.close()


def test_the_callers_thread_issues_outside_of_confidential_mode():
    rig = Rig("threads")
    threads = set()
    upload = rig.driver.upload
    rig.driver.upload = lambda *operands: (threads.add(threading.current_thread()), upload(*operands))
    assert rig.open(MESSAGE, rig.array(MESSAGE.plain.size)).result() is None
    assert threads == {threading.current_thread()}
    rig.close()


# Callers.


@pytest.mark.parametrize("callers", [2, LANES])
def test_a_caller_whose_stream_is_busy_does_not_hold_up_others(callers):
    rig = Rig("threads")
    streams = [rig.driver._new_stream() for _ in range(callers)]
    arrays = [FakeArray(rig.driver, "u1", MESSAGE.plain.shape, stream=stream) for stream in streams]
    gate = threading.Event()
    rig.driver.later(lambda: gate.wait(20), streams[0])
    late = rig.beside()
    waiting = threading.Thread(target=late.open, args=(MESSAGE, arrays[0]), daemon=True)
    waiting.start()
    for array in arrays[1:]:
        own = rig.beside()
        work = within(10, lambda own=own, array=array: own.open(MESSAGE, array))
        assert within(10, work.result) is None
        assert np.array_equal(rig.driver.read(array), MESSAGE.plain)
    gate.set()
    waiting.join(20)
    assert np.array_equal(rig.driver.read(arrays[0]), MESSAGE.plain)
    late.slots.clear()
    rig.close()


def test_a_caller_whose_stream_is_busy_leaves_slots_to_others():
    driver = FakeDriver("threads")
    sealed = fastrack.seal(np.random.default_rng(0).integers(0, 256, SLABS * 2 * CHUNK_SIZE, np.uint8), KEY)
    gate = threading.Event()
    with Channel._from_device(SmallDevice(driver), keys=KEY) as opened:
        streams = driver.user, driver._new_stream()
        busy, idle = (FakeArray(driver, "u1", sealed.shape, stream=stream) for stream in streams)
        driver.later(lambda: gate.wait(20))
        waiting = threading.Thread(target=opened.to_device, args=(sealed,), kwargs={"out": busy}, daemon=True)
        waiting.start()
        within(10, lambda: opened.to_device(sealed, out=idle))
        assert waiting.is_alive()
        gate.set()
        waiting.join(20)
        assert np.array_equal(driver.read(busy), driver.read(idle))
    driver.stop()


def test_streams_beyond_the_lanes_share_them():
    rig = Rig()
    pipeline = rig.device._pipeline
    streams = [rig.driver._new_stream() for _ in range(LANES + 1)]
    lanes = [pipeline.lane(stream) for stream in streams]
    assert [lane.number for lane in lanes] == [*range(LANES), 0]
    assert [lane.shared for lane in lanes] == [True, *[False] * (LANES - 1), True]
    assert pipeline.lane(streams[1]) is lanes[1]


@each(("variable", "lanes"), [(None, 4), ("8", 4), ("32", 4), ("4", 3), ("2", 1), ("1", 1), ("0", 1), ("many", 4)])
def test_lanes_are_no_more_than_the_connections_of_the_hardware(monkeypatch, variable, lanes):
    monkeypatch.delenv(CONNECTIONS, raising=False)
    if variable is not None:
        monkeypatch.setenv(CONNECTIONS, variable)
    rig = Rig()
    assert rig.device.lanes == lanes
    numbers = {rig.device._pipeline.lane(rig.driver._new_stream()).number for _ in range(LANES + 1)}
    assert numbers == set(range(lanes))


def test_transfers_to_the_device_on_all_lanes_take_five_streams_and_to_the_host_one_more_a_lane():
    rig = Rig("lazy")
    before = len(rig.driver._streams)
    arrays = [FakeArray(rig.driver, "u1", MESSAGE.plain.shape, stream=rig.driver._new_stream()) for _ in range(LANES)]
    assert [rig.open(MESSAGE, array).result() for array in arrays] == [None] * LANES
    assert len(rig.driver._streams) - before - LANES == LANES  # uploads has one already
    sealed = rig.seal(MESSAGE, arrays[0])
    assert len(rig.driver._streams) - before - LANES == LANES + 1
    del sealed
    rig.close()


# Memory.


def test_many_outstanding_messages_share_few_allocations():
    rig = Rig("lazy")
    message = Message(100)
    arrays = [rig.array(100) for _ in range(100)]
    before = rig.driver.calls["host"] + rig.driver.calls["memory"]
    works = [rig.open(message, array) for array in arrays]
    assert before
    assert rig.driver.calls["host"] + rig.driver.calls["memory"] - before <= 2 * (100 // 32)
    assert [work.result() for work in works] == [None] * 100
    del works, arrays
    rig.close()
