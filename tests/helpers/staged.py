"""A device that reads nothing where it lies on the host, and does its work later, on a thread of its own."""

import queue
import random
import threading
import time

import numpy as np

from fastrack import Channel, DeviceError
from fastrack._crypto.gather import GatherPlan
from fastrack._devices import base, cpu
from fastrack._tensors import arrays
from fastrack._util.fork import register_fork_reset
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE

PATIENCE = 30  # seconds after which a test that waits has failed


def staged_channel(*, threads=None, **options):
    """A channel to such a device."""
    return Channel._from_device(StagedDevice(threads), threads=threads, **options)


class StagedDevice(cpu.CpuDevice):
    """Its arrays are NumPy's and torch's, its cipher is the host's; what differs is how it gets its work.

    `meddle(kind, slab)` is called on its thread before each piece of work: it may wait, and a `DeviceError` that it
    raises is the device's. `begun` has all work, `made` all buffers.
    """

    name = "staged"
    in_place = False
    lanes = 1
    max_slab_size = 4 * CHUNK_SIZE
    first_slab_size = CHUNK_SIZE
    segment_overhead = 100

    def __init__(self, threads=None):
        super().__init__(threads)
        self.meddle = Jitter()
        self.begun, self.made = [], []
        self.closed = False
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self):
        self._jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = None

    def staging_buffer(self, size):
        buffer = StagedBuffer(arrays.empty_bytes(size))
        self.made.append(buffer)
        return buffer

    def begin(self, messages, note=None):
        work = StagedWork(self, messages)
        self.begun.append(work)
        return work

    def settle(self):
        """Wait until all work is over."""
        for work in self.begun:
            assert work._over.wait(PATIENCE)

    def close(self):
        assert not self.closed
        assert all(work.done() for work in self.begun)
        assert all(buffer.ready() and not buffer.memory.any() for buffer in self.made)
        self.closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(PATIENCE)

    def do(self, job):
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def _work(self):
        while (job := self._jobs.get()) is not None:
            job()


class Jitter:
    """Delays of up to a fifth of a millisecond, half of them none; the same in every run."""

    def __init__(self):
        self._random = random.Random(0)

    def __call__(self, kind, slab):
        time.sleep(max(0, self._random.uniform(-2e-4, 2e-4)))


class Gate:
    """Lets the device's work of a kind wait until it is opened."""

    def __init__(self, kind="open"):
        self._kind = kind
        self._opened = threading.Event()

    def __call__(self, kind, slab):
        if kind == self._kind:
            assert self._opened.wait(PATIENCE)

    def open(self):
        self._opened.set()


def fail_at(kind, first):
    """Has the device fail when it comes to the slab that starts with that chunk."""

    def meddle(now, slab):
        if now == kind and slab.segments[0].first_chunk == first:
            raise DeviceError("the device fell off the bus")

    return meddle


class StagedBuffer:
    def __init__(self, memory):
        self.memory = memory
        self._idle = threading.Event()
        self._idle.set()

    def ready(self):
        return self._idle.is_set()

    def wait(self):
        assert self._idle.wait(PATIENCE)

    def wipe(self):
        self.wait()
        self.memory.fill(0)

    def mark_in_use(self):
        assert self.ready(), "a buffer was filled while the device still worked on it"
        self._idle.clear()

    def give_back(self):
        self._idle.set()


class StagedWork:
    lane = 0

    def __init__(self, device, messages):
        self._device = device
        self._messages = messages
        self._opener = Opener(device.engine, messages)
        self._bad, self._error = [], None
        self._over = threading.Event()
        self._ended = False

    def open(self, slab, buffer):
        stage(slab, self._messages, buffer)
        end = slab.sealed_size + self._device.segment_overhead * len(slab.segments)
        for segment in slab.segments:
            if segment.plan is not None:
                end = put_plan(buffer.memory, end, segment.plan)
        assert end <= buffer.memory.size, "the tables do not fit behind the chunks"
        self._do("open", slab, buffer, self._open)

    def seal(self, slab, buffer):
        buffer.wait()
        self._do("seal", slab, buffer, self._seal)

    def issue(self):
        pass

    def finish(self, *, wait=False):
        assert not self._ended, "work was ended twice"
        self._ended = True
        self._device.do(self._finish)
        if wait:
            assert self._over.wait(PATIENCE)

    def done(self):
        return self._over.is_set()

    def result(self):
        assert self._ended
        assert self._over.wait(PATIENCE)
        if self._error is not None:
            raise self._error
        return min(self._bad, default=None)

    def _do(self, kind, slab, buffer, job):
        assert not self._ended
        buffer.mark_in_use()

        def work():
            try:
                self._device.meddle(kind, slab)
                job(slab, buffer)
            except DeviceError as error:
                self._error = self._error or error
            finally:
                buffer.give_back()

        self._device.do(work)

    def _finish(self):
        self._device.meddle("end", None)
        self._opener.wipe()
        self._over.set()

    def _open(self, slab, buffer):
        end = slab.sealed_size + self._device.segment_overhead * len(slab.segments)
        for segment in slab.segments:
            plan = segment.plan
            if plan is not None:
                plan, end = get_plan(buffer.memory, end, plan)
            self._bad += self._opener.open(segment._replace(plan=plan), buffer.memory)

    def _seal(self, slab, buffer):
        for segment in slab.segments:
            self._opener.seal(segment, buffer.memory)


class Opener:
    """Opens and seals segments in a staging buffer with an engine of the host."""

    def __init__(self, engine, messages):
        self._engine = engine
        self._messages = messages
        self._schedules = []
        for number in range(len(messages)):
            self._schedules.append(engine.expand_key(messages.keys.key(number)))

    def open(self, segment, memory):
        """Return the bad chunks of a segment."""
        number, first, start, stop, size, offset, plan = segment
        schedule, target = self._schedules[number], self._messages.memories[number].array
        sealed = memory[offset : offset + size]
        if plan is None:
            bad = self._engine.open_run(schedule, sealed, target[start:stop], first)
            return [] if bad is None else [base.BadChunk(number, bad)]
        found = []
        for place, chunk in enumerate(plan.chunks.tolist()):
            plain = np.empty(min(CHUNK_SIZE, stop - chunk * CHUNK_SIZE), np.uint8)
            here = sealed[place * SEALED_CHUNK_SIZE :][:SEALED_CHUNK_SIZE]
            if self._engine.open_run(schedule, here, plain, chunk) is not None:
                found.append(base.BadChunk(number, chunk))
            for begin, there, length in plan.table[plan.starts[place] : plan.starts[place + 1]].tolist():
                target[there : there + length] = plain[begin : begin + length]
        return found

    def seal(self, segment, memory):
        """Seal a segment into the buffer, and copy it to its message."""
        number, first, start, stop, size, offset, _ = segment
        staged = memory[offset : offset + size]
        self._engine.seal_run(self._schedules[number], self._messages.memories[number].array[start:stop], staged, first)
        self._messages.sealed[number].array[first * SEALED_CHUNK_SIZE :][:size] = staged

    def wipe(self):
        for schedule in self._schedules:
            schedule.wipe()


def stage(slab, messages, buffer):
    """Copy the chunks of a slab to their offsets in a staging buffer, but for those that the caller has put there."""
    end = 0
    for number, first, _, _, size, offset, plan in slab.segments:
        assert offset >= end
        assert offset % 16 == 0
        end = offset + size
        sealed = messages.sealed[number]
        if sealed is not None:
            buffer.wait()
            chunks = (
                sealed.array[first * SEALED_CHUNK_SIZE :][:size] if plan is None else packed(sealed.array, plan.chunks)
            )
            buffer.memory[offset:end] = chunks
    assert end == slab.sealed_size


def packed(message, chunks):
    """The chunks of these numbers, side by side."""
    return np.concatenate([message[SEALED_CHUNK_SIZE * chunk :][:SEALED_CHUNK_SIZE] for chunk in chunks.tolist()])


def put_plan(memory, start, pieces):
    """Write a gather's plan into a staging buffer, as a device does, which holds it twice. Gives the end of it."""
    words = np.concatenate([pieces.chunks, pieces.starts, pieces.table.reshape(-1)])
    room, end = _plan_in(memory, start, words.size)
    room[:] = words
    return end


def get_plan(memory, start, shape):
    """Read it back, given one of the same shape, and give its end as well."""
    count, extent = shape.chunks.size, len(shape.table)
    room, end = _plan_in(memory, start, 2 * count + 1 + 3 * extent)
    words = room.copy()
    return GatherPlan(words[:count], words[count : 2 * count + 1], words[2 * count + 1 :].reshape(-1, 3)), end


def _plan_in(memory, start, words):
    start += -start % 16
    tags = 16 * (8 * words // CHUNK_SIZE + 1)
    end = start + 16 * words + tags + 16
    assert end <= memory.size, "the plan does not fit behind the chunks"
    return memory[start : start + 8 * words].view(np.int64), end
