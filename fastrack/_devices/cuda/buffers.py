"""Staging buffers and message states: pairs of host memory, page-locked as a rule, and CUDA device memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastrack._crypto.base import Bytes
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import Memory
from fastrack._devices.cuda.gather_plan import align
from fastrack._devices.cuda.host_memory import staging_memory
from fastrack._devices.cuda.launches import SPREAD
from fastrack._devices.cuda.link import STATE_SIZE, Link
from fastrack._devices.cuda.streams import Lane, Pipeline
from fastrack.errors import DeviceError

GOOD = 2**64 - 1  # the verdict on messages without a bad chunk
_UNKNOWN = 0  # no ticket: that of a verdict which has not arrived
_PLACE_SIZE = 64  # bytes for a verdict: `Verdict` in ``kernels/verdict.cuh``, and a bit for each of `SPREAD` blocks
_READ_SIZE = 24  # bytes of these that the host reads
_PER_ALLOCATION = 32  # states of a single message
_READ_EVERY = 0.005  # seconds: verdicts on calls that follow one another are downloaded together


class CudaStagingBuffer:
    """`StagingBuffer` in host memory of the faster kinds, with device memory of the same size at `device_ptr`.

    After the event `copied` the next command may use the device memory, and after the event `used` both memories.
    `issued` is set when all commands that use the buffer were issued. Each list of commands brings its own
    `issued`.
    """

    def __init__(self, pipeline: Pipeline, size: int) -> None:
        driver = pipeline.driver
        self._speeds = driver.copy_speeds
        self._is_pageable = self.prefers_pageable(size)
        self.memory = staging_memory(driver, size, pageable=self._is_pageable)
        self._other: Bytes | None = None  # of the other kind, once a copy is faster with it
        self.copied = driver.event()
        self.used = driver.event()
        self._device_memory = driver.memory(size)
        self.device_ptr = self._device_memory.pointer
        self._pipeline = pipeline
        self.issued = threading.Event()
        self.issued.set()
        self.lanes: tuple[Lane, ...] = ()  # whose work uses the buffer

    def source(self, size: int) -> Bytes:
        """Return the host memory for an upload of `size` bytes: `memory`, or other memory of the faster kind."""
        return self.memory if self._speeds is None else self._of_kind(self.prefers_pageable(size))

    def landing(self, size: int) -> Bytes:
        """Return the host memory for a download of `size` bytes: `memory`, or other memory of the faster kind."""
        return self.memory if self._speeds is None else self._of_kind(self._speeds.downloads.prefers_pageable(size))

    def prefers_pageable(self, size: int) -> bool:
        """Return whether an upload of `size` bytes is faster from pageable memory."""
        return self._speeds is not None and self._speeds.uploads.prefers_pageable(size)

    def _of_kind(self, pageable: bool) -> Bytes:
        if pageable == self._is_pageable:
            return self.memory
        if self._other is None:
            self._other = staging_memory(self._pipeline.driver, self.memory.size, pageable=pageable)
        return self._other

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
            self._pipeline.synchronize_all(*self.lanes)

    def wipe(self) -> None:
        if self._pipeline.forked:  # the memory belongs to the parent
            return
        self.wait()
        self.memory.fill(0)
        if self._other is not None:
            self._other.fill(0)
        commands, stream = Commands(), self._pipeline.uploads
        commands.fill(self.device_ptr, 0, self.memory.size, stream)
        commands.drain(stream, self.used)
        try:
            self._pipeline.driver.issue(commands)
        except DeviceError:  # the memory held only ciphertext
            self._pipeline.synchronize_all(*self.lanes)


class MessageState:
    """The verdict on the messages of a call, and room on the device for `slots` of their keys, expanded.

    `verdict` and `states` are device addresses. Unless `is_stale`, the device's verdict is as no launch has left it.
    After the event `started` the arrays may be used; after `finished` the messages are complete.
    """

    def __init__(self, pipeline: Pipeline, block: _Block, index: int, slots: int) -> None:
        self.block = block
        self.verdict = block.memory.pointer + index * _PLACE_SIZE
        self.states = block.memory.pointer + block.states_at + STATE_SIZE * slots * index
        self.slots = slots
        self.mirrored = slice(index * _PLACE_SIZE, index * _PLACE_SIZE + _READ_SIZE)
        self._words = block.words[index * _READ_SIZE : (index + 1) * _READ_SIZE]
        self.is_stale = False
        self.is_unread = False  # the call was issued, and its verdict not downloaded
        self.ended = 0.0  # when that began
        self.started, self.finished = pipeline.driver.event(), pipeline.driver.event()

    @property
    def words(self) -> tuple[int, int, int]:
        """The last downloaded verdict: the first bad chunk, the first bad chunk of a plan, and the ticket."""
        lowest, plan, ticket = self._words.view(np.uint64).tolist()
        return lowest, plan, ticket

    def begin(self, commands: Commands, stream: Any) -> None:
        """Reset the verdict before the first launch of a call, where an earlier call may have left another."""
        self._words.fill(_UNKNOWN)  # so that a verdict that does not arrive is not the one of before
        if self.is_stale:
            commands.fill(self.verdict, 0xFF, _PLACE_SIZE, stream)
        self.is_stale = True

    def download(self, commands: Commands, stream: Any) -> None:
        """Download the verdict."""
        commands.download(self._words, self.verdict, stream)

    def take_mirrored(self) -> None:
        """Take the verdict out of those that were downloaded together."""
        self._words[:] = self.block.mirror[self.mirrored]
        self.is_unread = False

    def wipe_device(self, commands: Commands, stream: Any) -> None:
        """Wipe the expanded keys on the device."""
        commands.fill(self.states, 0, STATE_SIZE * self.slots, stream)


@dataclass(slots=True)
class _Block:
    """Memory of message states: their verdicts side by side, and behind them their keys."""

    memory: Memory
    states_at: int
    words: Bytes
    mirror: Bytes  # of the verdicts of all, which `MessageStatePool.read` downloads
    states: list[MessageState] = field(default_factory=list)


class MessageStatePool:
    """The message states of a device. A state is reused after its messages are complete."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._driver = pipeline.driver
        self._blocks: list[_Block] = []
        # A deque needs no lock: the garbage collector releases states, too.
        self._released: dict[int, deque[MessageState]] = {}  # by the slots of the states
        self._lock = threading.RLock()  # a signal handler may move tensors while its thread reads a verdict
        with suppress(DeviceError):  # `acquire` raises it if memory is still short
            self.release(self._allocate(1))

    def acquire(self, count: int = 1) -> MessageState:
        """Return an idle state for `count` messages, or a new state."""
        slots = 1 if count == 1 else SPREAD
        released = self._released_of(slots)
        for _ in range(len(released)):
            try:
                state = released.popleft()
            except IndexError:
                break
            if self._driver.done(state.finished):
                with self._lock:  # `read` takes it no more for the earlier call
                    state.is_unread = False
                return state
            released.append(state)
        return self._allocate(slots)

    def release(self, state: MessageState) -> None:
        """Take a state back. Its messages may still be in progress."""
        self._released_of(state.slots).append(state)

    def read(self, state: MessageState) -> None:
        """Download the verdict on messages that are finished, and all others that are finished meanwhile."""
        with self._lock:
            if not state.is_unread:
                return
            block, uploads = state.block, self._pipeline.uploads
            unread = [(each, each.ended) for each in block.states if each.is_unread]
            finished = [(each, ended) for each, ended in unread if self._driver.done(each.finished)]
            commands, event = Commands(), self._driver.event()
            # Not into the words of each: a call that waits may be downloading there.
            commands.download(block.mirror, block.memory.pointer, uploads)
            commands.drain(uploads, event)
            self._driver.issue(commands)
            for each, ended in finished:
                if each.is_unread and each.ended == ended:  # else it was read, and may be of another call by now
                    each.take_mirrored()

    @staticmethod
    def is_due(state: MessageState) -> bool:
        """Return whether a verdict has waited for so long that it is worth a download, or needs none."""
        return not state.is_unread or time.monotonic() - state.ended > _READ_EVERY

    def wipe(self, link: Link) -> None:
        """Wipe every key on the device. A failed device keeps its memory until its CUDA context ends."""
        self._pipeline.synchronize_all()  # running kernels read the keys
        commands = Commands()
        link.wipe(commands, self._pipeline.uploads)
        for block in self._blocks:
            for state in block.states:
                state.wipe_device(commands, self._pipeline.uploads)
        try:
            self._driver.issue(commands)
        except DeviceError:
            pass
        finally:
            self._pipeline.synchronize_all()
        link.drop()
        for block in self._blocks:
            block.states.clear()  # which hold the block
        self._blocks.clear()
        self._released.clear()

    def _released_of(self, slots: int) -> deque[MessageState]:
        return self._released.setdefault(slots, deque())

    def _allocate(self, slots: int) -> MessageState:
        """Return a new state. States for one message share an allocation, since each allocation stops the device."""
        number = _PER_ALLOCATION if slots == 1 else 1
        verdicts, words = number * _PLACE_SIZE, number * _READ_SIZE
        states_at = align(verdicts, 256)
        host = staging_memory(self._driver, words + verdicts, pageable=False)
        memory = self._driver.memory(states_at + number * slots * STATE_SIZE)
        block = _Block(memory, states_at, host[:words], host[words:])
        block.states = [MessageState(self._pipeline, block, index, slots) for index in range(number)]
        commands, event = Commands(), self._driver.event()
        commands.fill(memory.pointer, 0xFF, verdicts, self._pipeline.uploads)
        commands.fill(memory.pointer + states_at, 0, number * slots * STATE_SIZE, self._pipeline.uploads)
        commands.drain(self._pipeline.uploads, event)
        with self._lock:
            self._blocks.append(block)  # before: after an error the device may still write there
        self._driver.issue(commands)
        first, *others = block.states
        self._released_of(slots).extend(others)
        return first
