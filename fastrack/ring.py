"""The ring of staging slabs between a source and a device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fastrack.aead import Bytes
from fastrack.devices import Device
from fastrack.forks import renew_after_fork

__all__ = ["Ring"]


class Ring:
    """At most `depth` slots of `size` bytes, made when first needed and then used again.

    May be shared by threads. A forked child makes slots of its own.
    """

    def __init__(self, device: Device, size: int, depth: int) -> None:
        self._device = device
        self._size = size
        self._depth = depth
        self._closed = False
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        """Forget all slots: those of a forked child's parent stay with the parent."""
        self._free: queue.LifoQueue[Bytes] = queue.LifoQueue()
        self._permits = threading.Semaphore(self._depth)

    @contextmanager
    def slot(self) -> Iterator[Bytes]:
        """Lend a slot, after waiting for one if all are in use."""
        permits, free = self._permits, self._free
        with permits:
            try:
                slot = free.get_nowait()  # the one used last, which the caches still know
            except queue.Empty:
                slot = self._device.staging(self._size)
            try:
                yield slot
            finally:
                free.put(slot)
                if self._closed:
                    self._wipe()

    def close(self) -> None:
        """Wipe the slots and let go of them: those in use when they come back."""
        self._closed = True
        self._wipe()

    def _wipe(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._free.get_nowait().fill(0)
