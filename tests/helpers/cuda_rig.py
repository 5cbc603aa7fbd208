"""A CUDA device over a driver made for tests, some slots, and a loop that is as plain as can be."""

import threading
from concurrent.futures import Future

import numpy as np

from fastrack import Channel, Key
from fastrack._crypto import base, cobblestone
from fastrack._devices.base import Segment, Slab
from fastrack._devices.cuda.buffers import MessageState
from fastrack._devices.cuda.device import CudaDevice
from fastrack._transfer.channel import Recorder, Transfer
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, ciphertext_size
from helpers import engines
from helpers.fake_cuda import FakeArray, FakeDriver
from helpers.messages import messages_of, raw_key
from helpers.runs import as_pieces

MULTIPROCESSORS = 132  # of an H100
PLAN = 4096  # bytes of a slot that are left for the plan of a gather


class Message:
    """A message, its key, and what it says."""

    def __init__(self, nbytes, bits=256, seed=0):
        random = np.random.default_rng((nbytes, bits, seed))
        self.secret = random.bytes(bits // 8)
        self.nonce = random.bytes(12)
        self.plain = random.integers(0, 256, nbytes, np.uint8)
        self.sealed = np.empty(ciphertext_size(nbytes), np.uint8)
        host = engines.make("openssl")
        host.seal_run(host.expand_key(self.key()), self.plain, self.sealed, 0)

    def key(self):
        return raw_key(self.secret, self.nonce)

    def spoilt(self, *chunks):
        """The same with the last byte of these chunks' tags changed, and zeros in their places of what it says."""
        self.sealed, self.plain = self.sealed.copy(), self.plain.copy()
        for chunk in chunks:
            self.sealed[min(SEALED_CHUNK_SIZE * (chunk + 1), self.sealed.size) - 1] ^= 1
            self.plain[CHUNK_SIZE * chunk : CHUNK_SIZE * (chunk + 1)] = 0
        return self


def sized(most, first):
    """Make a class of CUDA devices whose slabs have at most `most` chunks, the first one `first`."""

    class SmallDevice(CudaDevice):
        max_slab_size = most * CHUNK_SIZE
        first_slab_size = first * CHUNK_SIZE

    return SmallDevice


def device_of(driver):
    """Make a CUDA device over a driver."""
    return CudaDevice(driver)


SmallDevice = sized(most=4, first=2)


class Opened:
    """A channel to a device made for tests, with two keys."""

    KEY, SHORT = (Key.from_bytes(bytes(range(size))) for size in (32, 16))

    def __init__(self, mode="lazy", seed=0, device=SmallDevice, multiprocessors=4):
        self.driver = FakeDriver(mode, seed, multiprocessors)
        self.channel = Channel._from_device(device(self.driver), keys=[self.KEY, self.SHORT])

    def array(self, *shape):
        return FakeArray(self.driver, "u1", shape)

    def lose(self, kind, number=0):
        """Lose a command of a kind, so many after the next, as if the device had never been given it."""
        original, left = getattr(self.driver, kind), [number]

        def lose(*arguments):
            left[0] -= 1
            if left[0] == -1:
                self.driver.calls[kind] += 1
            else:
                original(*arguments)

        setattr(self.driver, kind, lose)

    def read(self, nest):
        return [self.driver.read(x) for x in nest]

    def assert_holds(self, x, expected):
        assert np.array_equal(self.driver.read(x), expected)

    def launched(self):
        """Return the kernels that calls have launched, without that which prepares the key of the link."""
        return [name for name, *_ in self.driver.launches if name != "prepare"]

    def close(self):
        within(60, self.channel.close)
        self.driver.stop()
        assert self.driver.violations == []


def large(mode):
    """Return a channel to a device as large as an H100."""
    return Opened(mode, device=CudaDevice, multiprocessors=MULTIPROCESSORS)


class Rig:
    """With an odd seed slots are filled here, slab by slab; else the device takes everything where it lies."""

    def __init__(self, mode="lazy", seed=0, *, slots=2, chunks=2, share=1.0, multiprocessors=4):
        self.staged = bool(seed % 2)
        self.driver = FakeDriver(mode, seed, multiprocessors)
        self.device = CudaDevice(self.driver, share=share)
        self.chunks = chunks
        self.slots = [self.device.staging_buffer(chunks * SEALED_CHUNK_SIZE + 16 + PLAN) for _ in range(slots)]
        self._turn = 0

    def take(self, *, wait=True):
        slot = self.slots[self._turn % len(self.slots)]
        self._turn += 1
        if wait:
            slot.wait()
        return slot

    def begin(self, message, array, *, writable=True):
        return self.begin_message(message.key(), self.device.view(array, writable=writable), message.plain.size)

    def begin_message(self, key, view, nbytes=0):
        return Work(self.device, messages_of([key], [nbytes], [view]))

    def open(self, message, array):
        """Open a message into an array, and end the work."""
        return self._ended(self.begin(message, array), self._open_slabs, message)

    def gather(self, message, pieces, array):
        return self._ended(self.begin(message, array), self._gather_slabs, message, pieces)

    def seal(self, message, array):
        """Seal an array as the message says. Gives the work and the sealed bytes."""
        out = np.zeros(message.sealed.size, np.uint8)
        return self._ended(self.begin(message, array, writable=False), self._seal_slabs, message, out), out

    def array(self, nbytes):
        return self.driver.empty("U8", (nbytes,), "cupy")

    def beside(self):
        """Another one on the same device, with slots of its own."""
        other = object.__new__(Rig)
        slots = [self.device.staging_buffer(slot.memory.size) for slot in self.slots]
        other.__dict__.update(self.__dict__, slots=slots)
        return other

    def leave(self):
        while self.slots:
            self.slots.pop().wipe()
        self.device.close()

    def close(self, arrays=None):
        """End all, and find nothing wrong, and nothing left but so many arrays if that is to be known."""
        self.leave()
        self.driver.stop()
        del self.device
        assert self.driver.violations == [], self.driver.violations
        assert arrays is None or self.driver.left() == arrays

    def slabs(self, message):
        size = message.plain.size
        for first, extent in cobblestone.iter_segments(size, self.chunks * CHUNK_SIZE):
            start, sealed = first * CHUNK_SIZE, cobblestone.segment_size(first, extent, size)
            yield Segment(0, first, start, start + extent, sealed)

    def _ended(self, work, use, *arguments):
        try:
            use(work, *arguments)
        finally:
            work.finish()
        return work

    def _open_slabs(self, work, message):
        for slab in self.slabs(message):
            here = message.sealed[SEALED_CHUNK_SIZE * slab.first_chunk :][: slab.sealed_size]
            self._give(work, slab, here, here)

    def _gather_slabs(self, work, message, pieces):
        for slab in cut(pieces, message.plain.size, self.chunks):
            parts = [message.sealed[SEALED_CHUNK_SIZE * chunk :][:SEALED_CHUNK_SIZE] for chunk in slab.plan.chunks]
            self._give(work, slab, message.sealed, np.concatenate(parts))

    def _give(self, work, slab, where_it_lies, chunks):
        slot = self.take(wait=self.staged)
        if self.staged:
            slot.memory[: slab.sealed_size] = chunks
            work.open(slab, slot.memory[: slab.sealed_size], slot)
            work.issue()
        else:
            work.open(slab, where_it_lies, slot)

    def _seal_slabs(self, work, message, out):
        flight = []

        def land():
            slab, slot = flight.pop(0)
            slot.wait()
            out[SEALED_CHUNK_SIZE * slab.first_chunk :][: slab.sealed_size] = slot.memory[: slab.sealed_size]

        for slab in self.slabs(message):
            slot = self.take(wait=False)
            place = out[SEALED_CHUNK_SIZE * slab.first_chunk :][: slab.sealed_size]
            if not self.staged:
                work.seal(slab, place, slot)
                continue
            if len(flight) == len(self.slots):
                land()
            work.seal(slab, slot.memory[: slab.sealed_size], slot)
            work.issue()
            flight.append((slab, slot))
        while flight:
            land()


class Work:
    """An operation of one message, which is given its segments one by one, each with the place of its chunks."""

    def __init__(self, device, messages):
        self.messages = messages
        self.operation = device.begin(messages)

    def __getattr__(self, name):
        return getattr(self.operation, name)

    def open(self, segment, sealed, slot):
        self._place(segment, sealed, slot)
        self.operation.open(Slab([segment], segment.sealed_size), slot)

    def seal(self, segment, sealed, slot):
        self._place(segment, sealed, slot)
        self.operation.seal(Slab([segment], segment.sealed_size), slot)

    def finish(self, *, wait=False):
        self.operation.finish(wait=wait)
        self.messages.keys.wipe()
        self.messages.memories[0] = None  # the caller's, who keeps no array alive

    def result(self):
        bad = self.operation.result()
        assert bad is None or bad.message == 0
        return None if bad is None else bad.chunk

    def _place(self, segment, sealed, slot):
        """Say where the message would lie if these are the chunks of the segment."""
        if np.shares_memory(sealed, slot.memory):
            self.messages.sealed[0] = None
        elif segment.plan is not None:
            self.messages.sealed[0] = base.HostMemory.of(sealed)
        else:
            start = segment.first_chunk * SEALED_CHUNK_SIZE
            self.messages.sealed[0] = base.HostMemory(sealed.ctypes.data - start, start + sealed.size, sealed)


def cut(pieces, nbytes, limit):
    """Slabs of a gather, of so many chunks."""
    sizes = np.minimum(ciphertext_size(nbytes) - pieces.chunks * SEALED_CHUNK_SIZE, SEALED_CHUNK_SIZE)
    for start in range(0, pieces.chunks.size, limit):
        stop = min(start + limit, pieces.chunks.size)
        bounds = pieces.starts[start : stop + 1]
        part = as_pieces(pieces.chunks[start:stop], bounds - bounds[0], pieces.table[bounds[0] : bounds[-1]])
        yield Segment(0, 0, 0, nbytes, int(sizes[start:stop].sum()), 0, part)


def move(channel, messages, stage="open", **options):
    """Move messages as a call of a channel does, but for what it makes of arrays. Return the operation."""
    record = Transfer(Recorder(), len(messages), sum(messages.nbytes), "to_device", None)
    return channel._move(messages, record, stage, **options)


def begin(device, message, array, *, sealed=None, writable=True):
    """Begin the work of one message as a channel does. Its chunks are those of the message, or lie in `sealed`."""
    view = device.view(array, writable=writable)
    sealed = message.sealed if sealed is None else sealed
    return device.begin(messages_of([message.key()], [message.plain.size], [view], sealed=[sealed]))


def whole(message):
    """Return the slab of a message of one chunk."""
    size, sealed = message.plain.size, message.sealed.size
    return Slab([Segment(0, 0, 0, size, sealed)], sealed)


MESSAGE = Message(5 * CHUNK_SIZE + 77)
PIECES = as_pieces([0, 2, 3, 5], range(5), [[0, 50 * n, 50] for n in range(4)])


def opened(rig):
    """Check that a device opens the message as it was."""
    array = rig.array(MESSAGE.plain.size)
    assert rig.open(MESSAGE, array).result() is None
    return np.array_equal(rig.driver.read(array), MESSAGE.plain)


def within(seconds, action):
    """Return or raise the outcome of `action`, if it comes in time."""
    outcome = Future()

    def run():
        try:
            outcome.set_result(action())
        except BaseException as error:  # noqa: BLE001 - raised again below
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(seconds)


def read_words(patch, read):
    """Have a function read the words that a device left in the state of a message, which it is given."""
    patch.setattr(MessageState, "words", property(read))
