"""The commands of the messages of a call: they open, gather or seal slabs, and download the verdict.

Only events order the work on the device. Opening messages takes these steps::

    the caller's stream    started ─┐                                   ┌─ continues
    kernels of its lane             └──────┬ open 0   ┬ open 1   verdict ── finished
    uploads                 slab 0 ────────┘  slab 1 ─┘

Behind its chunks a slab has the keys of its messages, wrapped. A launch that gives each block a chunk or so expands
them itself. Before any other one `unwrap` does, to memory that is wiped at the end. A slab's device memory may be read
after `copied`. The host waits for `used` before it fills a staging buffer again. Sealing goes the other way: kernel,
`copied`, download, `used`. Its verdict lies behind the sealed chunks.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from fastrack._crypto.base import Bytes, HostMemory, Messages, address
from fastrack._devices.base import BAD_PLAN, NO_VERDICT, BadChunk, Segment, Slab
from fastrack._devices.cuda.buffers import GOOD, CudaStagingBuffer, MessageState, MessageStatePool
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import Event, Stream
from fastrack._devices.cuda.gather_plan import SealedPlan, align, join_plans, room_for, seal_plan
from fastrack._devices.cuda.launches import Launch, check_run, launches_of
from fastrack._devices.cuda.link import LINK_BITS, Link, LinkKey, Wrapped
from fastrack._devices.cuda.streams import Lane, Pipeline
from fastrack._devices.cuda.table import TableSegment, name_of, pack_table, parse_name
from fastrack._util.trace import DeviceClock
from fastrack.errors import DeviceError
from fastrack.format import SEALED_CHUNK_SIZE

_SMALL = {"open": "small", "gather": "pick"}  # kernels that unwrap the keys of their messages themselves
MOST_CALLS = 2**31  # numbers of calls, of which 0 is none
_PLAN = 1 << 63  # in the ticket of a launch that opens a plan
_OWN = 1 << 20  # bytes of a run from which on it is uploaded from where it lies, if that is pageable and faster
TOLD_SIZE = 16  # bytes that are told of a sealed slab: ticket, and first bad chunk
SPIN = 200_000  # nanoseconds to spin before the thread sleeps, since a wake-up takes some ten microseconds


@dataclass(frozen=True, slots=True)
class Resources:
    """The parts of a device that its operations share."""

    pipeline: Pipeline
    states: MessageStatePool
    link: Link
    blocks: int  # maximum per launch
    threads: int  # maximum of the host for copies
    calls: Iterator[int] = field(default_factory=itertools.count)  # their numbers


class CommandList:
    """Commands that are issued together, and the spans of their steps.

    `issued` is set when the commands were issued, or never will be.
    """

    def __init__(self) -> None:
        self.commands = Commands()
        self.issued = threading.Event()
        self._marks: list[tuple[str | None, Slab, int]] = []

    def use(self, buffer: CudaStagingBuffer, lane: Lane) -> None:
        """Mark a staging buffer as in use by a lane, and until this list is issued."""
        buffer.issued, buffer.lanes = self.issued, (lane,)

    def mark(self, name: str | None, slab: Slab) -> None:
        """End the current step, and begin a step `name` unless it is None."""
        self._marks.append((name, slab, self.commands.timestamp()))

    def spans(self) -> list[tuple[str, Slab, int, int]]:
        """Return the name, slab, start and stop of each step. Valid after all commands have run."""
        code = self.commands.code
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [(name, slab, code[start], code[stop]) for (name, slab, start), (*_, stop) in pairs if name is not None]


class MessageRecorder:
    """The recorder of the commands for one call's messages.

    Each launch has a ticket: the number of the call, and its own number in the call. The verdict has that of the last
    launch if none was lost. In confidential mode a call that does not wait has no verdict downloaded:
    `MessageStatePool.read` does so later. `clock` is the clock of the device, if a timeline is recorded.
    """

    def __init__(
        self,
        resources: Resources,
        state: MessageState,
        messages: Messages,
        lane: Lane,
        key: LinkKey,
        call: int,
        clock: DeviceClock | None,
    ) -> None:
        self._resources = resources
        self._state = state
        self._messages = messages
        self._count = len(messages)
        self._stream: Stream = messages.memories[0].stream
        self._lane = lane
        self._uploads = resources.pipeline.uploads
        self._confidential = resources.pipeline.confidential
        self._clock = clock
        self._key = key
        self._call = call % (MOST_CALLS - 1) + 1
        self._launched = 0  # launches with tickets
        self._wrapped: Wrapped | None = None  # the keys that were wrapped last
        self._expanded: dict[int, int] = {}  # the message whose key is in a slot of the state
        self._planned: list[tuple[int, int]] = []  # the first chunk of each sealed plan, and a message of the plan
        self._to_download: tuple[CudaStagingBuffer, Slab] | None = None  # a sealed slab that is still on the device
        # Sealed slabs that are still in their buffers, and where to keep what is told of each.
        self._to_store: dict[CudaStagingBuffer, tuple[Slab, npt.NDArray[np.uint64]]] = {}
        self._told: list[tuple[int, npt.NDArray[np.uint64]]] = []  # the ticket for each sealed slab, and what is told
        self._targets: list[HostMemory] = []  # of sealed chunks
        self._sources: list[
            Bytes
        ] = []  # that are uploaded from where they lie; if page-locked, after the call returned

    def new_list(self) -> CommandList:
        """Return a list that holds the GIL only while no call can block.

        A call that adds work to a full stream blocks until the stream has room. The streams of a lane wait only for the
        callers' streams.
        """
        current = CommandList()
        current.commands.require_idle(self._stream)
        if self._lane.shared:
            current.commands.require_idle(self._lane.kernels)
        return current

    def start(self, commands: Commands) -> None:
        """Record a wait of the lane for the caller's stream, where earlier work may still use the arrays."""
        commands.record(self._state.started, self._stream)
        commands.wait(self._lane.kernels, self._state.started)

    def open(self, current: CommandList, slab: Slab, buffer: CudaStagingBuffer) -> None:
        """Record the opening of a slab."""
        commands, lane, uploads, messages = current.commands, self._lane, self._uploads, self._messages
        launches = launches_of(slab, messages, buffer.memory.size)
        if not launches:
            return
        keys, keys_at = self._wrap(launches), align(slab.sealed_size)
        end = keys_at + (keys.sealed.size if keys else 0)
        plans = self._seal_plans(launches, end, buffer.memory.size)
        current.use(buffer, self._lane)
        own = None if keys or plans else self._own_memory(slab, buffer)
        memory = self._memory(slab, buffer, buffer.source) if own is None else own
        if own is not None:
            self._sources.append(own)
            current.mark("wait", slab)
            wait_for(commands, buffer.used)
        elif any(messages.sealed[segment.message] is not None for segment in slab.segments):
            current.mark("wait", slab)
            wait_for(commands, buffer.used)
            current.mark("source", slab)
            self._stage(commands, slab, memory)
            commands.keep_alive(buffer)
        if keys:
            commands.copy(memory[keys_at:end], keys.sealed)
        for plan in plans:
            commands.copy(memory[plan.start : plan.end], plan.sealed)
            end = plan.end
        current.mark("issue", slab)
        with self._device_span("copy", "uploads", uploads, slab, commands):
            commands.upload(buffer.device_ptr, memory[:end], uploads)
        commands.record(buffer.copied, uploads)
        commands.wait(lane.kernels, buffer.copied)
        with self._device_span("open", "kernels", lane.kernels, slab, commands):
            for launch in launches:
                opened = self._open_plan(commands, plans.pop(0), buffer) if launch.kind == "gather" else []
                kernel, arguments = self._keys_for(commands, launch, buffer.device_ptr + keys_at)
                arguments += [buffer.device_ptr, launch.count, len(launch.rows), *self._report(commands), *opened]
                self._launch(commands, kernel, launch.count, arguments, pack_table(launch.rows, launch.widenings))
        commands.record(buffer.used, lane.kernels)
        current.mark(None, slab)

    def seal(self, current: CommandList, slab: Slab, buffer: CudaStagingBuffer) -> None:
        """Record the sealing of a slab. `_store` copies the sealed chunks out of the buffer."""
        launches_of(slab, self._messages, buffer.memory.size)  # only for its checks
        if align(slab.sealed_size) + TOLD_SIZE > buffer.memory.size:
            raise ValueError("a slab does not fit into its staging buffer, with what is told of it behind its chunks")
        commands, lane = current.commands, self._lane
        self._store(current, buffer)
        current.use(buffer, self._lane)
        current.mark("wait", slab)
        wait_for(commands, buffer.used)
        current.mark("issue", slab)
        with self._device_span("seal", "kernels", lane.kernels, slab, commands):
            for segment in slab.segments:
                self._seal(commands, segment, buffer, align(slab.sealed_size))
        commands.record(buffer.copied, lane.kernels)
        current.mark(None, slab)
        if self._confidential:
            self.download_slab(current)  # the one before, while this one is sealed
        self._to_download = buffer, slab
        told = np.zeros(2, np.uint64)
        self._to_store[buffer] = slab, told
        self._told.append((self._last_ticket, told))
        if not self._confidential:
            self.download_slab(current)

    def finish(self, current: CommandList, *, wait: bool) -> bool:
        """Record the end: the rest of the stores, the wiping of expanded keys, and the download of the verdict.

        The caller's stream then waits for it, or with `wait` the thread. Return whether the verdict is downloaded.
        """
        self.download_slab(current)
        for buffer in list(self._to_store):
            self._store(current, buffer)
        commands, state, kernels = current.commands, self._state, self._lane.kernels
        if self._expanded:
            state.wipe_device(commands, kernels)
        opens = self._launched > 0 and not self._told
        if opens and not self._confidential:
            state.download(commands, kernels)
        commands.record(state.finished, kernels)
        if not wait:
            commands.wait(self._stream, state.finished)
        else:
            wait_for(commands, state.finished, SPIN)
            if opens and self._confidential:  # now that it waits for nothing
                state.download(commands, self._uploads)
                commands.drain(self._uploads, state.finished)
        return wait or not opens or not self._confidential

    def bad_chunk(self) -> BadChunk | None:
        """Return the first bad chunk or None from the downloaded verdict.

        Raise DeviceError if something was not sealed, and clear what may lie in its place.
        """
        if self._told:
            if any(told.tolist() != [ticket, GOOD] for ticket, told in self._told):
                for target in self._targets:
                    target.array[:] = 0
                raise DeviceError("it has not run all that seals the messages; start the process again")
        elif self._launched:
            lowest, plan_chunk, ticket = self._state.words
            if ticket != self._last_ticket:  # a launch has not reported: it may not have run
                return BadChunk(0, NO_VERDICT)
            if plan_chunk != GOOD and self._planned:
                planned = bisect_right(self._planned, plan_chunk, key=itemgetter(0)) - 1
                return BadChunk(self._planned[max(planned, 0)][1], BAD_PLAN)
            if lowest != GOOD:
                message, chunk = parse_name(lowest)
                return BadChunk(min(message, self._count - 1), chunk)
        if self._launched:
            self._state.is_stale = False
        return None

    def close(self) -> None:
        """Drop the references to the arrays."""
        del self._messages

    @property
    def _last_ticket(self) -> int:
        return (self._call << 32) + self._launched - 1

    def _report(self, commands: Commands) -> list[int]:
        """Return what the next launch reports with: the place of the verdict, and a ticket."""
        if not self._launched:
            self._state.begin(commands, self._lane.kernels)
        self._launched += 1
        return [self._state.verdict, self._last_ticket]

    def _memory(self, slab: Slab, buffer: CudaStagingBuffer, faster: Callable[[int], Bytes]) -> Bytes:
        """Return a buffer's host memory for a slab: the faster kind, if this call copies all of it there or from there.

        What the host seals, or reads by itself, is in `buffer.memory`.
        """
        is_copied = all(self._messages.sealed[segment.message] is not None for segment in slab.segments)
        return faster(slab.sealed_size) if is_copied else buffer.memory

    def _own_memory(self, slab: Slab, buffer: CudaStagingBuffer) -> Bytes | None:
        """Return the chunks of a slab where they lie, if they are one large run and pageable memory is the faster kind.

        An upload of pageable memory has read it when its call returns, so a copy to staging memory is not needed.
        """
        number, first, _, _, size, _, plan = slab.segments[0]
        sealed = self._messages.sealed[number]
        if (
            len(slab.segments) > 1
            or plan is not None
            or sealed is None
            or size < _OWN
            or not buffer.prefers_pageable(size)
        ):
            return None
        return sealed.part(first * SEALED_CHUNK_SIZE, first * SEALED_CHUNK_SIZE + size).array

    def _stage(self, commands: Commands, slab: Slab, memory: Bytes) -> None:
        """Record the copies of chunks from host memory to their offsets in staging memory."""
        for number, first, _, _, size, offset, plan in slab.segments:
            sealed = self._messages.sealed[number]
            if sealed is None:
                continue
            if plan is None:
                source = sealed.address + first * SEALED_CHUNK_SIZE
                commands.copy_memory(address(memory) + offset, source, size, sealed)
            else:
                commands.pack(memory[offset : offset + size], sealed.array, plan.chunks)
                commands.keep_alive(sealed)

    def _is_small(self, launch: Launch) -> bool:
        return launch.kind in _SMALL and launch.count <= self._resources.blocks

    def _wrap(self, launches: Sequence[Launch]) -> Wrapped | None:
        """Wrap the keys that a slab brings: those of small launches, and those that are expanded for others."""
        needed: list[int] = []
        for launch in launches:
            start = len(needed)
            if self._is_small(launch):
                needed += launch.messages
            else:
                for message in launch.messages:
                    slot = message & self._state.slots - 1
                    if self._expanded.get(slot) != message:
                        self._expanded[slot] = message
                        needed.append(message)
            launch.keys = range(start, len(needed))
        if needed and (self._wrapped is None or self._wrapped.messages != tuple(needed)):
            self._wrapped = self._key.wrap(self._messages.keys, self._messages.nbytes, needed)
        return self._wrapped if needed else None

    def _keys_for(self, commands: Commands, launch: Launch, place: int) -> tuple[str, list[int]]:
        """Return the kernel for a launch, and its arguments for the keys, which are expanded first for some."""
        state, keys = self._state, [self._key.state, place]
        if self._wrapped is not None:
            keys += [self._wrapped.number, len(self._wrapped.messages) + (launch.keys.start << 32)]
        if self._is_small(launch):
            return f"{_SMALL[launch.kind]}_{launch.bits}", keys
        if launch.keys:
            count = len(launch.keys)
            self._launch(commands, "unwrap", count, [*keys, state.states, state.slots - 1, count, self._call])
        return f"{launch.kind}_{launch.bits}", [state.states, state.slots - 1]

    def _seal(self, commands: Commands, segment: Segment, buffer: CudaStagingBuffer, told_at: int) -> None:
        number, first, start, stop, _, offset, _ = segment
        count, messages = check_run(segment, self._messages), self._messages
        if self._wrapped is None or self._wrapped.messages != (number,):
            self._wrapped = self._key.wrap(messages.keys, messages.nbytes, [number])
        arguments = [self._key.state, self._wrapped.number, messages.memories[number].address + start]
        arguments += [buffer.device_ptr + offset, name_of(number, first), count, stop - start, *self._report(commands)]
        arguments += [buffer.device_ptr + told_at]
        kernel = f"seal_{messages.keys.bits[number]}"
        self._launch(commands, kernel, count, arguments, self._wrapped.sealed.tobytes())

    def _seal_plans(self, launches: list[Launch], end: int, size: int) -> list[SealedPlan]:
        """Seal the plans of gathers for a staging buffer of `size` bytes, where they follow the chunks and the keys."""
        joined = [(launch, join_plans(launch.plans)) for launch in launches if launch.kind == "gather"]
        needed = end
        for _, plan in joined:
            needed = room_for(plan, needed)
        if needed > size:
            raise ValueError("a slab does not fit into its staging buffer, with its keys and plans behind its chunks")
        sealed = []
        for launch, plan in joined:
            part = seal_plan(self._key, plan, end)
            self._planned.append((part.first_chunk, launch.first))
            sealed.append(part)
            end = part.opened + part.size
        return sealed

    def _open_plan(self, commands: Commands, plan: SealedPlan, buffer: CudaStagingBuffer) -> list[int]:
        """Record the opening of a plan, and return the arguments that describe it to the launch that follows."""
        opened = buffer.device_ptr + plan.opened
        row = TableSegment(opened, plan.first_chunk, plan.size, plan.count, 0, 0)
        verdict, ticket = self._report(commands)
        arguments = [self._key.state, 0, buffer.device_ptr + plan.start, plan.count, 1, verdict, ticket - _PLAN]
        self._launch(commands, f"open_{LINK_BITS}", plan.count, arguments, pack_table([row]))
        return [opened, plan.pieces]

    def download_slab(self, current: CommandList) -> None:
        """Record the download of the slab that was sealed last, if that is still to be done in its list.

        In confidential mode the thread waits for its kernel first: a copy would make it wait for all work before it on
        its stream, and perhaps all other copies with it.
        """
        if self._to_download is None:
            return
        (buffer, slab), self._to_download = self._to_download, None
        commands, downloads = current.commands, self._resources.pipeline.downloads(self._lane)
        current.use(buffer, self._lane)
        current.mark("wait", slab)
        if self._confidential:
            wait_for(commands, buffer.copied, SPIN)
        current.mark("issue", slab)
        commands.wait(downloads, buffer.copied)
        with self._device_span("copy", "downloads", downloads, slab, commands):
            end, memory = align(slab.sealed_size) + TOLD_SIZE, self._memory(slab, buffer, buffer.landing)
            commands.download(memory[:end], buffer.device_ptr, downloads)
        commands.record(buffer.used, downloads)
        current.mark(None, slab)

    def _store(self, current: CommandList, buffer: CudaStagingBuffer) -> None:
        """Record the copies of a sealed slab from its buffer to its destination, if the buffer holds one."""
        if self._to_download is not None and self._to_download[0] is buffer:
            self.download_slab(current)
        slab, told = self._to_store.pop(buffer, (None, None))
        if slab is None or told is None:
            return
        current.use(buffer, self._lane)
        memory = self._memory(slab, buffer, buffer.landing)
        current.mark("wait", slab)
        wait_for(current.commands, buffer.used, SPIN)
        current.mark("store", slab)
        for number, first, _, _, size, offset, _ in slab.segments:
            sealed = self._messages.sealed[number]
            if sealed is not None:
                target = sealed.part(first * SEALED_CHUNK_SIZE, first * SEALED_CHUNK_SIZE + size)
                self._targets.append(target)
                current.commands.copy_memory(target.address, address(memory) + offset, size, sealed)
        told_at = align(slab.sealed_size)
        current.commands.copy(told.view(np.uint8), memory[told_at : told_at + TOLD_SIZE])
        current.commands.keep_alive(buffer)
        current.mark(None, slab)

    def _launch(
        self, commands: Commands, kernel: str, count: int, arguments: Sequence[int], table: bytes = b""
    ) -> None:
        function = self._resources.pipeline.driver.functions[kernel]
        commands.launch(function, min(count, self._resources.blocks), arguments, self._lane.kernels, table)

    def _device_span(
        self, name: str, track: str, stream: Stream, slab: Slab, commands: Commands
    ) -> AbstractContextManager[None]:
        """Add the device time of the block's commands to the timeline, if a timeline is recorded."""
        if self._clock is None:
            return nullcontext()
        detail = {"chunk": slab.first_chunk, "sealed": slab.sealed_size}
        return self._clock.span(name, track, stream, detail, commands)


def wait_for(commands: Commands, event: Event, spin: int = 0) -> None:
    """Record a wait for an event, which releases the GIL after `spin` nanoseconds."""
    commands.poll(event, spin, stop=True)
    commands.synchronize(event)
