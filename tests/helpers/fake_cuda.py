"""A CUDA device made of host memory, for tests, which does what it is asked as late, and in as odd an order, as it may.

It reads lists of commands as the native code does, and counts how often that would return to the interpreter.

Streams are queues. `lazy` runs an operation only when another one is queried, and picks the stream
by a seed: whatever order events leave open is taken at some seed. `threads` gives each stream a thread and random
delays. `serial` runs everything in the calling thread at once, and `confidential` is `threads` with what is reported of
a GPU in confidential mode (`docs/dev/confidential.md`). What no program may do is kept in `violations`.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import gc
import itertools
import os
import random
import sys
import threading
import time
import types
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from fastrack._devices.cuda import commands as numbers
from fastrack._devices.cuda import cupy_driver, nvrtc
from fastrack._devices.cuda.commands import POLL, REQUIRE_IDLE, SYNCHRONIZE, TIMESTAMP, Function
from fastrack._devices.cuda.driver import PageLockedMemoryError, View
from fastrack._tensors import dtypes
from fastrack.errors import DeviceError
from fastrack.format import SEALED_CHUNK_SIZE
from helpers.fake_kernels import run_kernel

MODES = ("lazy", "threads", "serial", "confidential")  # and "held", where what a copy keeps waiting matters
CONFIDENTIAL = ("confidential", "held")
PER_THREAD = 2  # cudaStreamPerThread: another stream in every thread
# The methods that have the names of their commands.
_METHODS = {
    getattr(numbers, name.upper()): name
    for name in ("wait", "record", "upload", "download", "fill", "launch", "copy", "pack")
}
_POISON = 0xA5
_find = ctypes.CDLL(None).memmem
_find.restype, _find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
_PATIENCE = 20


class FakeDriver:
    """`Driver`, and what tests ask of it besides."""

    def __init__(self, mode="lazy", seed=0, multiprocessors=4):
        self.name = "cuda:0"
        self.multiprocessors = multiprocessors
        self.confidential = mode in {"serial", *CONFIDENTIAL}
        self.compiled_by = "no compiler"
        self.copy_speeds = None
        self.functions = {name: Function(number, 512, 66400) for number, name in enumerate(nvrtc.KERNELS)}
        self.mode = mode
        self._has_threads = mode in {"threads", *CONFIDENTIAL}
        self._bridge = _Bridge()
        self.pageable = False  # whether copies may be of memory that is not page-locked
        self.room = None  # bytes of page-locked memory that there are, if it may run out
        self.ready = True  # False before a GPU in confidential mode was set ready: it refuses every call
        self.returns = 0  # from native code that had given up the interpreter's lock
        self.violations = []
        self.waiting = 0  # calls that wait for something on a stream
        self.launches = []
        self.calls = Counter()
        self.failed = None  # the operation that failed as it was told to
        self.flips = {}  # number of an upload: the byte of it that the bus turns over
        self.space = Space(self.violations)
        self._random = random.Random(seed)
        self._streams, self._by_number = [], {}
        self._hosts, self._pageable = [], []
        self._changed = threading.Condition(threading.RLock())
        self._fail_at = None
        self._since = 0
        self._sticky = False
        self._stopped = False
        self._process = os.getpid()
        self._numbers = itertools.count(PER_THREAD + 1)
        self._mine = threading.local()
        self._events = weakref.WeakValueDictionary()
        self.user = self._new_stream()

    # Memory, streams and events.

    def host(self, size):
        self._enter("host")
        if self.room is not None and size + sum(block.size for block in self.hosts()) > self.room:
            raise PageLockedMemoryError(f"{self.name} got no page-locked memory")
        block = np.full(size, _POISON, np.uint8)
        self._hosts.append(weakref.ref(block))
        return block

    def memory(self, size):
        self._enter("memory")
        return FakeMemory(self.space, size)

    def stream(self, *, high_priority):
        self._enter("stream")
        return self._new_stream()

    def event(self, *, timed=False):
        self._enter("event")
        event = FakeEvent(next(self._numbers))
        self._events[event.ptr] = event
        return event

    def reclaim(self):
        """Nothing is kept for later."""

    # Lists of commands.

    def issue(self, commands, *, threads=1, hold=False):
        assert threads >= 1
        code, place, held = commands.code, 0, hold
        while place < len(code):
            self._mine.held = held
            number, length = code[place], code[place + 1]
            operands = code[place + 2 : place + length].tolist()
            if number == TIMESTAMP:
                code[place + 2] = time.perf_counter_ns()
            elif number == REQUIRE_IDLE:
                held = held and self._is_idle(self._stream(operands[0]))
            elif number == POLL:
                held = held and (self._is_done(self._events[operands[0]]) or not operands[2])
            elif number == SYNCHRONIZE:
                self._synchronize(self._events[operands[0]], held=held)
            else:
                getattr(self, _METHODS[number])(*operands)
            place += length
        self.returns += not held

    def done(self, event):
        self._enter("done")
        return self._is_done(event)

    def elapsed(self, start, stop):
        """Return the seconds between two events, or in confidential mode what its events say instead."""
        self._enter("elapsed")
        if start.mark is None or stop.mark is None:
            raise DeviceError("an event that was never recorded was asked for its time")
        assert start.mark.happened, "an event was asked for its time before it happened"
        assert stop.mark.happened, "an event was asked for its time before it happened"
        seconds = stop.mark.time - start.mark.time
        return -seconds if self.mode in CONFIDENTIAL else seconds

    # What is put on streams, and what the host does.

    def upload(self, pointer, source, size, stream):
        number = self._enter("upload")
        held = self._held(source, size, "uploaded")
        staged = held.checked().copy() if self.mode in CONFIDENTIAL and not held.page_locked else None

        def run():
            place = self.space.at(pointer, held.size)
            place[:] = held.checked() if staged is None else staged
            if number in self.flips:
                place[self.flips[number] % held.size] ^= 1

        self._cross(self._stream(stream), run, blocks=staged is None)

    def download(self, target, pointer, size, stream):
        self._enter("download")
        held = self._held(target, size, "downloaded to")

        def run():
            held.checked()[:] = self.space.at(pointer, held.size)

        self._cross(self._stream(stream), run, blocks=True)

    def fill(self, pointer, value, size, stream):
        self._enter("fill")
        self._put(self._stream(stream), lambda: self.space.at(pointer, size).fill(value))

    def launch(self, function, blocks, threads, shared, stream, *arguments):
        self._enter("launch")
        kernel = nvrtc.KERNELS[function]
        self.launches.append((kernel, blocks, arguments))
        if blocks < 1 or min(arguments[:5]) < 0 or (threads, shared) != (512, 66400):
            self.violations.append(f"launched {kernel} with {blocks} blocks and {arguments}")
        self._put(self._stream(stream), lambda: run_kernel(self.space, self.violations, kernel, arguments))

    def record(self, event, stream):
        self._enter("record")
        with self._changed:
            self._events[event].mark = mark = _Mark()
            self._put(self._stream(stream), mark.set)

    def wait(self, stream, event):
        self._enter("wait")
        with self._changed:
            if self._events[event].mark is not None:
                self._put(self._stream(stream), lambda: None, self._events[event].mark)

    def copy(self, target, source, size):
        ctypes.memmove(target, source, size)

    def pack(self, target, source, size, chunks, count):
        numbers = (ctypes.c_int64 * count).from_address(chunks)
        for place, chunk in enumerate(numbers):
            self.copy(
                target + place * SEALED_CHUNK_SIZE,
                source + chunk * SEALED_CHUNK_SIZE,
                min(SEALED_CHUNK_SIZE, size - chunk * SEALED_CHUNK_SIZE),
            )

    def _cross(self, stream, run, *, blocks):
        """Copy between host and device. In confidential mode one copy at a time does so.

        With `blocks` its caller then waits for it, and for all work that was on the stream before.
        """
        if self.mode not in CONFIDENTIAL:
            self._put(stream, run)
            return
        over = _Mark()

        def cross():
            try:
                with self._bridge.crossed(stream):
                    run()
            finally:
                over.set()

        holds = blocks and self.mode == "held"
        with self._bridge.kept(stream) if holds else contextlib.nullcontext(), self._changed:
            if blocks and self._mine.held and stream.ops:
                self.violations.append("a copy waited for its stream with the interpreter's lock")
            self._put(stream, cross)
            if blocks:
                self._run_until(lambda: over.happened)

    def _synchronize(self, event, *, held):
        self._enter("synchronize")
        with self._changed:
            if event.mark is not None:
                if held and not event.mark.happened:
                    self.violations.append("waited for the device with the interpreter's lock")
                self._run_until(lambda mark=event.mark: mark.happened)

    def _is_done(self, event):
        with self._changed:
            if self.mode == "lazy":
                for _ in range(self._random.randrange(3)):
                    self._step()
            return event.mark is None or event.mark.happened

    def _is_idle(self, stream):
        with self._changed:
            return not stream.ops

    def _stream(self, number):
        if number != PER_THREAD:
            return self._by_number[number]
        if not hasattr(self._mine, "stream"):
            self._mine.stream = self._new_stream()
        return self._mine.stream

    def _held(self, address, size, what):
        """The page-locked memory that a copy is about to use."""
        for root in self.hosts():
            if root.ctypes.data <= address and address + size <= root.ctypes.data + root.size:
                return _Held(self.violations, root, address - root.ctypes.data, size, what, page_locked=True)
        assert self.pageable, f"{size} bytes that are {what} are not page-locked"
        root = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        self._pageable.append(root)
        return _Held(self.violations, root, 0, size, what, page_locked=False)

    # Arrays.

    def empty(self, dtype, shape, framework):
        self._enter("empty")
        return FakeArray(self, dtypes.to_numpy(dtype), shape)

    def view(self, array, *, writable):
        self._enter("view")
        if not isinstance(array, FakeArray):
            raise TypeError(f"expected an array on {self.name}, not {type(array).__name__}")
        return View(array.pointer, array.nbytes, array.stream, array)

    # What tests ask.

    def fail_at(self, number, *, sticky=False):
        """Let the call of that number from now on fail, the first being 1; all after it too if `sticky`."""
        self._fail_at, self._since, self._sticky, self.failed = number, 0, sticky, None

    def array(self, content):
        array = FakeArray(self, content.dtype, content.shape)
        self.space.at(array.pointer, array.nbytes)[:] = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        return array

    def later(self, action, stream=None):
        """Put something on the caller's stream."""
        self._put(self._stream((stream or self.user).ptr), action)

    def read(self, array):
        """Return the content that a kernel of the caller would find, put on the caller's stream now."""
        found = []
        self.later(lambda: found.append(self.space.at(array.pointer, array.nbytes).copy()), array.stream)
        with self._changed:
            self._run_until(lambda: found)
        return found[0].view(array.dtype).reshape(array.shape)

    def finish(self):
        with self._changed:
            self._run_until(lambda: not any(stream.ops for stream in self._streams))

    def stop(self):
        self.finish()
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for stream in self._streams:
            if stream.thread is not None:
                stream.thread.join(_PATIENCE)

    def holds(self, secret):
        """Search the device and page-locked memory for these bytes. To copy it first takes ten times as long."""
        return any(
            _find(block.ctypes.data, block.nbytes, bytes(secret), len(secret)) is not None
            for block in [*self.space.blocks.values(), *self.hosts()]
        )

    def hosts(self):
        return [block for ref in self._hosts if (block := ref()) is not None]

    def left(self):
        """Count the pieces of memory that were not given back."""
        gc.collect()
        return len(self.space.blocks) + len(self.hosts())

    # How it works.

    def _enter(self, operation):
        with self._changed:
            assert os.getpid() == self._process, f"{operation} in a forked child"
            if not self.ready:
                raise cupy_driver._device_error(self.name, _NotReadyError())
            self.calls[operation] += 1
            self._since += 1
            if self._fail_at is not None and (
                self._since == self._fail_at or (self._sticky and self._since > self._fail_at)
            ):
                self.failed = operation
                raise DeviceError(f"injected into {operation}")
            return self.calls[operation]

    def _new_stream(self):
        stream = _Stream(next(self._numbers), weight=self._random.choice([1, 8, 64]))
        self._streams.append(stream)
        self._by_number[stream.ptr] = stream
        if self._has_threads:
            stream.thread = threading.Thread(target=self._serve, args=(stream,), daemon=True)
            stream.thread.start()
        return stream

    def _put(self, stream, run, after=None):
        with self._changed:
            stream.ops.append(_Operation(run, after))
            if self.mode == "serial":
                self._run_until(lambda: not stream.ops)
            self._changed.notify_all()

    def _run_until(self, reached):
        if self._has_threads:
            self.waiting += 1
            happened = self._changed.wait_for(reached, _PATIENCE)
            self.waiting -= 1
        else:
            while not (happened := reached()) and self._step():
                pass
        if not happened:
            self.violations.append("waited for what never happens")

    def _step(self):
        ready = [stream for stream in self._streams if stream.ops and stream.ops[0].ready]
        if not ready:
            return False
        (stream,) = self._random.choices(ready, [stream.weight for stream in ready])
        self._run(stream.ops.popleft())
        return True

    def _serve(self, stream):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or (stream.ops and stream.ops[0].ready))
                if self._stopped:
                    return
            time.sleep(self._random.choice([0, 0, 0.0005]))
            self._run(stream.ops[0])
            with self._changed:
                stream.ops.popleft()
                self._changed.notify_all()

    def _run(self, operation):
        try:
            operation.run()
        except Exception as error:  # noqa: BLE001 - a plan that is not there yet may be anything
            self.violations.append(f"{type(error).__name__}: {error}")


class _NotReadyError(RuntimeError):
    status = 802


class Space:
    """Addresses of the device. What is read or written must lie in one piece of memory that is still there."""

    def __init__(self, violations):
        self.blocks = {}
        self._violations = violations
        self._next = 0x7F00_0000_0000
        self._lock = threading.Lock()

    def allocate(self, size):
        with self._lock:
            base = self._next
            self._next += -(-(size + 4096) // 256) * 256
            self.blocks[base] = np.full(size, _POISON, np.uint8)
        return base

    def at(self, pointer, size):
        if not size:
            return np.empty(0, np.uint8)
        with self._lock:
            bases = sorted(self.blocks)
            place = bisect.bisect_right(bases, pointer) - 1
            block = self.blocks[bases[place]] if place >= 0 else np.empty(0, np.uint8)
            start = pointer - bases[place] if place >= 0 else 0
        assert start + size <= block.size, f"{size} bytes at {pointer:#x} are not memory of the device"
        return block[start : start + size]


class FakeMemory:
    def __init__(self, space, size):
        self._space = space
        self.pointer = space.allocate(size)

    def __del__(self):
        self._space.blocks.pop(self.pointer, None)


class FakeArray:
    """The array of these tests' module `cupy`."""

    def __init__(self, driver, dtype, shape, stream=None):
        self.dtype = np.dtype(dtype)
        self.shape = tuple(shape)
        self.nbytes = self.dtype.itemsize * int(np.prod(self.shape))
        self.stream = stream or driver.user
        before = self.dtype.itemsize  # such as the address of a slice of another
        self._memory = FakeMemory(driver.space, before + self.nbytes)
        self.pointer = self._memory.pointer + before


@dataclass(eq=False)
class FakeEvent:
    ptr: int
    mark: _Mark | None = None


class _Mark:
    happened = False

    def set(self):
        self.time = time.perf_counter()
        self.happened = True


@dataclass(eq=False)
class _Stream:
    ptr: int
    weight: int
    ops: deque = field(default_factory=deque)
    thread: threading.Thread | None = None


@dataclass
class _Operation:
    run: object
    after: _Mark | None

    @property
    def ready(self):
        return self.after is None or self.after.happened


class _Bridge:
    """The way of copies between host and device in confidential mode: one at a time, of those that it is kept for."""

    def __init__(self):
        self._changed = threading.Condition()
        self._busy = False
        self._kept_for = None  # a stream, whose earlier copies cross too

    @contextlib.contextmanager
    def crossed(self, stream):
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and self._kept_for in (None, stream), _PATIENCE)
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    @contextlib.contextmanager
    def kept(self, stream):
        """Let copies of only one stream cross, while a copy on it waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._kept_for is None, _PATIENCE)
            self._kept_for = stream
        try:
            yield
        finally:
            with self._changed:
                self._kept_for = None
                self._changed.notify_all()


class _Held:
    """Host memory that a copy will use, which must stay there, and as it is, until then."""

    def __init__(self, violations, root, start, size, what, *, page_locked):
        self.size = size
        self.page_locked = page_locked
        self._root = weakref.ref(root)
        self._start = start
        self._before = root[start : start + size].tobytes()
        self._violations = violations
        self._what = what

    def checked(self):
        root = self._root()
        assert root is not None, f"page-locked memory was given back while it was {self._what}"
        memory = root[self._start : self._start + self.size]
        if memory.tobytes() != self._before:
            self._violations.append(f"page-locked memory was written to while it was {self._what}")
        return memory


def install(monkeypatch):
    """Have arrays of this device taken for CuPy's."""
    module = types.ModuleType("cupy")
    module.ndarray = FakeArray
    monkeypatch.setitem(sys.modules, "cupy", module)
