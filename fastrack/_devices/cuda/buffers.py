"""Memory that the CUDA device owns in pairs, page-locked here and its like on the device: slots, and controls."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

from fastrack._crypto.base import Bytes
from fastrack._crypto.cobblestone import MessageKey
from fastrack._devices.cuda.commands import Commands, address
from fastrack._devices.cuda.driver import Driver
from fastrack._devices.cuda.gather_plan import align
from fastrack._devices.cuda.key_state import write_state
from fastrack._devices.cuda.portable_key_state import STATE_SIZE
from fastrack._devices.cuda.streams import Pipeline
from fastrack.errors import DeviceError

_WORD = 8
_VERDICTS_END = STATE_SIZE + 2 * _WORD
_CONTROL_SIZE = _VERDICTS_END + STATE_SIZE
UNKNOWN = 0  # what the host's copy of a verdict says before it is there: chunk 0 is bad
_TOGETHER = 32  # controls of one allocation


class CudaSlot:
    """`Slot` of page-locked memory, with a twin of the same size on the device.

    Attributes
    ----------
    twin : int
        Where that is.
    copied, used : event
        When the twin, and after it both, may be read or written by who comes next.
    issued : threading.Event
        Set when all commands that use it were issued. Another one for every list of commands.
    """

    def __init__(self, pipeline: Pipeline, size: int) -> None:
        driver = pipeline.driver
        self.memory = driver.host(size)
        self.address = address(self.memory)
        self.copied = driver.event()
        self.used = driver.event()
        self._device_memory = driver.memory(size)
        self.device_ptr = self._device_memory.pointer
        self._pipeline = pipeline
        self.issued = threading.Event()
        self.issued.set()

    def ready(self) -> bool:
        if self._pipeline.forked:
            return True
        try:
            return self.issued.is_set() and self._pipeline.driver.done(self.used)
        except DeviceError:  # `wait` will find out, and see to it
            return True

    def wait(self) -> None:
        if self._pipeline.forked:  # the thread it would wait for is not in this process
            return
        self.issued.wait()
        try:
            if not self._pipeline.driver.done(self.used):
                self._pipeline.synchronize(self.used)
        except DeviceError:  # the work whose commands it were finds out too, and tells
            self._pipeline.settle()

    def wipe(self) -> None:
        if self._pipeline.forked:  # it is the parent's
            return
        self.wait()
        self.memory.fill(0)
        commands, stream = Commands(), self._pipeline.uploads
        commands.fill(self.device_ptr, 0, self.memory.size, stream)
        commands.record(self.used, stream)
        commands.synchronize(self.used)
        try:
            self._pipeline.driver.issue(commands)
        except DeviceError:  # only ciphertext was there
            self._pipeline.settle()


class MessageState:
    """What a message needs besides its slabs: its key and its verdict, here and on the device.

    Attributes
    ----------
    memory : numpy.ndarray
        Page-locked: what `write_state` makes of the key, the verdict, the verdict on the plans of gathers, and what
        `write_state` makes of the key of these plans. When the message is done the device's copy comes back over it, in
        which the keys are wiped.
    state, verdict, plan_verdict, plan_state : int
        Where on the device the same are.
    started, finished : event
        When the array may be touched, and when all is done.
    """

    def __init__(self, driver: Driver, memory: Bytes, pointer: int) -> None:
        self.memory = memory
        self.state = pointer
        self.verdict = pointer + STATE_SIZE
        self.plan_verdict = self.verdict + _WORD
        self.plan_state = self.plan_verdict + _WORD
        self._has_plans = False
        self.started, self.finished = driver.event(), driver.event()
        self.forget()

    def put(self, key: MessageKey) -> None:
        """Take a key here. The verdict is not known yet."""
        write_state(key, self.memory[:STATE_SIZE])
        self.memory[STATE_SIZE:_VERDICTS_END].view(np.uint64)[:] = UNKNOWN
        self._has_plans = False

    def put_plan_key(self, key: MessageKey) -> None:
        """Take the key of the plans here."""
        self._has_plans = True  # first, so that an interrupt leaves no key here that nothing wipes
        write_state(key, self.memory[_VERDICTS_END:])

    @property
    def words(self) -> tuple[int, int]:
        """The verdict on the message and that on the plans of its gathers, once they are here."""
        message, plans = self.memory[STATE_SIZE:_VERDICTS_END].view(np.uint64).tolist()
        return message, plans

    def forget(self) -> None:
        """Wipe the keys here."""
        self.memory[:STATE_SIZE].fill(0)
        self.memory[_VERDICTS_END:].fill(0)

    def start(self, commands: Commands, stream: Any) -> None:
        """Bring the key to the device, and the verdicts on a message without a bad chunk."""
        commands.fill(self.verdict, 0xFF, 2 * _WORD, stream)
        commands.upload(self.state, self.memory[:STATE_SIZE], stream)

    def start_plans(self, commands: Commands, stream: Any) -> None:
        """Bring the key of the plans to the device."""
        commands.upload(self.plan_state, self.memory[_VERDICTS_END:], stream)

    def finish(self, commands: Commands, stream: Any) -> None:
        """Wipe the keys on the device, then here, and bring the verdicts, which are not there for another message."""
        self.clear(commands, stream)
        commands.download(self.memory if self._has_plans else self.memory[:_VERDICTS_END], self.state, stream)
        commands.fill(self.verdict, UNKNOWN, 2 * _WORD, stream)
        commands.record(self.finished, stream)

    def clear(self, commands: Commands, stream: Any) -> None:
        """Wipe the keys on the device."""
        commands.fill(self.state, 0, STATE_SIZE, stream)
        if self._has_plans:
            commands.fill(self.plan_state, 0, STATE_SIZE, stream)


class Controls:
    """The controls of a device, used again when their message is finished."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._all: list[MessageState] = []
        self._blocks: list[object] = []
        self._returned: deque[MessageState] = (
            deque()
        )  # takes no lock, since what is collected as garbage comes back too
        self._lock = threading.Lock()
        with suppress(DeviceError):  # told when one is needed and there still is no memory
            self.give_back(self._make())

    def take(self) -> MessageState:
        """Return one whose message is finished, or a fresh one."""
        for _ in range(len(self._returned)):
            try:
                control = self._returned.popleft()
            except IndexError:
                break
            if self._driver.done(control.finished):
                return control
            self._returned.append(control)
        return self._make()

    def give_back(self, control: MessageState) -> None:
        self._returned.append(control)

    def wipe(self, pipeline: Pipeline) -> None:
        """Wipe every key that is left on the device. What one that gave up still holds goes with its context."""
        pipeline.settle()  # kernels under way need theirs
        try:
            commands = Commands()
            for control in self._all:
                control.clear(commands, pipeline.uploads)
            self._driver.issue(commands)
        except DeviceError:
            pass
        finally:
            pipeline.settle()
        for control in self._all:
            control.forget()
        self._all.clear()
        self._returned.clear()
        self._blocks.clear()

    def _make(self) -> MessageState:
        """Carve some out of one allocation, since each costs a call that holds up the whole device."""
        size = align(_CONTROL_SIZE, 256)
        host, device = self._driver.host(_TOGETHER * size), self._driver.memory(_TOGETHER * size)
        with self._lock:
            self._blocks.append(device)
            made = [
                MessageState(self._driver, host[place : place + _CONTROL_SIZE], device.pointer + place)
                for place in range(0, _TOGETHER * size, size)
            ]
            self._all += made
        first, *others = made
        self._returned.extend(others)
        return first
