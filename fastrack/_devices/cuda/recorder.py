"""The commands of a message: they upload its key, open, gather or seal its slabs, and download its verdict.

Events alone order the work on the device. For a message that is opened::

    the caller's stream    started ─┐                                              ┌─ continues
    kernels of its lane             └ key ┬ open 0   ┬ open 1   wipe key, verdict ── finished
    uploads                 slab 0 ───────┘  slab 1 ─┘

A slab's device memory may be read after `copied`, and a staging buffer may be filled again after `used`, which the host
waits for. A message that is sealed goes the other way: kernel, `copied`, download, `used`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from fastrack._crypto.base import Bytes, Engine, GatherPlan, address, check_buffers, check_plan, chunks_between
from fastrack._crypto.cobblestone import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE, ciphertext_size
from fastrack._crypto.session import Session
from fastrack._devices.base import BAD_PLAN, Segment
from fastrack._devices.cuda.buffers import CudaStagingBuffer, MessageState, MessageStatePool
from fastrack._devices.cuda.clock import Clock
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import Event, Stream, View
from fastrack._devices.cuda.gather_plan import PlanSealer, SealedPlan, room_for
from fastrack._devices.cuda.streams import Lane, Pipeline
from fastrack._devices.cuda.table import TableSegment, pack_table

PLAN_BITS = 256  # of the keys of gather plans

_GOOD = 2**64 - 1  # the verdict on a message without a bad chunk
_SPIN = 200_000  # nanoseconds to spin before the thread sleeps, as waking it takes some ten microseconds


@dataclass(frozen=True, slots=True)
class Resources:
    """The parts of a device that its operations share."""

    pipeline: Pipeline
    states: MessageStatePool
    engine: Engine  # of the host; seals gather plans
    session: Session  # the source of keys for gather plans
    blocks: int  # maximum of a launch
    threads: int  # maximum of the host for copies


class CommandList:
    """Commands that are issued together, and the spans of their steps.

    `issued` is set when they were issued, or never will be.
    """

    def __init__(self) -> None:
        self.commands = Commands()
        self.issued = threading.Event()
        self._marks: list[tuple[str | None, Segment, int]] = []

    def use(self, buffer: CudaStagingBuffer) -> None:
        """Mark a staging buffer as in use until this list was issued."""
        buffer.issued = self.issued

    def mark(self, name: str | None, slab: Segment) -> None:
        """Begin a step of this name, or none, and end the one before."""
        self._marks.append((name, slab, self.commands.timestamp()))

    def spans(self) -> list[tuple[str, Segment, int, int]]:
        """Return the name, slab, start and stop of each step. Valid after all commands have run."""
        code = self.commands.code
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [(name, slab, code[start], code[stop]) for (name, slab, start), (*_, stop) in pairs if name is not None]


class MessageRecorder:
    """The recorder of one message's commands.

    `memory` is the plaintext on the device, and `bits` the size of the message's AES key. `clock` is that of the
    device, if a timeline is recorded.
    """

    def __init__(
        self, resources: Resources, state: MessageState, memory: View, lane: Lane, bits: int, clock: Clock | None
    ) -> None:
        self._resources = resources
        self._state = state
        self._memory = memory
        self._lane = lane
        self._uploads = resources.pipeline.uploads
        self._bits = bits
        self._clock = clock
        self._plans: PlanSealer | None = None  # made for the first gather
        self._to_store: dict[
            CudaStagingBuffer, tuple[Bytes, Segment]
        ] = {}  # sealed slabs that are still in their buffer

    def new_list(self) -> CommandList:
        """Return a list that holds the interpreter's lock only while no call can block.

        A call that adds work to a full stream blocks until the stream has room. The streams of a lane wait only for the
        callers' streams.
        """
        current = CommandList()
        current.commands.require_idle(self._memory.stream)
        if self._lane.shared:
            current.commands.require_idle(self._lane.kernels)
        return current

    def start(self, commands: Commands) -> None:
        """Record that the message waits for the caller's stream, and the upload of its key."""
        commands.wait(self._lane.kernels, self._state.started)
        self._state.upload_key(commands, self._lane.kernels)

    def open(self, current: CommandList, slab: Segment, sealed: Bytes, buffer: CudaStagingBuffer) -> None:
        """Record the opening of a slab, or of a gather."""
        if slab.plan is None:
            count = _check_slab(slab, sealed, buffer, self._memory.nbytes)
            segment = TableSegment(
                self._memory.pointer + slab.start, slab.first_chunk, slab.stop - slab.start, count, 0, 0
            )
            self._open(current, slab, sealed, buffer, count, segment, [], None)
            return
        count = _check_gather(slab, slab.plan, sealed, buffer, self._memory.nbytes)
        if count:
            plan = self._require_plans(current.commands).seal(slab.plan, slab.sealed_size)
            chunks = buffer.device_ptr + plan.opened
            starts = chunks + slab.plan.chunks.nbytes
            segment = TableSegment(self._memory.pointer, 0, slab.stop, self._memory.nbytes, 0, 0)
            arguments = [chunks, starts, starts + slab.plan.starts.nbytes, len(slab.plan.table)]
            self._open(current, slab, sealed, buffer, count, segment, arguments, plan)

    def seal(self, current: CommandList, slab: Segment, sealed: Bytes, buffer: CudaStagingBuffer) -> None:
        """Record the sealing of a slab. `store` takes the sealed chunks out of the buffer."""
        count = _check_slab(slab, sealed, buffer, self._memory.nbytes)
        commands, lane = current.commands, self._lane
        self._store(current, buffer)
        current.use(buffer)
        current.mark("wait", slab)
        wait_for(commands, buffer.used)
        current.mark("issue", slab)
        arguments = [self._state.state, self._memory.pointer + slab.start, buffer.device_ptr]
        arguments += [slab.first_chunk, count, slab.stop - slab.start]
        with self._device_span("seal", "kernels", lane.kernels, slab, commands):
            self._launch(commands, "seal", self._bits, count, arguments)
        commands.record(buffer.copied, lane.kernels)
        commands.wait(lane.downloads, buffer.copied)
        with self._device_span("copy", "downloads", lane.downloads, slab, commands):
            commands.download(buffer.memory[: slab.sealed_size], buffer.device_ptr, lane.downloads)
        commands.record(buffer.used, lane.downloads)
        current.mark(None, slab)
        self._to_store[buffer] = sealed, slab

    def finish(self, current: CommandList) -> None:
        """Record the rest of the stores, the wiping of the key and the download of the verdicts."""
        for buffer in list(self._to_store):
            self._store(current, buffer)
        self._state.download_verdicts(current.commands, self._lane.kernels)

    def wait_for_end(self, commands: Commands, *, wait: bool) -> None:
        """Record that the caller's stream, and with `wait` the thread, wait for the end of the message."""
        commands.wait(self._memory.stream, self._state.finished)
        if wait:
            wait_for(commands, self._state.finished, _SPIN)

    def bad_chunk(self) -> int | None:
        """Return the first bad chunk, `BAD_PLAN` or None, after the verdicts were downloaded."""
        chunk, plan_chunk = self._state.verdicts
        if self._plans is not None and plan_chunk != _GOOD:
            return BAD_PLAN
        return chunk if chunk != _GOOD else None

    def close(self) -> None:
        """Wipe the host's key of the plans, and drop the reference to the array."""
        if self._plans is not None:
            self._plans.wipe()
        self._memory = replace(self._memory, array=None)

    def _open(
        self,
        current: CommandList,
        slab: Segment,
        sealed: Bytes,
        buffer: CudaStagingBuffer,
        count: int,
        segment: TableSegment,
        plan_arguments: Sequence[int],
        plan: SealedPlan | None,
    ) -> None:
        commands, lane, uploads = current.commands, self._lane, self._uploads
        current.use(buffer)
        if address(sealed) != buffer.address:
            current.mark("wait", slab)
            wait_for(commands, buffer.used)
            current.mark("source", slab)
            if slab.plan is None:
                commands.copy(buffer.memory[: slab.sealed_size], sealed[: slab.sealed_size])
            else:
                commands.pack(buffer.memory[: slab.sealed_size], sealed, slab.plan.chunks)
        if plan is not None:
            commands.copy(buffer.memory[plan.start : plan.end], plan.sealed)
        current.mark("issue", slab)
        with self._device_span("copy", "uploads", uploads, slab, commands):
            commands.upload(buffer.device_ptr, buffer.memory[: slab.sealed_size if plan is None else plan.end], uploads)
        commands.record(buffer.copied, uploads)
        commands.wait(lane.kernels, buffer.copied)
        arguments = [self._state.state, 0, buffer.device_ptr, count, 1, self._state.verdict]
        table = pack_table([segment])
        with self._device_span("open", "kernels", lane.kernels, slab, commands):
            if plan is None:
                self._launch(commands, "open", self._bits, count, arguments, table)
            else:
                self._open_plan(commands, plan, buffer)
                arguments += [*plan_arguments, self._state.plan_verdict]
                self._launch(commands, "gather", self._bits, count, arguments, table)
        commands.record(buffer.used, lane.kernels)
        current.mark(None, slab)

    def _open_plan(self, commands: Commands, plan: SealedPlan, buffer: CudaStagingBuffer) -> None:
        """Record the opening of a plan, which the gather then reads."""
        segment = TableSegment(buffer.device_ptr + plan.opened, plan.first_chunk, plan.size, plan.count, 0, 0)
        arguments = [self._state.plan_state, 0, buffer.device_ptr + plan.start, plan.count, 1, self._state.plan_verdict]
        self._launch(commands, "open", PLAN_BITS, plan.count, arguments, pack_table([segment]))

    def _require_plans(self, commands: Commands) -> PlanSealer:
        """Return the sealer of the message's plans. The first call records the upload of its key."""
        if self._plans is None:
            key = self._resources.session.next_key()
            try:
                self._state.load_plan_key(key)
                self._plans = PlanSealer(self._resources.engine, key)
            finally:
                key.wipe()
            self._state.upload_plan_key(commands, self._lane.kernels)
        return self._plans

    def _store(self, current: CommandList, buffer: CudaStagingBuffer) -> None:
        """Record the copy of a sealed slab from its buffer to its destination, if there is one."""
        if buffer not in self._to_store:
            return
        sealed, slab = self._to_store.pop(buffer)
        if address(sealed) == buffer.address:
            return
        current.use(buffer)
        current.mark("wait", slab)
        wait_for(current.commands, buffer.used, _SPIN)
        current.mark("store", slab)
        current.commands.copy(sealed, buffer.memory[: slab.sealed_size])
        current.mark(None, slab)

    def _launch(
        self, commands: Commands, kernel: str, bits: int, count: int, arguments: Sequence[int], table: bytes = b""
    ) -> None:
        function = self._resources.pipeline.driver.functions[f"{kernel}_{bits}"]
        commands.launch(function, min(count, self._resources.blocks), arguments, self._lane.kernels, table)

    def _device_span(
        self, name: str, track: str, stream: Stream, slab: Segment, commands: Commands
    ) -> AbstractContextManager[None]:
        """Add the device time of the block's commands to the timeline, if there is one."""
        if self._clock is None:
            return nullcontext()
        return self._clock.span(name, track, stream, slab.detail, commands)


def wait_for(commands: Commands, event: Event, spin: int = 0) -> None:
    """Record a wait for an event that releases the interpreter's lock after `spin` nanoseconds."""
    commands.poll(event, spin, stop=True)
    commands.synchronize(event)


def _check_slab(slab: Segment, sealed: Bytes, buffer: CudaStagingBuffer, nbytes: int) -> int:
    """Require a slab within its message and its buffer, as the kernels rely on, and return its number of chunks."""
    check_buffers(sealed)
    count = chunks_between(slab.sealed_size, slab.stop - slab.start, slab.first_chunk)
    fits = slab.stop <= nbytes and slab.sealed_size <= min(buffer.memory.size, sealed.size)
    if slab.start != slab.first_chunk * CHUNK_SIZE or not fits:
        raise ValueError(f"a slab reaches outside its message or its staging buffer: {slab}")
    return count


def _check_gather(slab: Segment, plan: GatherPlan, sealed: Bytes, buffer: CudaStagingBuffer, nbytes: int) -> int:
    """Require a gather within its message, result and buffer, as the kernels rely on. Return its number of chunks."""
    check_buffers(sealed)
    check_plan(plan, ciphertext_size(slab.stop), slab.stop, nbytes)
    count = plan.chunks.size
    sizes = np.minimum(slab.stop - plan.chunks * CHUNK_SIZE, CHUNK_SIZE) + TAG_SIZE
    ends = np.arange(count) * SEALED_CHUNK_SIZE + sizes
    whole = address(sealed) != buffer.address
    if whole and sealed.size != ciphertext_size(slab.stop):
        raise ValueError("a gather is not given the message that its chunks are of")
    needed = int(ends.max()) if count else 0
    if needed > slab.sealed_size or room_for(plan, slab.sealed_size) > buffer.memory.size:
        raise ValueError("a gather does not fit into its staging buffer, with its plan behind its chunks")
    if whole and count and needed != slab.sealed_size:
        raise ValueError("chunks of a gather are not side by side")
    return count
