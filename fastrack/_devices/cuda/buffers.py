"""Memory of the CUDA device in pairs, page-locked host memory and device memory: staging buffers and message states."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fastrack._crypto.base import Bytes, address
from fastrack._crypto.cobblestone import MessageKey
from fastrack._crypto.message_keys import MessageKeys
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import Driver
from fastrack._devices.cuda.gather_plan import align
from fastrack._devices.cuda.streams import Pipeline
from fastrack.errors import DeviceError
from fastrack.format import CHUNK_SIZE

_WORD = 8
_BLOCK_SIZE = 16  # of the cipher
_UNKNOWN = 0  # a verdict that has not arrived reads as "chunk 0 is bad"
_PER_ALLOCATION = 32  # states of a single message
_MIN_CAPACITY = 16  # keys of a state for several messages; a power of two
_MAX_SLOTS = 2048  # messages whose expanded keys are on the device at once; a power of two
KEY_SIZE = 48  # bytes of a key for `prepare`: `Key` in ``kernels/prepare.cuh``
_MATERIAL_SIZE = KEY_SIZE - 4
STATE_SIZE = 8704  # bytes of an expanded key: `State` in ``kernels/chunk.cuh``


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
    """The keys and the verdict of the messages of a call, in page-locked memory of the host and on the device.

    `memory` holds the key of the plans of gathers, the keys of the messages, the verdict on these, and that on the
    plans. The kernel `prepare` expands the keys of the messages into `slots` states, which they take in turn. At the
    end the device's copy of `memory`, with wiped keys, overwrites it. `plan_key`, `keys`, `plan_state`, `states`,
    `verdict` and `plan_verdict` are device addresses: both kinds of states come first, so that one command wipes what
    was used. The event `started` is done when the arrays may be used, and `finished` when the messages are complete.
    """

    def __init__(self, driver: Driver, memory: Bytes, pointer: int, capacity: int) -> None:
        self.memory = memory
        self.capacity = capacity
        self.slots = slots_for(capacity)
        self.plan_state = pointer
        self.states = pointer + STATE_SIZE
        self.plan_key = self.states + STATE_SIZE * self.slots
        self.keys = self.plan_key + KEY_SIZE
        self._verdicts = memory.size - 2 * _WORD
        self.verdict = self.plan_key + self._verdicts
        self.plan_verdict = self.verdict + _WORD
        self._has_plans = False
        self.started, self.finished = driver.event(), driver.event()
        self.wipe_host()

    def load_keys(self, keys: MessageKeys, nbytes: Sequence[int]) -> None:
        """Copy keys into the host's memory, and reset the verdicts."""
        self.memory[self._verdicts :].view(np.uint64)[:] = _UNKNOWN
        self._has_plans = False
        rows = self.memory[KEY_SIZE : KEY_SIZE * (1 + len(keys))].reshape(-1, KEY_SIZE)
        rows[:, :_MATERIAL_SIZE] = keys.memory[:, :_MATERIAL_SIZE]
        blocks = -(-np.minimum(np.asarray(nbytes, np.int64), CHUNK_SIZE) // _BLOCK_SIZE)
        rows[:, _MATERIAL_SIZE:].view(np.uint32)[:, 0] = _kind(np.asarray(keys.bits), blocks)

    def load_plan_key(self, key: MessageKey) -> None:
        """Copy the key of the plans into the host's memory."""
        self._has_plans = True  # first, so that an interrupt leaves no key that is not wiped
        row, size = self.memory[:KEY_SIZE], len(key.material)
        row[:size] = np.frombuffer(key.material, np.uint8)
        row[_MATERIAL_SIZE:].view(np.uint32)[0] = _kind(8 * len(key.key), CHUNK_SIZE // _BLOCK_SIZE)

    @property
    def verdicts(self) -> tuple[int, int]:
        """The verdict on the messages and that on the plans of their gathers, as last downloaded."""
        messages, plans = self.memory[self._verdicts :].view(np.uint64).tolist()
        return messages, plans

    def upload_keys(self, commands: Commands, stream: Any) -> None:
        """Upload the keys, and set the device's verdicts to those on messages without a bad chunk."""
        commands.fill(self.verdict, 0xFF, 2 * _WORD, stream)
        commands.upload(self.keys, self.memory[KEY_SIZE : self._verdicts], stream)

    def download_verdicts(self, commands: Commands, stream: Any) -> None:
        """Wipe the keys on the device, then on the host by the download of the verdicts, and reset the device's."""
        self.wipe_device(commands, stream)
        commands.download(self.memory, self.plan_key, stream)
        self._reset_verdicts(commands, stream)
        commands.record(self.finished, stream)

    def clear(self, commands: Commands, stream: Any) -> None:
        """Wipe the keys on the device, and reset its verdicts, after messages that failed."""
        self.wipe_device(commands, stream)
        self._reset_verdicts(commands, stream)

    def _reset_verdicts(self, commands: Commands, stream: Any) -> None:
        commands.fill(self.verdict, _UNKNOWN, 2 * _WORD, stream)

    def wipe_host(self) -> None:
        """Wipe the keys on the host."""
        self.memory[: self._verdicts].fill(0)

    def wipe_device(self, commands: Commands, stream: Any) -> None:
        """Wipe the keys on the device, expanded or not."""
        start = self.plan_state if self._has_plans else self.states
        commands.fill(start, 0, self.verdict - start, stream)


class MessageStatePool:
    """The message states of a device, reused after their messages are complete."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._all: list[MessageState] = []
        self._allocations: list[object] = []
        # A deque needs no lock: the garbage collector releases states, too.
        self._released: dict[int, deque[MessageState]] = {}  # by the number of keys that they have room for
        self._lock = threading.Lock()
        with suppress(DeviceError):  # `acquire` raises it if there still is no memory
            self.release(self._allocate())

    def acquire(self, count: int = 1) -> MessageState:
        """Return a state for so many messages, whose own messages are complete, or a new one."""
        capacity = 1 if count == 1 else max(_MIN_CAPACITY, 1 << (count - 1).bit_length())
        released = self._released_of(capacity)
        for _ in range(len(released)):
            try:
                state = released.popleft()
            except IndexError:
                break
            if self._driver.done(state.finished):
                return state
            released.append(state)
        return self._allocate(capacity)

    def release(self, state: MessageState) -> None:
        """Take a state back, whose message may still be in progress."""
        self._released_of(state.capacity).append(state)

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

    def _released_of(self, capacity: int) -> deque[MessageState]:
        return self._released.setdefault(capacity, deque())

    def _allocate(self, capacity: int = 1) -> MessageState:
        """Return a state, for one message one of several in one allocation, as each stops the whole device."""
        number = _PER_ALLOCATION if capacity == 1 else 1
        size = KEY_SIZE * (1 + capacity) + 2 * _WORD
        step = align(size + STATE_SIZE * (1 + slots_for(capacity)), 256)
        host, device = self._driver.host(number * size), self._driver.memory(number * step)
        with self._lock:
            self._allocations.append(device)
            made = [
                MessageState(
                    self._driver, host[index * size : (index + 1) * size], device.pointer + index * step, capacity
                )
                for index in range(number)
            ]
            self._all += made
        first, *others = made
        self._released_of(capacity).extend(others)
        return first


def slots_for(capacity: int) -> int:
    """Return the number of messages of a state whose expanded keys are on the device at once."""
    return min(capacity, _MAX_SLOTS)


def _kind(bits: Any, blocks: Any) -> Any:
    """Return the last word of a `Key`: the bits of the key, and the powers of H that chunks of so many blocks need."""
    return bits + (blocks + 1 << 16)
