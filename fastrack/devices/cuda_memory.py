"""Memory that the CUDA device owns in pairs, page-locked here and its like on the device: slots, and controls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from fastrack.cobblestone import MessageKey
from fastrack.devices.driver import Driver
from fastrack.devices.pipeline import Pipeline
from fastrack.errors import DeviceError

__all__ = ["UNKNOWN", "Control", "Controls", "CudaSlot", "align"]

_MATERIAL = 64  # bytes set aside for a key and a base nonce
_WORD = 8
UNKNOWN = 0  # what the host's copy of a verdict says before it is there: chunk 0 is bad


class CudaSlot:
    """`Slot` of page-locked memory, with a twin of the same size on the device.

    Attributes
    ----------
    twin : int
        Where that is.
    copied, used : event
        When its host memory, and its twin, may be written to again.
    """

    def __init__(self, pipeline: Pipeline, size: int) -> None:
        driver = pipeline.driver
        self.memory = driver.host(size)
        self.copied = driver.event()
        self.used = driver.event()
        self._device_memory = driver.memory(size)
        self.twin = self._device_memory.pointer
        self._pipeline = pipeline
        self._issued = threading.Event()  # another one for every time that it is lent
        self._issued.set()
        self._fail: Callable[[BaseException], None] = lambda _: pipeline.settle()

    def lend(self, fail: Callable[[BaseException], None]) -> threading.Event:
        """Say that the copy thread is about to be asked to use it, and who is to hear of what goes wrong.

        Returns
        -------
        threading.Event
            To be set when the copy thread has put on its streams all that will use it.
        """
        self._fail = fail
        self._issued = issued = threading.Event()
        return issued

    def ready(self) -> bool:
        if self._pipeline.forked:
            return True
        try:
            return self._issued.is_set() and self._pipeline.driver.done(self.copied)
        except DeviceError:  # `wait` will find out, and see to it
            return True

    def wait(self) -> None:
        if self._pipeline.forked:  # the thread it would wait for is not in this process
            return
        self._issued.wait()
        try:
            self._pipeline.driver.synchronize(self.copied)
        except DeviceError as error:
            self._fail(error)

    def wipe(self) -> None:
        if self._pipeline.forked:  # it is the parent's
            return
        self.wait()
        self.memory.fill(0)
        driver, kernels = self._pipeline.driver, self._pipeline.kernels
        try:
            driver.fill(self.twin, 0, self.memory.size, kernels)
            driver.record(self.used, kernels)
            driver.synchronize(self.used)
        except DeviceError:  # only ciphertext was there
            self._pipeline.settle()


class Control:
    """What a message needs besides its slabs: its key and its verdict, here and on the device.

    Attributes
    ----------
    key, answer : numpy.ndarray
        Page-locked: the key and the base nonce as they come, and the verdict.
    material, state, verdict : int
        Where on the device the same are, and what `prepare` makes of the key.
    started, sent, finished : event
        When the array may be touched, the key was uploaded, and all is done.
    """

    def __init__(self, driver: Driver) -> None:
        host = driver.host(_MATERIAL + _WORD)
        self.key, self.answer = host[:_MATERIAL], host[_MATERIAL:]
        self.forget()
        self.started, self.sent, self.finished = driver.event(), driver.event(), driver.event()
        self._secret = _MATERIAL + align(driver.state)
        self._memory = driver.memory(self._secret + _WORD)
        self.material = self._memory.pointer
        self.state = self.material + _MATERIAL
        self.verdict = self.material + self._secret

    def put(self, key: MessageKey) -> None:
        """Take a key here. The verdict is not known yet."""
        material = np.frombuffer(key.material, np.uint8)
        self.key[: material.size] = material
        self.answer.view(np.uint64)[0] = UNKNOWN

    @property
    def word(self) -> int:
        """The verdict, once it is here."""
        return int(self.answer.view(np.uint64)[0])

    def forget(self) -> None:
        """Wipe the key here."""
        self.key.fill(0)

    def clear(self, driver: Driver, stream: Any) -> None:
        """Wipe the key on the device, and what was made of it."""
        driver.fill(self.material, 0, self._secret, stream)


class Controls:
    """The controls of a device, used again when their message is finished."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._all: list[Control] = []
        self._returned: deque[Control] = deque()  # takes no lock, since what is collected as garbage comes back too

    def take(self) -> Control:
        for _ in range(len(self._returned)):
            try:
                control = self._returned.popleft()
            except IndexError:
                break
            if self._driver.done(control.finished):
                return control
            self._returned.append(control)
        control = Control(self._driver)
        self._all.append(control)
        return control

    def give_back(self, control: Control) -> None:
        self._returned.append(control)

    def wipe(self, pipeline: Pipeline) -> None:
        """Wipe every key that is left on the device. What one that gave up still holds goes with its context."""
        try:
            for control in self._all:
                control.clear(self._driver, pipeline.kernels)
        except DeviceError:
            pass
        finally:
            pipeline.settle()
        for control in self._all:
            control.forget()
        self._all.clear()
        self._returned.clear()


def align(size: int) -> int:
    """Round up to where the next thing may start."""
    return -(-size // 16) * 16
