"""The commands of the messages of a call: they upload the keys, open, gather or seal slabs, and download the verdict.

Events alone order the work on the device. Opening messages takes these steps::

    the caller's stream    started ─┐                                                ┌─ continues
    kernels of its lane             └──────┬ open 0   ┬ open 1   wipe keys, verdict ── finished
    uploads           keys, slab 0 ────────┘  slab 1 ─┘

One launch expands the keys of the messages, before the first slab. A slab's device memory may be read after `copied`.
The host waits for `used` before it fills a staging buffer again. Sealing goes the other way: kernel, `copied`,
download, `used`.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import itemgetter

from fastrack._crypto.base import Engine, Messages
from fastrack._crypto.session import Session
from fastrack._devices.base import BAD_PLAN, BadChunk, Segment, Slab
from fastrack._devices.cuda.buffers import STATE_SIZE, CudaStagingBuffer, MessageState, MessageStatePool
from fastrack._devices.cuda.clock import Clock
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import Event, Stream
from fastrack._devices.cuda.gather_plan import PlanSealer, SealedPlan, room_for
from fastrack._devices.cuda.launches import Launch, check_run, launches_of
from fastrack._devices.cuda.streams import Lane, Pipeline
from fastrack._devices.cuda.table import TableSegment, pack_table, parse_name
from fastrack.format import SEALED_CHUNK_SIZE

PLAN_BITS = 256  # of the keys of gather plans

_GOOD = 2**64 - 1  # the verdict on messages without a bad chunk
_SPIN = 200_000  # nanoseconds to spin before the thread sleeps, since a wake-up takes some ten microseconds


@dataclass(frozen=True, slots=True)
class Resources:
    """The parts of a device that its operations share."""

    pipeline: Pipeline
    states: MessageStatePool
    engine: Engine  # of the host; seals gather plans
    session: Session  # the source of keys for gather plans
    blocks: int  # maximum per launch
    threads: int  # maximum of the host for copies


class CommandList:
    """Commands that are issued together, and the spans of their steps.

    `issued` is set when the commands were issued, or never will be.
    """

    def __init__(self) -> None:
        self.commands = Commands()
        self.issued = threading.Event()
        self._marks: list[tuple[str | None, Slab, int]] = []

    def use(self, buffer: CudaStagingBuffer) -> None:
        """Mark a staging buffer as in use until this list is issued."""
        buffer.issued = self.issued

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

    In confidential mode a call that does not wait has no verdict downloaded: `download` records that for later.

    `clock` is the clock of the device, if a timeline is recorded.
    """

    def __init__(
        self, resources: Resources, state: MessageState, messages: Messages, lane: Lane, clock: Clock | None
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
        self._prepared = 0  # messages whose keys are expanded
        self._plans: PlanSealer | None = None  # made for the first gather
        self._planned: list[tuple[int, int]] = []  # the first chunk of each sealed plan, and a message of the plan
        self._to_download: tuple[CudaStagingBuffer, Slab] | None = None  # a sealed slab that is still on the device
        self._to_store: dict[CudaStagingBuffer, Slab] = {}  # sealed slabs that are still in their buffers

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
        """Record the upload of the keys, and a wait of the lane for the caller's stream.

        Earlier work on that stream may still use the arrays. The keys go on the stream that waits for nothing.
        """
        commands.record(self._state.started, self._stream)
        self._state.upload_keys(commands, self._uploads, wipe=self._confidential)
        commands.wait(self._lane.kernels, self._state.started)

    def open(self, current: CommandList, slab: Slab, buffer: CudaStagingBuffer) -> None:
        """Record the opening of a slab."""
        commands, lane, uploads, messages = current.commands, self._lane, self._uploads, self._messages
        launches = launches_of(slab, messages, buffer.memory.size)
        plans = self._seal_plans(commands, launches, slab.sealed_size, buffer.memory.size)
        if not launches:
            return
        current.use(buffer)
        if any(messages.sealed[segment.message] is not None for segment in slab.segments):
            current.mark("wait", slab)
            wait_for(commands, buffer.used)
            current.mark("source", slab)
            self._stage(commands, slab, buffer)
        end = slab.sealed_size
        for plan in plans:
            commands.copy(buffer.memory[plan.start : plan.end], plan.sealed)
            end = plan.end
        current.mark("issue", slab)
        with self._device_span("copy", "uploads", uploads, slab, commands):
            commands.upload(buffer.device_ptr, buffer.memory[:end], uploads)
        commands.record(buffer.copied, uploads)
        commands.wait(lane.kernels, buffer.copied)
        with self._device_span("open", "kernels", lane.kernels, slab, commands):
            for launch in launches:
                self._prepare(commands, launch.first, launch.last)
                plan_arguments = self._open_plan(commands, plans.pop(0), buffer) if launch.kind == "gather" else []
                arguments = [self._state.states, self._state.slots - 1, buffer.device_ptr, launch.count]
                arguments += [len(launch.rows), self._state.verdict, *plan_arguments]
                self._launch(commands, launch.kernel, launch.count, arguments, launch.table)
        commands.record(buffer.used, lane.kernels)
        current.mark(None, slab)

    def seal(self, current: CommandList, slab: Slab, buffer: CudaStagingBuffer) -> None:
        """Record the sealing of a slab. `_store` copies the sealed chunks out of the buffer."""
        launches_of(slab, self._messages, buffer.memory.size)  # only for its checks
        commands, lane = current.commands, self._lane
        self._store(current, buffer)
        current.use(buffer)
        current.mark("wait", slab)
        wait_for(commands, buffer.used)
        current.mark("issue", slab)
        self._wait_for_keys(commands)
        with self._device_span("seal", "kernels", lane.kernels, slab, commands):
            for segment in slab.segments:
                self._seal(commands, segment, buffer)
        commands.record(buffer.copied, lane.kernels)
        current.mark(None, slab)
        if self._confidential:
            self.download_slab(current)  # the one before, while this one is sealed
        self._to_download = buffer, slab
        self._to_store[buffer] = slab
        if not self._confidential:
            self.download_slab(current)

    def finish(self, current: CommandList, *, wait: bool) -> bool:
        """Record the end: the rest of the stores, the wiping of the keys, and the download of the verdicts.

        The caller's stream, and with `wait` the thread, then waits for it. Return whether the verdicts are downloaded.
        """
        self.download_slab(current)
        for buffer in list(self._to_store):
            self._store(current, buffer)
        commands, state, kernels = current.commands, self._state, self._lane.kernels
        self._wait_for_keys(commands)
        state.wipe_device(commands, kernels)
        if not self._confidential:
            state.download_verdicts(commands, kernels)
        commands.record(state.finished, kernels)
        commands.wait(self._stream, state.finished)
        if wait:
            wait_for(commands, state.finished, _SPIN)
            if self._confidential:  # now that it waits for nothing
                self.download(commands)
        return wait or not self._confidential

    def download(self, commands: Commands) -> None:
        """Record the download of the verdicts on messages that are finished, on a stream that waits for nothing."""
        self._state.download_verdicts(commands, self._uploads)
        commands.record(self._state.finished, self._uploads)
        commands.synchronize(self._state.finished)

    def bad_chunk(self) -> BadChunk | None:
        """Return the first bad chunk or None from the downloaded verdicts."""
        name, plan_chunk = self._state.verdicts
        if self._plans is not None and plan_chunk != _GOOD:
            planned = bisect_right(self._planned, plan_chunk, key=itemgetter(0)) - 1
            return BadChunk(self._planned[max(planned, 0)][1] if self._planned else 0, BAD_PLAN)
        if name != _GOOD:
            message, chunk = parse_name(name)
            return BadChunk(min(message, self._count - 1), chunk)
        return None

    def close(self) -> None:
        """Wipe the host's key of the plans, and drop the references to the arrays."""
        if self._plans is not None:
            self._plans.wipe()
        del self._messages

    def _stage(self, commands: Commands, slab: Slab, buffer: CudaStagingBuffer) -> None:
        """Record the copies of chunks from host memory to their offsets in a staging buffer."""
        for number, first, _, _, size, offset, plan in slab.segments:
            sealed = self._messages.sealed[number]
            if sealed is None:
                continue
            if plan is None:
                source = sealed.address + first * SEALED_CHUNK_SIZE
                commands.copy_memory(buffer.address + offset, source, size, sealed)
            else:
                commands.pack(buffer.memory[offset : offset + size], sealed.array, plan.chunks)
                commands.keep_alive(sealed)
        commands.keep_alive(buffer)

    def _wait_for_keys(self, commands: Commands) -> None:
        """Record a wait of the lane for the upload of the keys, unless it has waited for the slab behind them."""
        if not self._prepared:
            commands.record(self._state.finished, self._uploads)
            commands.wait(self._lane.kernels, self._state.finished)

    def _prepare(self, commands: Commands, first: int, message: int) -> None:
        """Record the expansion of keys, in batches, up to the key of `message` or beyond.

        Raise ValueError if a later key has replaced the expanded key of message `first` on the device.
        """
        state = self._state
        if first < self._prepared - state.slots:
            raise ValueError(f"slabs are not in the order of their messages: got {first} after {self._prepared - 1}")
        batch = self._count if self._count <= state.slots else state.slots // 2
        while self._prepared <= message:
            count = min(batch, self._count - self._prepared)
            arguments = [state.keys, state.states, state.slots - 1, self._prepared, count]
            self._launch(commands, "prepare", count, arguments)
            self._prepared += count

    def _seal(self, commands: Commands, segment: Segment, buffer: CudaStagingBuffer) -> None:
        number, first, start, stop, _, offset, _ = segment
        count = check_run(segment, self._messages)
        self._prepare(commands, number, number)
        state = self._state.states + STATE_SIZE * (number & self._state.slots - 1)
        source = self._messages.memories[number].address + start
        arguments = [state, source, buffer.device_ptr + offset, first, count, stop - start]
        self._launch(commands, f"seal_{self._messages.keys.bits[number]}", count, arguments)

    def _seal_plans(self, commands: Commands, launches: list[Launch], end: int, size: int) -> list[SealedPlan]:
        """Seal the plans of gathers for a staging buffer of `size` bytes, where they follow the chunks."""
        joined = [(launch, launch.plan) for launch in launches if launch.kind == "gather"]
        needed = end
        for _, plan in joined:
            needed = room_for(plan, needed)
            if needed > size:
                raise ValueError("a gather does not fit into its staging buffer, with its plan behind its chunks")
        sealed = []
        for launch, plan in joined:
            part = self._require_plans(commands).seal(plan, end)
            self._planned.append((part.first_chunk, launch.first))
            sealed.append(part)
            end = part.opened + part.size
        return sealed

    def _open_plan(self, commands: Commands, plan: SealedPlan, buffer: CudaStagingBuffer) -> list[int]:
        """Record the opening of a plan, and return the arguments that describe it to the gather kernel."""
        if not plan.first_chunk:
            self._launch(commands, "prepare", 1, [self._state.plan_key, self._state.plan_state, 0, 0, 1])
        opened = buffer.device_ptr + plan.opened
        row = TableSegment(opened, plan.first_chunk, plan.size, plan.count, 0, 0)
        arguments = [self._state.plan_state, 0, buffer.device_ptr + plan.start, plan.count, 1, self._state.plan_verdict]
        self._launch(commands, f"open_{PLAN_BITS}", plan.count, arguments, pack_table([row]))
        starts = opened + 8 * plan.chunks
        return [opened, starts, starts + 8 * (plan.chunks + 1), plan.pieces, self._state.plan_verdict]

    def _require_plans(self, commands: Commands) -> PlanSealer:
        """Return the sealer of the call's plans. The first call records the upload of its key."""
        if self._plans is None:
            key = self._resources.session.next_key()
            try:
                self._state.load_plan_key(key)
                self._plans = PlanSealer(self._resources.engine, key)
            finally:
                key.wipe()
            self._state.upload_plan_key(commands, self._uploads, wipe=self._confidential)
        return self._plans

    def download_slab(self, current: CommandList) -> None:
        """Record the download of the slab that was sealed last, if that is still to be done in its list.

        In confidential mode the thread waits for its kernel first: a copy would make it wait for all work before it on
        its stream, and perhaps all other copies with it.
        """
        if self._to_download is None:
            return
        (buffer, slab), self._to_download = self._to_download, None
        commands, downloads = current.commands, self._resources.pipeline.downloads(self._lane)
        current.use(buffer)
        current.mark("wait", slab)
        if self._confidential:
            wait_for(commands, buffer.copied, _SPIN)
        current.mark("issue", slab)
        commands.wait(downloads, buffer.copied)
        with self._device_span("copy", "downloads", downloads, slab, commands):
            commands.download(buffer.memory[: slab.sealed_size], buffer.device_ptr, downloads)
        commands.record(buffer.used, downloads)
        current.mark(None, slab)

    def _store(self, current: CommandList, buffer: CudaStagingBuffer) -> None:
        """Record the copies of a sealed slab from its buffer to its destination, if the buffer holds one."""
        if self._to_download is not None and self._to_download[0] is buffer:
            self.download_slab(current)
        slab = self._to_store.pop(buffer, None)
        if slab is None or all(self._messages.sealed[segment.message] is None for segment in slab.segments):
            return
        current.use(buffer)
        current.mark("wait", slab)
        wait_for(current.commands, buffer.used, _SPIN)
        current.mark("store", slab)
        for number, first, _, _, size, offset, _ in slab.segments:
            sealed = self._messages.sealed[number]
            if sealed is not None:
                target = sealed.address + first * SEALED_CHUNK_SIZE
                current.commands.copy_memory(target, buffer.address + offset, size, sealed)
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
        return self._clock.span(name, track, stream, slab.detail, commands)


def wait_for(commands: Commands, event: Event, spin: int = 0) -> None:
    """Record a wait for an event, which releases the GIL after `spin` nanoseconds."""
    commands.poll(event, spin, stop=True)
    commands.synchronize(event)
