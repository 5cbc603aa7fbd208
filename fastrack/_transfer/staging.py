"""Staging buffers between a source and a device, and the sealer of plain tensors into them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self
from weakref import WeakSet

from fastrack._crypto.base import Bytes, Engine, Messages
from fastrack._devices.base import Device, Slab, StagingBuffer
from fastrack.errors import DeviceError

_LOOK_AGAIN = 0.2  # seconds: a buffer whose call was interrupted is not released, but deleted, of which no caller hears


class StagingPool:
    """A pool of at most `depth` buffers of `size` bytes, which are allocated when first needed. Thread-safe.

    A buffer may be released, and acquired again, while the device still works on it: its `wait` returns when the device
    is done.
    """

    def __init__(self, device: Device, size: int, depth: int) -> None:
        self.depth = depth
        self._device = device
        self._size = size
        self._closed = False
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Forget all buffers: in a forked child they belong to the parent."""
        self._returned: list[StagingBuffer] = []  # in the order of their release
        # No number, which an interrupt could part from what it counts.
        self._buffers: WeakSet[StagingBuffer] = WeakSet()
        self._change = threading.Condition()

    def acquire(self, *, block: bool) -> StagingBuffer | None:
        """Return a buffer, preferably one that the device is done with. Raise if there is no memory for any.

        If all are taken, wait for one if `block`, else return None. A caller that already holds a buffer must not
        block: two such callers would deadlock.
        """
        with self._change:
            while (buffer := self._choose()) is None and block:
                self._change.wait(_LOOK_AGAIN)
            return buffer

    def release(self, buffer: StagingBuffer) -> None:
        """Return a buffer to the pool, whether or not the device is done with it."""
        with self._change:
            if not self._closed:
                self._returned.append(buffer)
                self._change.notify()
                return
        _wipe([buffer])

    def reserve(self) -> None:
        """Allocate a buffer beforehand, if there is memory for it."""
        with suppress(DeviceError):  # raised when a buffer is needed and there still is no memory
            buffer = self.acquire(block=True)
            assert buffer is not None
            self.release(buffer)

    def detach(self) -> StagingBuffer | None:
        """Remove a free buffer from the pool and return it, or None if no buffer is free."""
        with self._change:
            if not self._returned:
                return None
            self._buffers.discard(self._returned[0])
            return self._returned.pop(0)

    def attach(self, buffer: StagingBuffer) -> None:
        """Count a buffer, detached from another pool and in use, as one of this pool."""
        with self._change:
            self._buffers.add(buffer)

    def close(self) -> None:
        """Wipe and drop the free buffers now, buffers in use when they are released."""
        with self._change:
            self._closed = True
            returned, self._returned = self._returned, []
            self._buffers.difference_update(returned)
            self._change.notify_all()
        _wipe(returned)

    def _choose(self) -> StagingBuffer | None:
        """Return a free buffer or a new one; None if all are taken."""
        for index in reversed(range(len(self._returned))):  # the one used last, which is in the caches
            if self._returned[index].ready():
                return self._returned.pop(index)
        if (count := len(self._buffers)) < self.depth:
            try:
                buffer = self._device.staging_buffer(self._size)
            except DeviceError:
                if not count:
                    raise
                self.depth = count  # without memory for another, the existing buffers have to do
            else:
                self._buffers.add(buffer)
                return buffer
        return self._returned.pop(0) if self._returned else None  # the device will be done with it first


class BufferLease:
    """The staging buffers of one operation, from the pool of its lane. Use it in a ``with`` statement."""

    def __init__(self, pools: Sequence[StagingPool], lane: int) -> None:
        self._pools = pools
        self._pool = pools[lane]
        self._held: deque[StagingBuffer] = deque()  # in the order of their last use

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, to_fill: bool = False) -> StagingBuffer:
        """Return another buffer of the pool, or else the held buffer that was used least recently.

        With `to_fill`, wait for the device: the caller may write to the buffer.
        """
        held = self._held
        buffer = None
        if not (held and held[0].ready()) and len(held) < self._pool.depth:
            buffer = self._acquire_another(block=not held)
        if buffer is None:
            buffer = held.popleft()
        held.append(buffer)
        if to_fill:
            buffer.wait()
        return buffer

    def release(self) -> None:
        """Return all buffers to the pool."""
        while self._held:
            self._pool.release(self._held.popleft())

    def _acquire_another(self, *, block: bool) -> StagingBuffer | None:
        """Acquire a buffer of the pool, or without memory for a first one, a free buffer of another pool."""
        try:
            return self._pool.acquire(block=block)
        except DeviceError:
            for other in self._pools:
                buffer = other.detach()
                if buffer is not None:
                    self._pool.attach(buffer)
                    return buffer
            raise


class PlainSealer:
    """The host's sealer of the plain messages of a call. As a context manager, it wipes its key schedules."""

    def __init__(self, engine: Engine, messages: Messages) -> None:
        self._engine = engine
        self._messages = messages
        self._schedules: dict[int, Any] = {}

    def concerns(self, slab: Slab) -> bool:
        """Return whether a slab has segments of plain messages."""
        plain = self._messages.plain
        return any(plain[segment.message] is not None for segment in slab.segments)

    def fill(self, slab: Slab, buffer: Bytes) -> None:
        """Seal the segments of plain messages into a staging buffer."""
        for number, first, start, stop, size, offset, _ in slab.segments:
            plain = self._messages.plain[number]
            if plain is None:
                continue
            schedule = self._schedules.get(number)
            if schedule is None:
                key = self._messages.keys.key(number)
                try:
                    schedule = self._schedules[number] = self._engine.expand_key(key)
                finally:
                    key.wipe()
            self._engine.seal_run(schedule, plain.array[start:stop], buffer[offset : offset + size], first)
            if stop == self._messages.nbytes[number]:
                self._schedules.pop(number).wipe()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._schedules:
            self._schedules.popitem()[1].wipe()


def _wipe(buffers: Sequence[StagingBuffer]) -> None:
    with ExitStack() as wiping:  # every buffer is wiped, even if one fails
        for buffer in buffers:
            wiping.callback(buffer.wipe)
            wiping.callback(buffer.wait)  # runs before the wipe, as the last one added
