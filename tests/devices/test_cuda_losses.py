"""Commands that are lost on their way to a device, and links that fail: each is told, and no key is left."""

import ctypes
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import engines
from helpers.cases import each
from helpers.crossings import KEY, MULTIPROCESSORS
from helpers.cuda_rig import Message, Opened, begin, device_of, large, read_words, whole, within
from helpers.fake_cuda import MODES, FakeDriver, FakeMemory
from helpers.processes import run_python
from helpers.tampering import tampered

import fastrack
from fastrack import AuthenticationError, DeviceError
from fastrack._crypto import message_keys
from fastrack._devices.cuda import buffers, link, streams
from fastrack.format import CHUNK_SIZE, chunk_offset

EVERY = (*MODES, "held")
PLAIN = np.random.default_rng(0).integers(1, 256, 5000, np.uint8)
SEALED = fastrack.seal(PLAIN, KEY, name="x")


@pytest.fixture(params=EVERY)
def device(request):
    device = large(request.param)
    yield device
    device.close()


@pytest.fixture
def freed(monkeypatch):
    """Memory of the device as it was given back."""
    found = []

    def note(self):
        block = self._space.blocks.pop(self.pointer, None)
        if block is not None:
            found.append(block.tobytes())

    monkeypatch.setattr(FakeMemory, "__del__", note)
    return found


# What is told.


def test_an_error_of_a_call_that_does_not_wait_does_not_say_that_arrays_hold_zeros_if_something_was_lost(device):
    out = device.array(5000)
    device.channel.to_device(fastrack.seal(PLAIN[::-1].copy(), KEY, name="y"), out=out)
    device.lose("launch")
    device.channel.to_device(SEALED, out=out, non_blocking=True)
    with pytest.raises(AuthenticationError, match=r"has not run, or not told, .* may hold anything"):
        device.channel.synchronize()


@each("number", [0, 1])
@pytest.mark.slow
def test_no_message_of_a_nest_is_blamed_for_what_was_lost(number):
    for mode in EVERY:
        device = large(mode)
        nest = [fastrack.seal(np.full(8192, 7, np.uint8), KEY, name=f"t{index}") for index in range(200)]
        outs = [device.array(8192) for _ in nest]
        device.lose("launch", number)
        device.channel.to_device(nest, out=outs, non_blocking=True)
        with pytest.raises(AuthenticationError, match="all tensors of the call") as caught:
            device.channel.synchronize()
        assert caught.value.chunk is None
        device.close()


@pytest.mark.slow
@each("kind", ["launch", "download"])
@each("mode", EVERY)
def test_each_slab_of_a_seal_that_is_lost_is_told_and_leaves_no_state_behind(mode, kind):
    opened = Opened(mode, 3)
    plain = np.random.default_rng(0).integers(1, 256, 50 * CHUNK_SIZE + 5, np.uint8)
    x, sealed, calls = opened.driver.array(plain), fastrack.seal(plain, opened.KEY), opened.driver.calls[kind]
    opened.channel.to_host(x, key=opened.KEY)
    count, original = opened.driver.calls[kind] - calls, getattr(opened.driver, kind)
    assert count > 3
    for number in range(count):
        opened.lose(kind, number)
        message = np.zeros(len(sealed.message), np.uint8)
        with pytest.raises(DeviceError, match="seals"):
            opened.channel.seal_message(x, sealed.context, opened.KEY, message)
        assert not message[56:].any()
        setattr(opened.driver, kind, original)
    back = opened.channel.to_host(x, key=opened.KEY)
    assert np.array_equal(fastrack.unseal(back, opened.KEY, framework="numpy"), plain)
    pool = opened.channel._device._states
    assert sum(map(len, pool._released.values())) == sum(len(block.states) for block in pool._blocks)
    opened.close()


# What is of another call.


def uploaded(device, action):
    """Return the bytes of each upload of an action."""
    found, original = [], device.driver.upload

    def note(pointer, source, size, stream):
        found.append(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(source)).tobytes())
        original(pointer, source, size, stream)

    device.driver.upload = note
    action()
    device.driver.upload = original
    return found


@each("part", [slice(None), slice(-80, None), slice(0, -80)])
def test_a_slab_of_an_earlier_call_is_told_and_so_are_its_keys_or_its_chunks(part):
    """The bus gives the device what it has taken before, under the same key of the link."""
    for mode in EVERY:
        device = large(mode)
        out = device.array(5000)
        (earlier,) = uploaded(device, lambda device=device, out=out: device.channel.to_device(SEALED, out=out))
        upload = device.driver.upload

        def replay(pointer, source, size, stream, upload=upload, earlier=earlier):
            slab = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(source))
            slab[part] = np.frombuffer(earlier, np.uint8)[part]
            upload(pointer, source, size, stream)

        device.driver.upload = replay
        other = fastrack.seal(PLAIN[::-1].copy(), KEY, name="y")
        with pytest.raises(AuthenticationError, match="'y', chunk 0"):
            device.channel.to_device(other, out=out)
        assert not device.driver.read(out).any()
        device.close()


def test_the_verdict_of_an_earlier_call_is_not_believed(monkeypatch):
    words = buffers.MessageState.words
    for mode in EVERY:
        device = large(mode)
        out = device.array(5000)
        device.channel.to_device(SEALED, out=out)
        (block,) = device.channel._device._states._blocks
        (earlier,) = (found for found in map(words.__get__, block.states) if found[:2] == (buffers.GOOD, buffers.GOOD))
        with monkeypatch.context() as patch:
            read_words(patch, lambda _, earlier=earlier: earlier)
            with pytest.raises(AuthenticationError, match="has not run, or not told"):
                device.channel.to_device(tampered(SEALED, chunk_offset(0)), out=out)
        assert not device.driver.read(out).any()
        device.close()


# The key of the link.


def secret_of(device):
    return device.driver.space.at(device.channel._device._link._key.state, 32).tobytes()


def test_a_key_whose_wiping_fails_is_not_given_back_as_it_is(device, limited, freed):
    out = device.array(5000)
    device.channel.to_device(SEALED, out=out)
    secret = secret_of(device)
    limited(link_pause=-1)
    fill, left = device.driver.fill, [True]

    def fail(pointer, value, size, stream):
        if size == link.STATE_SIZE + link.KEY_SIZE and left:
            left.clear()
            raise DeviceError("out of resources")
        fill(pointer, value, size, stream)

    device.driver.fill = fail
    with pytest.raises(DeviceError):
        device.channel.to_device(SEALED, out=out)
    for _ in range(4):
        device.channel.to_device(SEALED, out=out)
    device.driver.finish()
    gc.collect()
    assert not device.driver.holds(secret)
    assert not any(secret in memory for memory in freed)


@each("mode", EVERY)
@each("operation", ["launch", "fill", "record"])
def test_a_device_that_fails_to_open_leaves_no_key(mode, operation, monkeypatch, freed):
    driver, secrets, original = FakeDriver(mode, multiprocessors=MULTIPROCESSORS), [], link.Session.next_key

    def note(self):
        key = original(self)
        secrets.append(bytes(key.material[:32]))
        return key

    monkeypatch.setattr(link.Session, "next_key", note)
    call, failed = getattr(driver, operation), []

    def fail(*arguments):
        if secrets and not failed:
            failed.append(True)
            raise DeviceError("out of resources")
        call(*arguments)

    setattr(driver, operation, fail)
    with pytest.raises(DeviceError):
        device_of(driver)
    gc.collect()
    driver.stop()
    assert driver.violations == []
    assert not any(driver.holds(secret) for secret in secrets)
    assert not any(secret in memory for memory in freed for secret in secrets)


def test_to_replace_the_key_neither_takes_nor_gives_back_memory(device, limited, freed):
    """Each waits for the whole device, and so for the streams of others."""
    out = device.array(5000)
    for _ in range(3):
        device.channel.to_device(SEALED, out=out)
    before = device.driver.calls["memory"], device.driver.calls["host"]
    freed.clear()
    limited(link_pause=-1)
    for _ in range(6):
        device.channel.to_device(SEALED, out=out)
        device.driver.finish()
    gc.collect()
    assert (device.driver.calls["memory"], device.driver.calls["host"]) == before
    assert freed == []


ROOM = mmap.mmap(-1, 1 << 26)
SEEN = np.frombuffer(ROOM, np.uint8)


def places(hidden):
    """Find the bytes, given in disguise, in all memory of this process; the search leaves no copy of them."""
    found, own = set(), SEEN.ctypes.data
    with Path("/proc/self/mem").open("rb", 0) as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if not fields[1].startswith("rw") or (len(fields) > 5 and fields[5].startswith("[v")):
                continue
            start, stop = (int(part, 16) for part in fields[0].split("-"))
            while start < stop and not start <= own < stop:
                memory.seek(start)
                try:
                    size = memory.readinto(memoryview(ROOM)[: min(stop - start, SEEN.size)])
                except OSError:
                    break
                SEEN[:size] ^= 0x5A
                at = ROOM.find(hidden, 0, size)
                while at >= 0:
                    found.add(start + at)
                    at = ROOM.find(hidden, at + 1, size)
                SEEN[:size] = 0
                start += size
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="memory is searched through /proc")
@pytest.mark.parametrize("count", [2, *(pytest.param(each, marks=pytest.mark.nightly) for each in (1, 15, 22, 100))])
def test_to_wrap_keys_leaves_no_copy_of_them(count):
    # In a process of its own: to search all memory of one that has run other tests takes ten seconds.
    run_python(f"import {__name__} as tests; tests.wrap_and_search({count})")


def wrap_and_search(count):
    keys, hidden = message_keys.MessageKeys(count), [os.urandom(32) for _ in range(count)]
    for row, disguised in enumerate(hidden):
        material = bytearray(44)
        for index, byte in enumerate(disguised):
            material[index] = byte ^ 0x5A
        keys.put(row, material)
        material[:] = bytes(44)
    links = link.Link(streams.Pipeline(FakeDriver("serial")), engines.make(threads=1))
    links.open()
    before = places(hidden[-1][16:])
    links._key.wrap(keys, [5000] * count, range(count))
    keys.wipe()
    gc.collect()
    assert places(hidden[-1][16:]) <= before


# What is never finished.


def test_a_buffer_of_work_that_was_never_finished_is_not_waited_for_for_ever(device):
    message, cuda = Message(5000), device.channel._device
    array, buffer = device.array(5000), cuda.staging_buffer(1 << 20)
    work = begin(cuda, message, array)
    work.open(whole(message), buffer)
    del work
    gc.collect()
    within(5, buffer.wait)
    within(5, buffer.wipe)


@each("operation", ["fill", "record", "synchronize"])
def test_memory_of_states_that_could_not_be_made_is_kept_as_long_as_the_device_writes_there(device, operation, freed):
    states, call, failed = device.channel._device._states, getattr(device.driver, operation, None), []
    if operation == "synchronize":
        call = device.driver._synchronize

    def fail(*arguments, **options):
        if not failed:
            failed.append(True)
            raise DeviceError("injected")
        return call(*arguments, **options)

    setattr(device.driver, call.__name__, fail)
    with pytest.raises(DeviceError, match="injected"):
        states._allocate(128)
    gc.collect()
    assert all(len(memory) < link.STATE_SIZE for memory in freed)  # an array of the case before
    assert device.driver.read(device.channel.to_device(SEALED, framework="cupy")).tobytes() == PLAIN.tobytes()


@each("size", [link.STATE_SIZE + link.KEY_SIZE, link.KEY_SIZE])  # a replaced key is wiped, or another is made
def test_a_signal_handler_may_move_a_tensor_while_the_key_of_the_link_is_replaced(size, limited):
    limited(link_pause=-1)
    for mode in EVERY:
        device, moved, seen = large(mode), [], []
        out, other = device.array(5000), device.array(5000)
        issue, fill = device.driver.issue, device.driver.fill

        def note(pointer, value, length, stream, fill=fill, seen=seen):
            seen.append(length)
            fill(pointer, value, length, stream)

        def interrupted(commands, device=device, issue=issue, moved=moved, other=other, seen=seen, **options):
            seen.clear()
            issue(commands, **options)
            if size in seen and not moved:
                moved.append(True)
                device.channel.to_device(SEALED, out=other)

        device.driver.fill, device.driver.issue = note, interrupted

        def move(device=device, out=out):
            for _ in range(4):
                device.channel.to_device(SEALED, out=out)

        within(20, move)
        assert moved
        assert all(np.array_equal(device.driver.read(array), PLAIN) for array in (out, other))
        device.close()


@each("mode", ["confidential", "held"])
def test_a_signal_handler_may_move_a_tensor_while_a_verdict_is_read(mode):
    device = large(mode)
    out, other = device.array(5000), device.array(5000)
    issue, moved = device.driver.issue, []

    def interrupted(commands, **options):
        reads = not moved and device.driver.calls["download"]
        issue(commands, **options)
        if (
            reads != device.driver.calls["download"] and not moved
        ):  # as a handler that runs once the native call has ended
            moved.append(True)
            device.channel.to_device(SEALED, out=other, non_blocking=True)
            device.channel.synchronize()

    device.driver.issue = interrupted

    def move():
        device.channel.to_device(SEALED, out=out, non_blocking=True)
        device.channel.synchronize()

    within(20, move)
    assert moved
    assert all(np.array_equal(device.driver.read(array), PLAIN) for array in (out, other))
    device.close()
