"""A CUDA device issues its commands in few calls, on the right threads, and no caller's work holds up another's."""

import contextlib
import threading
import time
import types

import numpy as np
import pytest
from helpers.cases import each
from helpers.cuda_rig import MESSAGE, Message, Rig, move, sized, within
from helpers.fake_cuda import MODES, PER_THREAD, FakeArray, FakeDriver
from helpers.messages import messages_of
from helpers.tampering import tampered

import fastrack
from fastrack import AuthenticationError, Channel, Key
from fastrack._devices.cuda.streams import CONNECTIONS, LANES
from fastrack.format import CHUNK_SIZE, chunk_offset

KEY = Key.from_bytes(bytes(range(32)))
SLABS = 40


SmallDevice = sized(most=2, first=2)


@pytest.fixture(params=MODES)
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
    """The same handle is another stream in another thread."""
    rig = Rig("lazy", seed=2 * seed)
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


@each("mode", MODES)
def test_the_callers_thread_issues(mode):
    rig = Rig(mode)
    threads = set()
    upload = rig.driver.upload
    rig.driver.upload = lambda *operands: (threads.add(threading.current_thread()), upload(*operands))
    assert rig.open(MESSAGE, rig.array(MESSAGE.plain.size)).result() is None
    assert threads == {threading.current_thread()}
    rig.close()


# Callers.


def stuck(driver):
    """Wait until a call has waited on a stream for a while."""
    begin = time.monotonic()
    while time.monotonic() < begin + 0.05:
        time.sleep(0.001)
        begin = begin if driver.waiting else time.monotonic()


@pytest.mark.parametrize("mode", ["threads", "confidential", "held"])
@pytest.mark.parametrize("callers", [2, LANES])
def test_a_caller_whose_stream_is_busy_does_not_hold_up_others(callers, mode):
    rig = Rig(mode)
    streams = [rig.driver._new_stream() for _ in range(callers)]
    arrays = [FakeArray(rig.driver, "u1", MESSAGE.plain.shape, stream=stream) for stream in streams]
    gate = threading.Event()
    rig.driver.later(lambda: gate.wait(20), streams[0])
    late = rig.beside()
    waiting = threading.Thread(target=late.open, args=(MESSAGE, arrays[0]), daemon=True)
    waiting.start()
    stuck(rig.driver)
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


@pytest.mark.parametrize("chunks", [1, SLABS * 2])
@pytest.mark.parametrize("mode", ["threads", "confidential", "held"])
def test_a_caller_whose_stream_is_busy_leaves_slots_to_others(mode, chunks):
    driver = FakeDriver(mode)
    sealed = fastrack.seal(np.random.default_rng(0).integers(0, 256, chunks * CHUNK_SIZE, np.uint8), KEY)
    gate = threading.Event()
    with Channel._from_device(SmallDevice(driver), keys=KEY) as opened:
        streams = driver.user, driver._new_stream()
        busy, idle = (FakeArray(driver, "u1", sealed.shape, stream=stream) for stream in streams)
        driver.later(lambda: gate.wait(20))
        waiting = threading.Thread(target=opened.to_device, args=(sealed,), kwargs={"out": busy}, daemon=True)
        waiting.start()
        stuck(driver)
        within(10, lambda: opened.to_device(sealed, out=idle))
        message = within(10, lambda: opened.to_host(idle, key=KEY))
        assert np.array_equal(fastrack.unseal(message, KEY, framework="numpy"), driver.read(idle))
        assert waiting.is_alive()
        gate.set()
        waiting.join(20)
        assert np.array_equal(driver.read(busy), driver.read(idle))
    driver.stop()


@pytest.mark.parametrize("mode", ["threads", "confidential", "held"])
def test_a_message_that_is_sealed_behind_a_busy_stream_does_not_hold_up_others(mode):
    driver = FakeDriver(mode)
    gate = threading.Event()
    with Channel._from_device(SmallDevice(driver), keys=KEY) as opened:
        plain = np.random.default_rng(0).integers(0, 256, SLABS * 2 * CHUNK_SIZE, np.uint8)
        sealed = fastrack.seal(plain, KEY)
        busy = opened.to_device(sealed, framework="cupy")
        idle = FakeArray(driver, "u1", plain.shape, stream=driver._new_stream())
        driver.later(lambda: gate.wait(20))
        made = []
        waiting = threading.Thread(target=lambda: made.append(opened.to_host(busy, key=KEY)), daemon=True)
        waiting.start()
        stuck(driver)
        within(10, lambda: opened.to_device(sealed, out=idle))
        within(10, lambda: opened.to_host(idle, key=KEY))
        assert waiting.is_alive()
        gate.set()
        waiting.join(20)
        assert np.array_equal(fastrack.unseal(made[0], KEY, framework="numpy"), plain)
        assert np.array_equal(driver.read(idle), plain)
    driver.stop()
    assert driver.violations == []


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


# Calls that do not wait.


class Busy:
    """A channel, and the caller's stream, on which a model is at work until `end`."""

    def __init__(self, mode, device=SmallDevice):
        self.driver = FakeDriver(mode)
        self.channel = Channel._from_device(device(self.driver), keys=KEY)
        self._gate = threading.Event()

    def begin(self):
        self._gate.clear()
        self.driver.later(lambda: self._gate.wait(20))

    def end(self):
        self._gate.set()

    def close(self):
        self.end()
        within(60, self.channel.close)
        self.driver.stop()
        assert self.driver.violations == []


@pytest.fixture(params=["threads", "confidential", "held"])
def busy(request):
    busy = Busy(request.param)
    yield busy
    busy.close()


PLAIN = np.random.default_rng(1).integers(0, 256, 3 * CHUNK_SIZE + 5, np.uint8)
ROWS = PLAIN[:48000].reshape(-1, 1000)


@pytest.mark.parametrize("rows", [False, True])
def test_a_call_that_does_not_wait_returns_while_its_own_stream_is_busy(busy, rows):
    sealed = fastrack.seal(ROWS, KEY, name="x")
    busy.begin()
    results = [
        within(
            10, lambda: busy.channel.to_device(sealed[[5, 1]] if rows else sealed, framework="cupy", non_blocking=True)
        )
        for _ in range(2)
    ]
    plain = within(10, lambda: busy.channel.to_device(ROWS, non_blocking=True))
    busy.end()
    for result in results:
        assert np.array_equal(busy.driver.read(result), ROWS[[5, 1]] if rows else ROWS)
    assert np.array_equal(busy.driver.read(plain), ROWS)
    busy.channel.synchronize()


def test_keys_are_off_the_host_before_the_caller_goes_on_in_confidential_mode():
    busy = Busy("confidential")
    message = Message(100)
    busy.begin()
    device = busy.channel._device
    memory = busy.driver.empty("U8", (100,), "cupy")
    view = device.view(memory, writable=True)
    messages = messages_of([message.key()], [100], [view], sealed=[message.sealed])
    operation = move(busy.channel, messages, wait=False)
    messages.keys.wipe()
    assert not operation.done()
    assert not any(message.secret in block.tobytes() for block in busy.driver.hosts())
    busy.end()
    assert operation.result() is None
    assert not busy.driver.holds(message.secret)
    busy.close()


@each("spoilt", [False, True])
def test_the_verdict_on_a_call_that_does_not_wait_is_read_when_it_is_asked_for(spoilt):
    busy = Busy("confidential")
    sealed = fastrack.seal(PLAIN, KEY, name="x")
    if spoilt:
        sealed = tampered(sealed, chunk_offset(1))
    busy.begin()
    results = [busy.channel.to_device(sealed, framework="cupy", non_blocking=True) for _ in range(3)]
    assert busy.driver.calls["download"] == 0
    busy.end()
    with pytest.raises(AuthenticationError, match="chunk 1") if spoilt else contextlib.nullcontext():
        busy.channel.synchronize()
    assert (len(results), busy.driver.calls["download"]) == (3, 1)  # all three together
    busy.close()


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
