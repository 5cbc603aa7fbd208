"""The key that a device shares with this process: it wraps the keys of messages, and seals the plans of gathers.

So no key of a message crosses unencrypted, or lies in a staging buffer, which may be pageable. The link's own key
crosses when a device is opened, and when the key is replaced. Confidential mode encrypts that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np

from fastrack._crypto.base import Bytes, Engine
from fastrack._crypto.message_keys import MessageKeys
from fastrack._crypto.session import Session
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import Driver, Event, Memory
from fastrack._devices.cuda.host_memory import staging_memory
from fastrack._devices.cuda.streams import Pipeline
from fastrack._util.fork import per_process, register_fork_reset
from fastrack.errors import ClosedError
from fastrack.format import CHUNK_SIZE, TAG_SIZE

KEY_SIZE = 48  # bytes of a key for `prepare`: `Key` in ``kernels/prepare.cuh``
STATE_SIZE = 8704  # bytes of an expanded key: `State` in ``kernels/chunk.cuh``
ROW_SIZE = 64  # bytes of a key before it is wrapped: `Row` in ``kernels/wrapped.cuh``
LINK_BITS = 256  # of the link's keys
LINK_CALL = 2**32 - 1  # what the state of a link's key has in place of a call's number
_MATERIAL_SIZE = KEY_SIZE - 4
_BLOCK_SIZE = 16  # of the cipher

# What ends the use of a key. Each is far below what AES-GCM allows: an old recording is worth less.
_MOST_CHUNKS = 1 << 32
_MOST_CALLS = 1 << 20
_LONGEST_PAUSE = 600.0  # seconds without a call

links: WeakSet[Link] = WeakSet()  # of this process, whose keys a lease's end replaces


@dataclass(frozen=True, slots=True)
class _Place:
    """Memory for a key on the device, and for its way there."""

    memory: Memory
    row: Bytes

    @classmethod
    def new(cls, driver: Driver) -> _Place:
        return cls(driver.memory(STATE_SIZE + KEY_SIZE), staging_memory(driver, KEY_SIZE, pageable=False))


@dataclass(frozen=True, slots=True)
class Wrapped:
    """Keys of messages, wrapped: sealed chunks, of which the first has that number."""

    sealed: Bytes
    number: int
    messages: tuple[int, ...]


class LinkKey:
    """A key of a link. `state` is the address of its expanded key on the device, `users` the calls that may use it.

    Chunk numbers, and therefore nonces, never repeat. In a forked child, which uses no device, the key is wiped.
    """

    def __init__(self, place: _Place, engine: Engine) -> None:
        self.users: WeakSet[object] = WeakSet()  # a call that is dropped without its end uses it no more
        self.calls = 0
        self.next = 0
        self._engine = engine
        self._lock = per_process(self, "_lock", threading.RLock)
        self.place: _Place | None = place
        self.state = place.memory.pointer
        self._schedule: Any = None
        register_fork_reset(self)

    def open(self, pipeline: Pipeline) -> None:
        """Draw the key, and expand it on the host and on the device."""
        session = Session(LINK_BITS)
        key = session.next_key()
        session.wipe()
        assert self.place is not None
        row = self.place.row
        commands, event, place = Commands(), pipeline.driver.event(), self.state + STATE_SIZE
        try:
            row[: len(key.material)] = np.frombuffer(key.material, np.uint8)
            row[_MATERIAL_SIZE:].view(np.uint32)[0] = _kind(LINK_BITS, CHUNK_SIZE // _BLOCK_SIZE)
            self._schedule = self._engine.expand_key(key)
            commands.upload(place, row, pipeline.uploads)
            arguments = [place, self.state, 0, 0, 1, LINK_CALL]
            commands.launch(pipeline.driver.functions["prepare"], 1, arguments, pipeline.uploads)
            commands.fill(place, 0, KEY_SIZE, pipeline.uploads)  # from here on there is only the expanded key
            commands.drain(pipeline.uploads, event)
            try:
                pipeline.driver.issue(commands)
            except BaseException:  # the row may still be read
                last = Commands()
                last.drain(pipeline.uploads, event)
                pipeline.driver.issue(last)
                raise
        finally:
            row.fill(0)
            key.wipe()

    def reset_after_fork(self) -> None:
        """Wipe the key in a forked child."""
        self.wipe()

    def seal(self, plain: Bytes, sealed: Bytes) -> int:
        """Seal chunks for the device, and return the number of the first one."""
        count = max(1, -(-plain.size // CHUNK_SIZE))
        with self._lock:
            number = self.next
            # First: after an error no other call gets these numbers. No signal handler runs between, without a call.
            self.next = number + count
        schedule = self._schedule
        if schedule is None:
            raise ClosedError("the device was closed; open another channel")
        self._engine.seal_run(schedule, plain, sealed, number)
        return number

    def wrap(self, keys: MessageKeys, nbytes: Sequence[int], messages: Sequence[int]) -> Wrapped:
        """Wrap the keys of some messages, for chunks of messages of these sizes."""
        rows, chosen = np.zeros((len(messages), ROW_SIZE), np.uint8), np.asarray(messages, np.intp)
        material = keys.memory[chosen]  # a copy, which is wiped too
        try:
            rows[:, :_MATERIAL_SIZE] = material[:, :_MATERIAL_SIZE]
            words = rows[:, _MATERIAL_SIZE:].view(np.uint32)
            blocks = -(-np.minimum(np.asarray([nbytes[message] for message in messages]), CHUNK_SIZE) // _BLOCK_SIZE)
            words[:, 0] = _kind(np.asarray([keys.bits[message] for message in messages]), blocks)
            words[:, 1] = chosen
            sealed = np.empty(sealed_size(rows.size), np.uint8)
            return Wrapped(sealed, self.seal(rows.reshape(-1), sealed), tuple(messages))
        finally:
            rows.fill(0)
            material.fill(0)

    def wipe(self) -> None:
        """Wipe the key on the host."""
        schedule, self._schedule = self._schedule, None
        if schedule is not None:
            schedule.wipe()

    def wipe_device(self, commands: Commands, stream: Any) -> None:
        """Wipe the expanded key on the device."""
        commands.fill(self.state, 0, STATE_SIZE + KEY_SIZE, stream)


class Link:
    """The keys of a device's link: the present one, and older ones until the last call under them has ended."""

    def __init__(self, pipeline: Pipeline, engine: Engine) -> None:
        self._pipeline, self._engine = pipeline, engine
        self._lock = threading.RLock()  # a signal handler may move tensors while its thread is in here
        self._used = time.monotonic()
        self._keys: list[LinkKey] = []  # the present one, older ones, and those that could not be opened
        self._wiping: list[tuple[LinkKey, Event]] = []  # whose memory is still in use
        # Two, as a rule: to take or give back memory would wait for the streams of others.
        self._places = [_Place.new(pipeline.driver) for _ in range(2)]
        links.add(self)

    def open(self) -> None:
        """Draw the present key. After an error `wipe` wipes what there is."""
        self._key = key = self._new_key()
        key.users.discard(self)

    def key_for(self, user: object) -> LinkKey:
        """Return the present key for a call, `user`, until `release`. Replace one that was used enough."""
        with self._lock:
            key, now = self._key, time.monotonic()
            if key.next >= _MOST_CHUNKS or key.calls >= _MOST_CALLS or now - self._used > _LONGEST_PAUSE:
                self.open()
            self._used = now
            (key := self._key).users.add(user)
            while key is not self._key:  # a signal handler has replaced it, and may have had it wiped
                (key := self._key).users.add(user)
            key.calls += 1
            if len(self._keys) > 1:
                self._wipe_replaced()
            return key

    def release(self, user: object) -> None:
        """End the use of a key by a call: all its commands were issued, or never will be."""
        for key in self._keys.copy():
            key.users.discard(user)

    def renew(self) -> None:
        """Replace the present key, and wipe it when the last call under it has ended."""
        with self._lock:
            if self._keys and not self._pipeline.forked:
                self._used = -_LONGEST_PAUSE - 1
                self.key_for(self).users.discard(self)

    def wipe(self, commands: Commands, stream: Any) -> None:
        """Wipe all keys on the host, and record how to wipe them on the device."""
        with self._lock:
            for key in (*self._keys, *(key for key, _ in self._wiping)):
                key.wipe()
                key.wipe_device(commands, stream)

    def drop(self) -> None:
        """Give the memory of all keys back, after they were wiped."""
        for key in self._keys:
            key.place = None
        self._keys.clear()
        self._wiping.clear()
        self._places.clear()

    def _new_key(self) -> LinkKey:
        for each in [each for each in self._wiping if self._pipeline.driver.done(each[1])]:
            self._wiping.remove(each)
            key = each[0]  # which an interrupt may have had wiped twice
            if key.place is not None and all(other is not key for other, _ in self._wiping):
                self._places.append(key.place)
                key.place = None
        place = self._places.pop() if self._places else _Place.new(self._pipeline.driver)
        key = LinkKey(place, self._engine)
        key.users.add(self)  # until it is the present one, so that a signal handler does not have it wiped
        self._keys.append(key)  # before it is open: after an error or an interrupt the device may still write there
        try:
            key.open(self._pipeline)
        except BaseException:
            key.users.discard(self)
            raise
        return key

    def _wipe_replaced(self) -> None:
        """Wipe keys whose calls have ended, on the device behind all that was issued, without waiting for it."""
        driver, idle = self._pipeline.driver, self._pipeline.idle
        for key in [key for key in self._keys if key is not self._key and not key.users]:
            key.wipe()
            commands, wiped = Commands(), driver.event()
            for stream in self._pipeline.kernels:
                event = driver.event()
                commands.record(event, stream)
                commands.wait(idle, event)
                commands.keep_alive(event)
            key.wipe_device(commands, idle)
            commands.record(wiped, idle)
            driver.issue(commands)
            self._wiping.append((key, wiped))  # not before: an event that was never recorded is done
            if key in self._keys:  # else a signal handler has wiped it, too
                self._keys.remove(key)  # last: after an error or an interrupt it is wiped again


def sealed_size(size: int) -> int:
    """Return the bytes of `size` bytes that are sealed under a link's key, above 0: wrapped keys, or a plan."""
    return size + TAG_SIZE * -(-size // CHUNK_SIZE)


def _kind(bits: Any, blocks: Any) -> Any:
    """Return the last word of a `Key`: the bits of the key, and the powers of H for chunks of `blocks` blocks."""
    return bits + (blocks + 1 << 16)
