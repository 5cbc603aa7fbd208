"""Memory of the CUDA device in pairs, page-locked host memory and device memory: staging buffers and message states."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

from fastrack._crypto.base import Bytes, address
from fastrack._crypto.cobblestone import MessageKey
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import Driver
from fastrack._devices.cuda.gather_plan import align
from fastrack._devices.cuda.key_state import STATE_SIZE, write_state
from fastrack._devices.cuda.streams import Pipeline
from fastrack.errors import DeviceError

_WORD = 8
_VERDICTS_END = STATE_SIZE + 2 * _WORD
_MESSAGE_SIZE = _VERDICTS_END + STATE_SIZE
_UNKNOWN = 0  # a verdict that has not arrived reads as "chunk 0 is bad"
_PER_ALLOCATION = 32  # message states


class CudaStagingBuffer:
    """`StagingBuffer` in page-locked memory, with device memory of the same size at `device_ptr`.

    The events `copied` and `used` are done when the device memory, and then both memories, may be read or written by
    the next command. `issued` is set when all commands that use it were issued; it is another one for each list of
    commands.
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
        except DeviceError:  # `wait` meets the same error and handles it
            return True

    def wait(self) -> None:
        if self._pipeline.forked:  # the thread that issues is in the parent
            return
        self.issued.wait()
        try:
            if not self._pipeline.driver.done(self.used):
                self._pipeline.synchronize(self.used)
        except DeviceError:  # the operation that issued the commands raises it
            self._pipeline.synchronize_all()

    def wipe(self) -> None:
        if self._pipeline.forked:  # the memory belongs to the parent
            return
        self.wait()
        self.memory.fill(0)
        commands, stream = Commands(), self._pipeline.uploads
        commands.fill(self.device_ptr, 0, self.memory.size, stream)
        commands.record(self.used, stream)
        commands.synchronize(self.used)
        try:
            self._pipeline.driver.issue(commands)
        except DeviceError:  # the memory held only ciphertext
            self._pipeline.synchronize_all()


class MessageState:
    """The key and the verdicts of a message, in page-locked memory of the host and on the device.

    `memory` holds the key as `write_state` expands it, the verdict, the verdict on the plans of gathers, and the
    expanded key of these plans. At the end of the message the device's copy, with wiped keys, overwrites it. `state`,
    `verdict`, `plan_verdict` and `plan_state` are the device addresses of the same. The event `started` is done when
    the array may be used, and `finished` when the message is complete.
    """

    def __init__(self, driver: Driver, memory: Bytes, pointer: int) -> None:
        self.memory = memory
        self.state = pointer
        self.verdict = pointer + STATE_SIZE
        self.plan_verdict = self.verdict + _WORD
        self.plan_state = self.plan_verdict + _WORD
        self._has_plans = False
        self.started, self.finished = driver.event(), driver.event()
        self.wipe_host()

    def load_key(self, key: MessageKey) -> None:
        """Expand a key into the host's memory, and reset the verdicts."""
        write_state(key, self.memory[:STATE_SIZE])
        self.memory[STATE_SIZE:_VERDICTS_END].view(np.uint64)[:] = _UNKNOWN
        self._has_plans = False

    def load_plan_key(self, key: MessageKey) -> None:
        """Expand the key of the plans into the host's memory."""
        self._has_plans = True  # first, so that an interrupt in `write_state` leaves no key that is not wiped
        write_state(key, self.memory[_VERDICTS_END:])

    @property
    def verdicts(self) -> tuple[int, int]:
        """The verdict on the message and that on the plans of its gathers, as last downloaded."""
        message, plans = self.memory[STATE_SIZE:_VERDICTS_END].view(np.uint64).tolist()
        return message, plans

    def upload_key(self, commands: Commands, stream: Any) -> None:
        """Upload the key, and set the device's verdicts to those on a message without a bad chunk."""
        commands.fill(self.verdict, 0xFF, 2 * _WORD, stream)
        commands.upload(self.state, self.memory[:STATE_SIZE], stream)

    def upload_plan_key(self, commands: Commands, stream: Any) -> None:
        """Upload the key of the plans."""
        commands.upload(self.plan_state, self.memory[_VERDICTS_END:], stream)

    def download_verdicts(self, commands: Commands, stream: Any) -> None:
        """Wipe the keys on the device, then on the host by the download of the verdicts, and reset the device's."""
        self.wipe_device(commands, stream)
        commands.download(self.memory if self._has_plans else self.memory[:_VERDICTS_END], self.state, stream)
        commands.fill(self.verdict, _UNKNOWN, 2 * _WORD, stream)
        commands.record(self.finished, stream)

    def wipe_host(self) -> None:
        """Wipe the keys on the host."""
        self.memory[:STATE_SIZE].fill(0)
        self.memory[_VERDICTS_END:].fill(0)

    def wipe_device(self, commands: Commands, stream: Any) -> None:
        """Wipe the keys on the device."""
        commands.fill(self.state, 0, STATE_SIZE, stream)
        if self._has_plans:
            commands.fill(self.plan_state, 0, STATE_SIZE, stream)


class MessageStatePool:
    """The message states of a device, reused after their message is complete."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._all: list[MessageState] = []
        self._allocations: list[object] = []
        # A deque needs no lock: the garbage collector releases states, too.
        self._released: deque[MessageState] = deque()
        self._lock = threading.Lock()
        with suppress(DeviceError):  # `acquire` raises it if there still is no memory
            self.release(self._allocate())

    def acquire(self) -> MessageState:
        """Return a state whose message is complete, or a new one."""
        for _ in range(len(self._released)):
            try:
                state = self._released.popleft()
            except IndexError:
                break
            if self._driver.done(state.finished):
                return state
            self._released.append(state)
        return self._allocate()

    def release(self, state: MessageState) -> None:
        """Take a state back, whose message may still be in progress."""
        self._released.append(state)

    def wipe(self, pipeline: Pipeline) -> None:
        """Wipe every key on the device. A device that failed keeps its memory until its CUDA context ends."""
        pipeline.synchronize_all()  # running kernels read the keys
        try:
            commands = Commands()
            for state in self._all:
                state.wipe_device(commands, pipeline.uploads)
            self._driver.issue(commands)
        except DeviceError:
            pass
        finally:
            pipeline.synchronize_all()
        for state in self._all:
            state.wipe_host()
        self._all.clear()
        self._released.clear()
        self._allocations.clear()

    def _allocate(self) -> MessageState:
        """Return one of several states in one allocation, as each allocation stops the whole device."""
        size = align(_MESSAGE_SIZE, 256)
        host, device = self._driver.host(_PER_ALLOCATION * size), self._driver.memory(_PER_ALLOCATION * size)
        with self._lock:
            self._allocations.append(device)
            made = [
                MessageState(self._driver, host[offset : offset + _MESSAGE_SIZE], device.pointer + offset)
                for offset in range(0, _PER_ALLOCATION * size, size)
            ]
            self._all += made
        first, *others = made
        self._released.extend(others)
        return first
