"""A device that reads nothing where it lies on the host, and does its work later, on a thread of its own."""

import queue
import random
import threading
import time

import numpy as np

from fastrack import Channel, DeviceError
from fastrack._crypto.base import GatherPlan
from fastrack._crypto.cobblestone import CHUNK_SIZE, SEALED_CHUNK_SIZE
from fastrack._devices.cpu import CpuDevice
from fastrack._tensors import arrays
from fastrack._util.fork import register_fork_reset

PATIENCE = 30  # seconds after which a test that waits has failed


def staged_channel(*, threads=None, **options):
    """A channel to such a device."""
    return Channel._from_device(StagedDevice(threads), threads=threads, **options)


class StagedDevice(CpuDevice):
    """Its arrays are NumPy's and torch's, its cipher is the host's; what differs is how it gets its work.

    `meddle(kind, slab)` is called on its thread before each piece of work: it may wait, and a `DeviceError` that it
    raises is the device's. `begun` has all work, `made` all slots.
    """

    name = "staged"
    in_place = False
    lanes = 1
    max_slab_size = 4 * CHUNK_SIZE
    first_slab_size = CHUNK_SIZE

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
        slot = StagedSlot(arrays.empty_bytes(size))
        self.made.append(slot)
        return slot

    def begin(self, key, memory, note=None):
        work = StagedWork(self, key, memory)
        self.begun.append(work)
        return work

    def close(self):
        assert not self.closed
        assert all(work.done() for work in self.begun)
        assert all(slot.ready() and not slot.memory.any() for slot in self.made)
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
        if now == kind and slab.first_chunk == first:
            raise DeviceError("the device fell off the bus")

    return meddle


class StagedSlot:
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
        assert self.ready(), "a slot was filled while the device still worked on it"
        self._idle.clear()

    def give_back(self):
        self._idle.set()


class StagedWork:
    lane = 0

    def __init__(self, device, key, memory):
        self._device = device
        self._engine = device.engine
        self._schedule = self._engine.expand_key(key)
        self._memory = memory
        self._bad, self._error = [], None
        self._over = threading.Event()
        self._ended = False

    def open(self, slab, sealed, slot):
        staged = slot.memory[: slab.sealed_size]
        if not np.shares_memory(sealed, slot.memory):
            slot.wait()
            np.copyto(staged, sealed if slab.plan is None else packed(sealed, slab.plan.chunks))
        if slab.plan is None:
            self._do("open", slab, staged, slot, self._open_run)
        else:
            put_plan(slot.memory, slab.sealed_size, slab.plan)
            self._do("open", slab, staged, slot, self._open_gather)

    def seal(self, slab, sealed, slot):
        slot.wait()

        def job(slab, staged, slot):
            self._seal_run(slab, staged, slot)
            np.copyto(sealed, staged)

        self._do("seal", slab, slot.memory[: slab.sealed_size], slot, job)

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

    def _do(self, kind, slab, sealed, slot, job):
        assert not self._ended
        assert np.shares_memory(sealed, slot.memory)
        slot.mark_in_use()

        def work():
            try:
                self._device.meddle(kind, slab)
                job(slab, sealed, slot)
            except DeviceError as error:
                self._error = self._error or error
            finally:
                slot.give_back()

        self._device.do(work)

    def _finish(self):
        self._device.meddle("end", None)
        self._schedule.wipe()
        self._over.set()

    def _open_run(self, slab, sealed, slot):
        plain = self._memory[slab.start : slab.stop]
        self._note(self._engine.open_run(self._schedule, sealed, plain, slab.first_chunk))

    def _open_gather(self, slab, sealed, slot):
        pieces = get_plan(slot.memory, sealed.size, slab.plan)
        for place, number in enumerate(pieces.chunks.tolist()):
            plain = np.empty(min(CHUNK_SIZE, slab.stop - number * CHUNK_SIZE), np.uint8)
            here = sealed[place * SEALED_CHUNK_SIZE :][:SEALED_CHUNK_SIZE]
            self._note(self._engine.open_run(self._schedule, here, plain, number))
            for offset, there, length in pieces.table[pieces.starts[place] : pieces.starts[place + 1]].tolist():
                self._memory[there : there + length] = plain[offset : offset + length]

    def _seal_run(self, slab, sealed, slot):
        self._engine.seal_run(self._schedule, self._memory[slab.start : slab.stop], sealed, slab.first_chunk)

    def _note(self, bad):
        if bad is not None:
            self._bad.append(bad)


def packed(message, chunks):
    """The chunks of these numbers, side by side."""
    return np.concatenate([message[SEALED_CHUNK_SIZE * chunk :][:SEALED_CHUNK_SIZE] for chunk in chunks.tolist()])


def put_plan(memory, sealed, pieces):
    """Write a gather's plan behind its chunks, as a device does, which holds it twice."""
    words = np.concatenate([pieces.chunks, pieces.starts, pieces.table.reshape(-1)])
    _plan_in(memory, sealed, words.size)[:] = words


def get_plan(memory, sealed, shape):
    """Read it back, given one of the same shape."""
    count, extent = shape.chunks.size, len(shape.table)
    words = _plan_in(memory, sealed, 2 * count + 1 + 3 * extent).copy()
    return GatherPlan(words[:count], words[count : 2 * count + 1], words[2 * count + 1 :].reshape(-1, 3))


def _plan_in(memory, sealed, words):
    start = sealed + -sealed % 16
    tags = 16 * (8 * words // CHUNK_SIZE + 1)
    assert start + 16 * words + tags + 16 <= memory.size, "the plan does not fit behind the chunks"
    return memory[start : start + 8 * words].view(np.int64)
