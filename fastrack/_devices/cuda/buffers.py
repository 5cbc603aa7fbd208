"""Staging buffers and message states: pairs of host memory, page-locked as a rule, and CUDA device memory."""

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
from fastrack._devices.cuda.host_memory import staging_memory
from fastrack._devices.cuda.streams import Pipeline
from fastrack.errors import DeviceError
from fastrack.format import CHUNK_SIZE

_WORD = 8
_BLOCK_SIZE = 16  # of the cipher
_UNKNOWN = 0  # a verdict that has not arrived reads as "chunk 0 is bad"
_PER_ALLOCATION = 32  # states of a single message
_MIN_CAPACITY = 16  # keys of a state for several messages; a power of two
_MAX_SLOTS = 2048  # expanded keys that a state has room for; a power of two
KEY_SIZE = 48  # bytes of a key for `prepare`: `Key` in ``kernels/prepare.cuh``
_MATERIAL_SIZE = KEY_SIZE - 4
STATE_SIZE = 8704  # bytes of an expanded key: `State` in ``kernels/chunk.cuh``


class CudaStagingBuffer:
    """`StagingBuffer` in host memory of the faster kind, with device memory of the same size at `device_ptr`.

    After the event `copied` the next command may use the device memory, and after the event `used` both memories.
    `issued` is set when all commands that use the buffer were issued. Each list of commands brings its own
    `issued`.
    """

    def __init__(self, pipeline: Pipeline, size: int) -> None:
        driver = pipeline.driver
        self.memory = staging_memory(driver, size)
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
        except DeviceError:  # `wait` handles it
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

    `memory` holds the key of the gather plans, the keys of the messages, the verdict on the messages, and the verdict
    on the plans. The kernel `prepare` expands the keys of the messages into `slots` states, in turn. At the end the
    device's copy of `memory`, with wiped keys, overwrites `memory`. `plan_key`, `keys`, `plan_state`, `states`,
    `verdict` and `plan_verdict` are device addresses. Both kinds of states come first, so that one command wipes all
    used states. After the event `started` the arrays may be used; after `finished` the messages are complete.
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
        self._has_plans = True  # set first, so that after an interrupt the key is still wiped
        row, size = self.memory[:KEY_SIZE], len(key.material)
        row[:size] = np.frombuffer(key.material, np.uint8)
        row[_MATERIAL_SIZE:].view(np.uint32)[0] = _kind(8 * len(key.key), CHUNK_SIZE // _BLOCK_SIZE)

    @property
    def verdicts(self) -> tuple[int, int]:
        """The last downloaded verdicts: on the messages, and on the plans of their gathers."""
        messages, plans = self.memory[self._verdicts :].view(np.uint64).tolist()
        return messages, plans

    def upload_keys(self, commands: Commands, stream: Any, *, wipe: bool) -> None:
        """Upload the keys, and set the verdicts on the device to "no bad chunk"."""
        commands.fill(self.verdict, 0xFF, 2 * _WORD, stream)
        self._upload(commands, self.keys, self.memory[KEY_SIZE : self._verdicts], stream, wipe=wipe)

    def upload_plan_key(self, commands: Commands, stream: Any, *, wipe: bool) -> None:
        """Upload the key of the plans."""
        self._upload(commands, self.plan_key, self.memory[:KEY_SIZE], stream, wipe=wipe)

    def _upload(self, commands: Commands, pointer: int, keys: Bytes, stream: Any, *, wipe: bool) -> None:
        """Upload keys, and with `wipe` overwrite them on the host at once, not when the verdicts are downloaded."""
        commands.upload(pointer, keys, stream)
        if wipe:
            commands.record(self.finished, stream)
            commands.synchronize(self.finished)
            commands.copy(keys, np.zeros_like(keys))

    def download_verdicts(self, commands: Commands, stream: Any) -> None:
        """Download the verdicts over the keys on the host, after the device's were wiped, and reset the verdicts."""
        commands.download(self.memory, self.plan_key, stream)
        self._reset_verdicts(commands, stream)

    def clear(self, commands: Commands, stream: Any) -> None:
        """Wipe the keys and reset the verdicts on the device, after a failure."""
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
    """The message states of a device. A state is reused after its messages are complete."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._all: list[MessageState] = []
        self._allocations: list[object] = []
        # A deque needs no lock: the garbage collector releases states, too.
        self._released: dict[int, deque[MessageState]] = {}  # by the capacity of the states in keys
        self._lock = threading.Lock()
        with suppress(DeviceError):  # `acquire` raises it if memory is still short
            self.release(self._allocate())

    def acquire(self, count: int = 1) -> MessageState:
        """Return an idle state for `count` messages, or a new state."""
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
        """Take a state back. Its messages may still be in progress."""
        self._released_of(state.capacity).append(state)

    def wipe(self, pipeline: Pipeline) -> None:
        """Wipe every key on the device. A failed device keeps its memory until its CUDA context ends."""
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
        """Return a new state. States for one message share an allocation, since each allocation stops the device."""
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
    """Return the number of expanded keys that a state has room for on the device."""
    return min(capacity, _MAX_SLOTS)


def _kind(bits: Any, blocks: Any) -> Any:
    """Return the last word of a `Key`: the bits of the key, and the powers of H for chunks of `blocks` blocks."""
    return bits + (blocks + 1 << 16)
