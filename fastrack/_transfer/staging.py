"""The ring of staging slots between a source and a device."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress

from fastrack._devices.base import Device, StagingBuffer
from fastrack._util.fork import register_fork_reset
from fastrack.errors import DeviceError


class StagingPool:
    """At most `depth` slots of `size` bytes, made when first needed and then used again.

    A slot may come back, and be dealt again, while the device still works on it: its `wait` tells when that is over.
    May be shared by threads. A forked child makes slots of its own.
    """

    def __init__(self, device: Device, size: int, depth: int) -> None:
        self._device = device
        self._size = size
        self._depth = depth
        self._closed = False
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Forget all slots: those of a forked child's parent stay with the parent."""
        self._returned: list[StagingBuffer] = []  # the one that came back first stands first
        self._made = 0
        self._change = threading.Condition()

    def take(self, *, block: bool) -> StagingBuffer | None:
        """Deal a slot, one that the device is done with if there is any.

        If all are taken, wait for one if `patient`, else give None. A caller that holds slots already must not be
        patient: two such callers would wait for each other.
        """
        with self._change:
            while not self._returned and self._made == self._depth:
                if not block:
                    return None
                self._change.wait()
            slot = self._choose()
        if slot is not None:
            return slot
        try:
            return self._make()
        except DeviceError:  # there may be no memory for another: then those that there are have to do
            with self._change:
                if not self._made:
                    raise
                self._depth = self._made
            return self.take(block=block)

    def reserve(self) -> None:
        """Make a slot beforehand, if there is memory for it."""
        with suppress(DeviceError):  # told when it is needed and there still is none
            slot = self.take(block=True)
            assert slot is not None
            self.put(slot)

    def mark_in_use(self) -> StagingBuffer | None:
        """Give away a slot that is not taken, for good, or None."""
        with self._change:
            if not self._returned:
                return None
            self._made -= 1
            return self._returned.pop(0)

    def adopt(self, slot: StagingBuffer) -> None:
        """Take over a slot that another ring gave away, and that is in use."""
        with self._change:
            self._made += 1

    def put(self, slot: StagingBuffer) -> None:
        """Bring a slot back, whether or not the device is done with it."""
        with self._change:
            if not self._closed:
                self._returned.append(slot)
                self._change.notify()
                return
            self._made -= 1
            self._change.notify()
        _wipe([slot])

    def close(self) -> None:
        """Wipe the slots and let go of them: those that are taken when they come back."""
        with self._change:
            self._closed = True
            returned, self._returned = self._returned, []
            self._made -= len(returned)
            self._change.notify_all()
        _wipe(returned)

    def _choose(self) -> StagingBuffer | None:
        """The slot to deal next, or None, with its place taken, if it is to be made."""
        for place in reversed(range(len(self._returned))):  # the one used last, which the caches still know
            if self._returned[place].ready():
                return self._returned.pop(place)
        if self._made < self._depth:
            self._made += 1
            return None
        return self._returned.pop(0)  # the device will be done with it first

    def _make(self) -> StagingBuffer:
        try:
            return self._device.staging_buffer(self._size)
        except BaseException:
            with self._change:
                self._made -= 1
                self._change.notify()
            raise


def _wipe(slots: list[StagingBuffer]) -> None:
    with ExitStack() as wiping:  # all of them, whatever happens to one
        for slot in slots:
            wiping.callback(slot.wipe)
            wiping.callback(slot.wait)
