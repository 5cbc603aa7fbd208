"""The blocks of a server's arrays on a GPU: sealed from their pieces, and opened into them, some slabs at a time.

A call of up to `SPREAD` blocks is one list of commands. Sealing takes these steps::

    uploads                keys ─┐
    kernels of the lane          └ unwrap ── keep 0 ┬ keep 1 ┬ keep 2 ┬ wipe
    downloads                                       └ slab 0 └ slab 1 └ slab 2
    the thread                                               └ stored └ stored └ stored

Opening goes the other way, and the keys lie behind the first slab. The kernels wait for the mark of the caller, and the
thread for the kernels: no copy is issued behind the work of a model, for which a copy in confidential mode would make
its thread wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fastrack._crypto.base import Bytes
from fastrack._crypto.message_keys import MessageKeys
from fastrack._devices.cuda.buffers import GOOD, CudaStagingBuffer
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import Event
from fastrack._devices.cuda.gather_plan import align
from fastrack._devices.cuda.host_memory import staging_memory
from fastrack._devices.cuda.launches import SPREAD
from fastrack._devices.cuda.link import ROW_SIZE, Wrapped, sealed_size
from fastrack._devices.cuda.recorder import MOST_CALLS, SPIN, TOLD_SIZE, Resources, wait_for
from fastrack._devices.paged.base import PagedBlock, Piece
from fastrack._devices.paged.tables import paged_launches
from fastrack._util.fork import per_process
from fastrack.errors import DeviceError
from fastrack.format import ciphertext_size

_SLAB = 32 << 20  # bytes: each copy has a toll in confidential mode
_DEPTH = 3  # slabs: one is worked on, one is copied by the bus, and one by the host
_ROOM = 256 + sealed_size(ROW_SIZE * SPREAD)  # bytes of a buffer for what is told of a slab, and for keys
VERDICT_SIZE = 40  # bytes: `Verdict` in ``kernels/verdict.cuh``
_READ_SIZE = VERDICT_SIZE + SPREAD // 8  # bytes: the verdict on a call, and a bit for each block


class CudaPages:
    """`Pages` on a GPU. Two threads may use it: one that seals, and one that opens.

    `array` is one of the arrays; its framework knows the stream of the caller. Raise ValueError for a group of which no
    block could be sealed.
    """

    def __init__(self, resources: Resources, groups: Sequence[Sequence[Piece]], array: Any, slab: int = _SLAB) -> None:
        for group in range(len(groups)):
            paged_launches(groups, [PagedBlock(group, 0)], 0, [0])  # else each call would be refused, and none heard
        self.resources, self.groups = resources, groups
        self._pipeline, self._array = resources.pipeline, array
        self.lane = self._pipeline.lane(self._pipeline.driver.view(array, writable=True).stream)
        self._sizes = [sum(piece.size for piece in group) for group in groups]
        self.slab = max(slab, *map(ciphertext_size, self._sizes))
        self.landing = staging_memory(self._pipeline.driver, _READ_SIZE, pageable=False)
        kinds: tuple[type[_Call], ...] = _Keeping, _Restoring
        self._buffers: dict[type[_Call], list[CudaStagingBuffer]] = {kind: [] for kind in kinds}
        self._using = per_process(self, "_using", lambda: {kind: threading.Lock() for kind in kinds})
        self._events = deque[Event]()  # of marks that nothing holds any more
        self._close: Callable[[], None] = lambda: None

    @classmethod
    def on(cls, name: str, groups: Sequence[Sequence[Piece]], array: Any) -> Self:
        """Return the blocks of arrays on a device, "cuda:N", which this opens, and `close` closes.

        Raise DeviceError if the device cannot be used, ValueError as above.
        """
        from fastrack._devices import open_device

        device: Any = open_device(name)
        try:
            pages = cls(device.resources, groups, array)
        except BaseException:
            device.close()
            raise
        pages._close = device.close
        return pages

    def sizes(self) -> Sequence[int]:
        return self._sizes

    def mark(self) -> _Mark:
        self._pipeline.require_usable()
        driver, commands, mark = self._pipeline.driver, Commands(), self._new_mark()
        commands.record(mark.event, driver.view(self._array, writable=True).stream)
        driver.issue(commands)
        return mark

    def _new_mark(self) -> _Mark:
        try:
            return _Mark(self._events.pop(), self._events)
        except IndexError:
            return _Mark(self._pipeline.driver.event(), self._events)

    def seal(self, keys: MessageKeys, blocks: Sequence[PagedBlock], sealed: Sequence[Bytes], after: _Mark) -> None:
        try:
            self._run(_Keeping, keys, blocks, sealed, after)
        except BaseException:
            for each in sealed:
                each.fill(0)
            raise

    def open(
        self, keys: MessageKeys, blocks: Sequence[PagedBlock], sealed: Sequence[Bytes], after: _Mark
    ) -> list[bool]:
        good = self._run(_Restoring, keys, blocks, sealed, after)
        self._clear([block for block, is_good in zip(blocks, good, strict=True) if not is_good], after)
        return good

    def _clear(self, blocks: Sequence[PagedBlock], after: _Mark) -> None:
        if not blocks:
            return
        self._pipeline.require_usable()
        driver, commands, kernels = self._pipeline.driver, Commands(), self.lane.kernels
        end = self._new_mark()
        commands.wait(kernels, after.event)
        for group, number in blocks:
            for piece in self.groups[group]:
                commands.fill(piece.address + number * piece.stride, 0, piece.size, kernels)
        commands.drain(kernels, end.event)
        driver.issue(commands)

    def close(self) -> None:
        for kind, buffers in self._buffers.items():
            with self._using[kind]:
                while buffers:
                    buffers.pop().wipe()
        self._close()

    def buffer(self, kind: type[_Call], number: int) -> CudaStagingBuffer:
        """Return the buffer for a slab of a call, by its number in the call."""
        buffers = self._buffers[kind]
        if len(buffers) <= number % _DEPTH:
            buffers.append(CudaStagingBuffer(self._pipeline, self.slab + _ROOM))
        return buffers[number % _DEPTH]

    def _run(
        self, kind: type[_Call], keys: MessageKeys, blocks: Sequence[PagedBlock], sealed: Sequence[Bytes], after: _Mark
    ) -> list[bool]:
        """Run a call for each `SPREAD` blocks, whose keys are on the device together."""
        if not len(keys) == len(blocks) == len(sealed):
            raise ValueError("blocks: expected a key and a ciphertext for each, got other numbers of them")
        for block, each in zip(blocks, sealed, strict=True):
            if each.size != ciphertext_size(self._sizes[block.group]):
                raise ValueError("a block: expected a ciphertext of its size, got one of another size")
        done: list[bool] = []
        with self._using[kind]:
            for first in range(0, len(blocks), SPREAD):
                part = slice(first, first + SPREAD)
                some = keys if len(blocks) <= SPREAD else _part_of(keys, range(len(keys))[part])
                try:
                    done += kind(self, some, blocks[part], sealed[part]).run(after.event)
                finally:
                    if some is not keys:
                        some.wipe()
        return done


class _Mark:
    """An event of a stream. It is used again: a driver destroys events when it takes memory, as a server need not."""

    __slots__ = ("_events", "event")

    def __init__(self, event: Event, events: deque[Event]) -> None:
        self.event, self._events = event, events

    def __del__(self) -> None:
        self._events.append(self.event)


def _part_of(keys: MessageKeys, numbers: range) -> MessageKeys:
    """Return a copy of some keys."""
    part = MessageKeys(len(numbers))
    for row, number in enumerate(numbers):
        material = keys.material(number)
        part.put(row, material)
        material.wipe()
    return part


@dataclass(frozen=True, slots=True)
class _Slab:
    """Blocks whose ciphertext is copied together, by their numbers in the call, and where the ciphertext of each is."""

    blocks: range
    offsets: Sequence[int]
    end: int


class _Call:
    """The work on blocks, in one list of commands. Each launch has a ticket, as in `MessageRecorder`."""

    kernel = ""

    def __init__(
        self, pages: CudaPages, keys: MessageKeys, blocks: Sequence[PagedBlock], sealed: Sequence[Bytes]
    ) -> None:
        self.pages, self.keys, self.blocks, self.sealed = pages, keys, blocks, sealed
        self.resources, self.lane = pages.resources, pages.lane
        self.pipeline = self.resources.pipeline
        (self.bits,) = set(keys.bits)  # of one owner's key
        self.commands = Commands()

    def run(self, after: Event) -> list[bool]:
        """Do the work, and return for each block whether it was done."""
        self.pipeline.require_usable()
        self.link, self.call = self.resources.link.key_for(self), next(self.resources.calls) % (MOST_CALLS - 1) + 1
        self.state, self.launched = self.resources.states.acquire(len(self.blocks)), 0
        try:
            nbytes = [self.pages.sizes()[block.group] for block in self.blocks]
            wrapped = self.link.wrap(self.keys, nbytes, range(len(self.blocks)))
            self.state.begin(self.commands, self.lane.kernels)
            self._record(wrapped, after)
            self.pipeline.driver.issue(self.commands, threads=self.resources.threads)
        except BaseException as error:
            self._fail()
            if isinstance(error, Exception):
                raise DeviceError(f"{self.pipeline.driver.name} failed: {error}") from error
            raise
        finally:
            self.resources.link.release(self)
        good = self._good()
        self.state.is_stale = not all(good)
        self.resources.states.release(self.state)
        return good

    def _record(self, wrapped: Wrapped, after: Event) -> None:
        raise NotImplementedError

    def _good(self) -> list[bool]:
        raise NotImplementedError

    def _fail(self) -> None:
        """Wait until nothing of the call runs, and wipe its expanded keys. Else its state is not used again."""
        self.pipeline.synchronize_all(self.lane)
        commands = Commands()
        self.state.wipe_device(commands, self.lane.kernels)
        try:
            self.pipeline.driver.issue(commands)
        except Exception:  # noqa: BLE001 - the first error is the one to raise
            return
        self.pipeline.synchronize_all(self.lane)
        self.resources.states.release(self.state)

    def _slabs(self) -> list[tuple[_Slab, CudaStagingBuffer]]:
        slabs: list[_Slab] = []
        first, end, offsets = 0, 0, list[int]()
        for number, each in enumerate(self.sealed):
            if end + each.size > self.pages.slab:
                slabs.append(_Slab(range(first, number), offsets, end))
                first, end, offsets = number, 0, []
            offsets.append(end)
            end += align(each.size)
        slabs.append(_Slab(range(first, len(self.sealed)), offsets, end))
        return [(slab, self.pages.buffer(type(self), number)) for number, slab in enumerate(slabs)]

    def _expand(self, wrapped: Wrapped, place: int, after: Event) -> None:
        """Record that keys are expanded, and that later kernels wait for the caller's work."""
        arguments = [self.link.state, place, wrapped.number, len(self.blocks), self.state.states, self.state.slots - 1]
        self._launch("unwrap", len(self.blocks), [*arguments, len(self.blocks), self.call])
        self.commands.wait(self.lane.kernels, after)

    def _work(self, slab: _Slab, buffer: CudaStagingBuffer, told: int) -> None:
        """Record the launches for a slab."""
        blocks = self.blocks[slab.blocks.start : slab.blocks.stop]
        for count, _, table in paged_launches(self.pages.groups, blocks, slab.blocks.start, slab.offsets):
            self.launched += 1
            arguments = [self.state.states, self.state.slots - 1, buffer.device_ptr, count, self.state.verdict]
            self._launch(f"{self.kernel}_{self.bits}", count, [*arguments, self.ticket, told], table)

    @property
    def ticket(self) -> int:
        """The ticket of the last launch."""
        return (self.call << 32) + self.launched - 1

    def _launch(self, kernel: str, count: int, arguments: Sequence[int], table: bytes = b"") -> None:
        function = self.pipeline.driver.functions[kernel]
        self.commands.launch(function, min(count, self.resources.blocks), arguments, self.lane.kernels, table)

    def _parts(self, slab: _Slab) -> Iterator[tuple[Bytes, slice]]:
        """Yield the ciphertext of each block of a slab, and its place in a buffer."""
        for number, offset in zip(slab.blocks, slab.offsets, strict=True):
            yield self.sealed[number], slice(offset, offset + self.sealed[number].size)


class _Keeping(_Call):
    """The sealing of blocks."""

    kernel = "keep"

    def _record(self, wrapped: Wrapped, after: Event) -> None:
        commands, uploads, kernels = self.commands, self.pipeline.uploads, self.lane.kernels
        self._told: list[tuple[int, npt.NDArray[np.uint64]]] = []
        slabs = self._slabs()
        first, at = slabs[0][1], self.pages.slab + 256
        keys = first.memory[at : at + wrapped.sealed.size]
        wait_for(commands, first.used)
        commands.copy(keys, wrapped.sealed)
        commands.upload(first.device_ptr + at, keys, uploads)
        commands.record(first.copied, uploads)
        commands.wait(kernels, first.copied)
        self._expand(wrapped, first.device_ptr + at, after)
        for number, (slab, buffer) in enumerate(slabs):
            if number >= _DEPTH - 1:  # before the buffer is used again, and while the slab between is copied
                self._store(*slabs[number - _DEPTH + 1], self._told[number - _DEPTH + 1][1])
            self._work(slab, buffer, buffer.device_ptr + align(slab.end))
            self._told.append((self.ticket, np.zeros(2, np.uint64)))
            commands.record(buffer.copied, kernels)
            if not self.pipeline.confidential:
                self._download(slab, buffer)
            elif number:
                self._download(*slabs[number - 1])
        self.state.wipe_device(commands, kernels)
        commands.record(self.state.finished, kernels)
        if self.pipeline.confidential:
            self._download(*slabs[-1])
        for (slab, buffer), (_, told) in list(zip(slabs, self._told, strict=True))[-_DEPTH + 1 :]:
            self._store(slab, buffer, told)
        wait_for(commands, self.state.finished)

    def _download(self, slab: _Slab, buffer: CudaStagingBuffer) -> None:
        downloads, end = self.pipeline.downloads(self.lane), align(slab.end) + TOLD_SIZE
        if self.pipeline.confidential:  # the copy would make the thread wait, and perhaps all other copies with it
            wait_for(self.commands, buffer.copied, SPIN)
        self.commands.wait(downloads, buffer.copied)
        self.commands.download(buffer.landing(end)[:end], buffer.device_ptr, downloads)
        self.commands.record(buffer.used, downloads)

    def _store(self, slab: _Slab, buffer: CudaStagingBuffer, told: npt.NDArray[np.uint64]) -> None:
        end = align(slab.end)
        memory = buffer.landing(end + TOLD_SIZE)
        wait_for(self.commands, buffer.used, SPIN)
        for sealed, place in self._parts(slab):
            self.commands.copy(sealed, memory[place])
        self.commands.copy(told.view(np.uint8), memory[end : end + TOLD_SIZE])

    def _good(self) -> list[bool]:
        if any(told.tolist() != [ticket, GOOD] for ticket, told in self._told):
            self.resources.states.release(self.state)
            raise DeviceError(f"{self.pipeline.driver.name} has not run all that seals blocks; start the process again")
        return [True] * len(self.blocks)


class _Restoring(_Call):
    """The opening of blocks."""

    kernel = "restore"

    def _record(self, wrapped: Wrapped, after: Event) -> None:
        commands, uploads, kernels = self.commands, self.pipeline.uploads, self.lane.kernels
        self.pages.landing.fill(0)
        for number, (slab, buffer) in enumerate(self._slabs()):
            end = slab.end if number else slab.end + wrapped.sealed.size
            memory = buffer.source(end)
            wait_for(commands, buffer.used)
            for sealed, place in self._parts(slab):
                commands.copy(memory[place], sealed)
            if not number:
                commands.copy(memory[slab.end : end], wrapped.sealed)
            commands.upload(buffer.device_ptr, memory[:end], uploads)
            commands.record(buffer.copied, uploads)
            commands.wait(kernels, buffer.copied)
            if not number:
                self._expand(wrapped, buffer.device_ptr + slab.end, after)
            self._work(slab, buffer, self.state.verdict + VERDICT_SIZE)
            commands.record(buffer.used, kernels)
        self.state.wipe_device(commands, kernels)
        downloads = kernels
        if self.pipeline.confidential:  # a copy behind the kernels would make the thread wait, and other copies too
            downloads = uploads
            commands.record(self.state.finished, kernels)
            wait_for(commands, self.state.finished, SPIN)
        commands.download(self.pages.landing, self.state.verdict, downloads)
        commands.record(self.state.finished, downloads)
        wait_for(commands, self.state.finished)

    def _good(self) -> list[bool]:
        lowest, _, ticket = self.pages.landing[:24].view(np.uint64).tolist()
        good = np.unpackbits(self.pages.landing[VERDICT_SIZE:], bitorder="little").astype(bool).tolist()
        if ticket != self.ticket or all(good) != (lowest == GOOD):
            return [False] * len(self.blocks)  # something was lost: nothing is known of any
        return good[: len(self.blocks)]
