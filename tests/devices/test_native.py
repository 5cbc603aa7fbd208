"""Lists of commands run as they are written, in one call, and copy all of what they are to copy, and nothing else."""

import threading
import time
import types

import numpy as np
import pytest
from helpers.boxes import all_boxes, replace_boxes, unserved
from helpers.cases import each
from helpers.reference import noise
from helpers.stub_cuda import NOT_READY, StubCuda
from numba import cfunc, int32, int64

from fastrack import DeviceError
from fastrack._crypto import workers
from fastrack._devices.cuda import native
from fastrack._devices.cuda.commands import NAMES, Commands, Function

MIB = 1 << 20
CONTEXT = 99


def handle(number):
    return types.SimpleNamespace(ptr=number)


@pytest.fixture
def libcuda():
    stub = StubCuda()
    yield stub
    assert stub.violations == []
    assert stub.contexts == []  # each list puts the caller's context back
    assert stub.mode == 0  # and the mode of the caller's thread


@pytest.fixture
def run(libcuda):
    return native.Native(libcuda.functions, CONTEXT).run


# Calls.


@pytest.mark.parametrize("hold", [False, True])
def test_every_command_makes_its_call(libcuda, run, hold):
    host = np.zeros(64, np.uint8)
    here = host.ctypes.data
    commands = Commands()
    commands.wait(handle(1), handle(2))
    commands.record(handle(3), handle(4))
    commands.upload(5, host[8:24], handle(6))
    commands.download(host[:7], 8, handle(9))
    commands.fill(10, 0xFF, 12, handle(13))
    commands.launch(Function(14, 512, 66400), 15, [2**38, 17, 2**63 - 1], handle(18))
    commands.synchronize(handle(19))
    commands.poll(handle(20), 0)
    assert run(commands, hold=hold) == (0, len(commands.code))
    assert libcuda.calls == [
        ("cuStreamWaitEvent", 1, 2, 0),
        ("cuEventRecord", 3, 4),
        ("cuMemcpyHtoDAsync", 5, here + 8, 16, 6),
        ("cuMemcpyDtoHAsync", here, 8, 7, 9),
        ("cuMemsetD8Async", 10, 0xFF, 12, 13),
        ("cuLaunchKernel", 14, 15, 1, 1, 512, 1, 1, 66400, 18, [2**38, 17, 2**63 - 1]),
        ("cuEventSynchronize", 19),
        ("cuEventQuery", 20),
    ]


def test_a_command_that_fails_ends_the_list_and_is_named(libcuda, run):
    commands = Commands()
    commands.record(handle(1), handle(2))
    commands.wait(handle(1), handle(2))
    commands.record(handle(3), handle(4))
    libcuda.status["cuStreamWaitEvent"] = 400
    status, place = run(commands)
    assert (status, NAMES[commands.code[place]]) == (400, "cuStreamWaitEvent")
    assert len(libcuda.calls) == 2
    assert run(Commands()) == (0, 0)
    libcuda.status["cuCtxPushCurrent"] = 201
    assert run(commands) == (201, 0)  # without the context no command runs
    assert len(libcuda.calls) == 2


def test_stamps_are_of_the_clock_that_timelines_use(run):
    commands = Commands()
    first, second = commands.timestamp(), commands.timestamp()
    before = time.perf_counter_ns()
    run(commands)
    assert before <= commands.code[first] <= commands.code[second] <= time.perf_counter_ns()


def test_a_stream_is_captured_or_not(libcuda, run):
    libcuda.capturing.add(5)
    commands = Commands()
    answers = [commands.capturing(handle(number)) for number in (4, 5)]
    run(commands, hold=True)
    assert [commands.code[answer] for answer in answers] == [0, 1]
    libcuda.status["cuStreamIsCapturing"] = 906  # of the default stream, while another one is captured
    assert run(commands, hold=True)[0] == 0
    assert [commands.code[answer] for answer in answers] == [1, 1]
    libcuda.status["cuStreamIsCapturing"] = 700  # something else is wrong
    assert run(commands, hold=True) == (700, 0)


@pytest.mark.parametrize("before", [0, 2])
def test_a_list_changes_the_mode_of_its_thread_towards_captures_only_meanwhile(libcuda, run, before):
    commands, modes = stopping(), []
    libcuda.mode, libcuda.happened = before, lambda _: modes.append(libcuda.mode)
    libcuda.status["cuEventQuery"] = [NOT_READY] * 1000
    assert run(commands, hold=True)[0] == native.STOPPED
    assert libcuda.mode == before
    libcuda.status["cuEventQuery"] = 700
    assert run(commands)[0] == 700
    assert libcuda.mode == before
    libcuda.status["cuCtxPushCurrent"] = 201  # no command runs, in whatever mode
    assert run(commands)[0] == 201
    assert modes == [1, 1]
    assert libcuda.mode == before
    libcuda.mode = 0


def test_a_mode_that_could_not_be_changed_is_not_changed_back(libcuda, run):
    libcuda.status["cuThreadExchangeStreamCaptureMode"] = [4, 0]
    assert run(Commands()) == (0, 0)
    assert libcuda.status["cuThreadExchangeStreamCaptureMode"] == [0]


# The interpreter's lock.


def stopping():
    commands = Commands()
    commands.require_idle(handle(1))
    commands.record(handle(2), handle(1))
    commands.poll(handle(2), 1000, stop=True)
    commands.synchronize(handle(2))
    return commands


def test_a_list_that_keeps_the_lock_stops_where_it_would_block_and_goes_on_without(libcuda, run):
    commands = stopping()
    libcuda.status["cuStreamQuery"] = NOT_READY
    status, place = run(commands, hold=True)
    assert status == native.STOPPED
    assert [name for name, *_ in libcuda.calls] == ["cuStreamQuery"]
    libcuda.status["cuEventQuery"] = NOT_READY
    assert run(commands, start=place) == (0, len(commands.code))
    assert libcuda.calls[-1] == ("cuEventSynchronize", 2)


def test_a_poll_gives_up_after_its_time(libcuda, run):
    commands = Commands()
    commands.poll(handle(2), 3_000_000, stop=True)
    libcuda.status["cuEventQuery"] = NOT_READY
    start = time.perf_counter_ns()
    assert run(commands, hold=True) == (native.STOPPED, len(commands.code))
    assert time.perf_counter_ns() - start >= 3_000_000
    libcuda.status["cuEventQuery"] = [NOT_READY, NOT_READY, 0]
    assert run(commands, hold=True) == (0, len(commands.code))


@pytest.mark.slow
@pytest.mark.parametrize("hold", [False, True])
def test_the_lock_is_kept_or_given_up(hold):
    """Another thread stands still meanwhile, or it does not."""
    never = cfunc(int32(int64))(lambda _: NOT_READY)  # which, unlike a function of ctypes, takes no lock
    good = cfunc(int32(int64))(lambda _: 0)
    functions = dict.fromkeys(StubCuda().functions, good.address) | {"cuEventQuery": never.address}
    commands = Commands()
    commands.poll(handle(1), 1_000_000_000)
    gaps, stop = [], threading.Event()

    def look_at_the_clock():
        last = time.perf_counter()
        while not stop.is_set():
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    run = native.Native(functions, 0).run
    run(Commands(), hold=hold)  # compiled by now
    thread = threading.Thread(target=look_at_the_clock, daemon=True)
    thread.start()
    assert run(commands, hold=hold)[0] == 0
    stop.set()
    thread.join()
    assert (max(gaps) > 0.95) is hold


# Copies. Those of one command are tested with those of fastrack._crypto.memcpy.


@pytest.mark.slow
def test_many_copies_of_one_list_each_see_what_the_one_before_left(run):
    """Helpers go from one copy to the next, and never work on one that is not there yet, or over."""
    first, second = noise(4 * MIB), np.empty(4 * MIB, np.uint8)
    expected = np.roll(first, 1)
    for _ in range(20):
        commands = Commands()
        for _ in range(6):
            commands.copy(second, first)
            commands.copy(second[1:], first[:-1])
            commands.copy(second[:1], first[-1:])
        run(commands, threads=8)
        assert np.array_equal(second, expected)


def one_copy(size):
    """A list of one copy, its target and its source."""
    target, source, commands = np.zeros(size, np.uint8), noise(size), Commands()
    commands.copy(target, source)
    return commands, target, source


def test_a_worker_that_does_not_begin_is_not_waited_for(run, monkeypatch):
    boxes = replace_boxes(monkeypatch, unserved(3))
    commands, target, source = one_copy(8 * MIB)
    run(commands, threads=4)
    assert np.array_equal(target, source)
    asked = [box[workers.ENTRY] != 0 for box in all_boxes(boxes)]
    assert asked == [workers.default_threads() > 1] * 3
    assert [box.state for box in all_boxes(boxes)] == [workers.FREE] * 3


def test_a_long_copy_asks_for_as_many_workers_as_it_was_given(run, monkeypatch):
    boxes = replace_boxes(monkeypatch, unserved(20))
    commands, target, source = one_copy(8 * MIB)
    run(commands, threads=13)
    assert np.array_equal(target, source)
    assert sum(box[workers.ENTRY] != 0 for box in all_boxes(boxes)) == (12 if workers.default_threads() > 1 else 0)


def test_short_copies_have_no_workers(run, monkeypatch):
    boxes = replace_boxes(monkeypatch, unserved(3))
    commands, target, source = one_copy(100_000)
    run(commands, threads=8)
    assert np.array_equal(target, source)
    assert not any(box[workers.ENTRY] for box in all_boxes(boxes))


# What is missing.


class Library:
    """libcuda, of which `cuGetProcAddress_v2` is called."""

    def __init__(self, lacks=()):
        self.asked = []
        self._lacks = lacks

    def cuGetProcAddress_v2(self, name, function, version, flags, status):  # noqa: N802
        self.asked.append((name.decode(), version.value, flags.value))
        if name.decode() in self._lacks:
            return 500
        function._obj.value = len(self.asked)
        return 0


def test_functions_are_found_by_name():
    library = Library()
    found = native.find_functions(library)
    assert set(found) >= set(NAMES.values())
    assert {(version, flags) for _, version, flags in library.asked} == {(12000, 0)}


@each("name", ["cuLaunchKernel", "cuCtxPushCurrent", "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode"])
def test_a_libcuda_without_one_of_them_is_said_so(name):
    with pytest.raises(DeviceError, match=rf"{name}.*driver"):
        native.find_functions(Library([name]))


def test_without_libcuda_it_says_what_to_install(monkeypatch):
    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(native.ctypes, "CDLL", refuse)
    with pytest.raises(DeviceError, match=r"driver.*device='cpu'"):
        native.find_functions()
    with pytest.raises(DeviceError, match="NVIDIA driver"):
        native.find_functions(types.SimpleNamespace())
