"""An NVIDIA GPU: slabs are copied there as they are, and authenticated and decrypted by kernels, chunk by chunk.

The order of things on the device is kept by events alone. For a message that is opened::

    the caller's stream    started ─┐                                              ┌─ goes on
    kernels of its lane             └ key ┬ open 0   ┬ open 1   wipe key, verdict ── finished
    uploads                 slab 0 ───────┘  slab 1 ─┘

A slab's memory on the device may be read when it was `copied`, and a slot may be filled again when it was `used`, which
the host waits for. A message that is sealed goes the other way: kernel, `copied`, download, `used`.

All of it is written down as a list of commands, and the list is run by one native call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fastrack._crypto import engine as aead
from fastrack._crypto.base import Bytes, Engine, GatherPlan, check_buffers, check_plan, chunks_between
from fastrack._crypto.cobblestone import (
    CHUNK_SIZE,
    NONCE_SIZE,
    SEALED_CHUNK_SIZE,
    TAG_SIZE,
    MessageKey,
    ciphertext_size,
)
from fastrack._crypto.session import Session
from fastrack._devices.base import BAD_PLAN, Note, Slab, StagingBuffer
from fastrack._devices.cuda.buffers import Controls, CudaSlot
from fastrack._devices.cuda.clock import Clock
from fastrack._devices.cuda.commands import Commands, address
from fastrack._devices.cuda.driver import Driver, Event, Stream, View
from fastrack._devices.cuda.gather_plan import PlanSealer, SealedPlan, room_for
from fastrack._devices.cuda.streams import LANES, Pipeline
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Framework
from fastrack._util import trace as timeline
from fastrack.errors import DeviceError, FastrackError

SLAB = 8 << 20
LEAD = 2 << 20
BLOCKS = 2  # of a kernel that run on a multiprocessor at once

_GOOD = 2**64 - 1  # the verdict on a message without a bad chunk
_PLAN = 256  # bits of the key of plans
_SMALL = 64 << 10  # bytes that the host copies at most while it keeps the interpreter's lock: a few microseconds
_SPIN = 200_000  # nanoseconds to spin for the end of a message before the thread sleeps, which costs some ten more


class CudaDevice:
    """`Device` on an NVIDIA GPU.

    Parameters
    ----------
    driver : Driver
        The GPU.
    share : float
        The share of its multiprocessors that kernels may take, above 0 and at most 1. The rest stays free for what else
        runs there.
    threads : int
        How many of the host's threads may fill slabs.

    Raises
    ------
    ValueError
        If there is no such share.
    """

    in_place = False
    slab = SLAB
    lead = LEAD
    lanes = LANES

    def __init__(self, driver: Driver, *, share: float = 1.0, threads: int = 1) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share= must be above 0 and at most 1, not {share}")
        self.name = driver.name
        self._pipeline = Pipeline(driver)
        self._controls = Controls(driver)
        self._blocks = max(1, int(share * driver.multiprocessors) * BLOCKS)
        self._threads = threads
        self._engine = aead.get_engine(threads=1)
        self._session = Session(_PLAN)  # keys of plans

    def framework(self, wanted: Framework | None, origin: Framework | None) -> Framework:
        if wanted == "numpy":
            raise DeviceError(
                f"NumPy keeps no arrays on {self.name!r}; ask for framework='torch' or 'cupy', or another device"
            )
        if wanted is not None:
            return wanted
        if origin is None:
            return "torch" if arrays.installed("torch") else "cupy"
        return "cupy" if origin == "numpy" else origin

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> tuple[Any, View]:
        self._pipeline.require_usable()
        array = self._pipeline.driver.empty(dtype, shape, framework)
        return array, self._pipeline.driver.view(array, writable=True)

    def view(self, array: Any, *, writable: bool) -> View:
        self._pipeline.require_usable()
        return self._pipeline.driver.view(array, writable=writable)

    def clear(self, memory: View) -> None:
        self._pipeline.require_usable()
        driver, kernels = self._pipeline.driver, self._pipeline.lane(memory.stream).kernels
        commands, event = Commands(), driver.event()
        commands.record(event, memory.stream)
        commands.wait(kernels, event)
        if memory.nbytes:
            commands.fill(memory.pointer, 0, memory.nbytes, kernels)
        commands.record(event, kernels)
        commands.synchronize(event)
        driver.issue(commands)

    def slot(self, size: int) -> CudaSlot:
        self._pipeline.require_usable()
        return CudaSlot(self._pipeline, size)

    def begin(self, key: MessageKey, memory: View, note: Note | None = None) -> CudaWork:
        self._pipeline.require_usable()
        return CudaWork(
            self._pipeline, self._controls, self._blocks, self._threads, self._engine, self._session, key, memory, note
        )

    def close(self) -> None:
        self._session.wipe()
        if not self._pipeline.forked and self._pipeline.close():
            self._controls.wipe(self._pipeline)
            self._pipeline.driver.reclaim()


class CudaWork:
    """`Work` on the streams of a lane.

    What fails is kept: later slabs are refused, slots come back all the same, and `verdict` tells.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        controls: Controls,
        blocks: int,
        threads: int,
        engine: Engine,
        session: Session,
        key: MessageKey,
        memory: View,
        note: Note | None,
    ) -> None:
        self._pipeline = pipeline
        self._driver = pipeline.driver
        self._blocks = blocks
        self._threads = threads
        self._engine = engine
        self._session = session
        self._plans: PlanSealer | None = None  # made for the first gather
        self._memory = memory
        self._note = note
        self._bits = 8 * (len(key.material) - NONCE_SIZE)
        self._timeline = timeline.current()
        self._error: BaseException | None = None
        self._word: int | None = None  # what the device said of the chunks, once it is known
        self._bad: int | None = None  # the verdict by then
        self._issued = threading.Event()  # the last list of commands was
        self._issued.set()
        self._reading = threading.Lock()
        self._landing: dict[CudaSlot, tuple[Bytes, Slab]] = {}  # what was sealed and is still to be taken out of a slot
        self._lane = lane = pipeline.lane(memory.stream)
        self.lane = lane.number
        self._controls = controls
        self._control = control = controls.take()
        self._ended = False
        try:
            control.put(key)
            self._clock = None if self._timeline is None else Clock(self._timeline, self._driver, pipeline.idle)
            self._list: _List | None = self._new_list()
            # On the caller's thread: a stream that belongs to a thread is another one elsewhere.
            start = Commands() if pipeline.threaded else self._list.commands
            # The array may still be written to or read by what its owner started before.
            start.record(control.started, memory.stream)
            if pipeline.threaded:
                self._driver.issue(start)
            self._list.commands.wait(lane.kernels, control.started)
            control.start(self._list.commands, lane.kernels)
        except FastrackError:
            control.forget()
            controls.give_back(control)
            raise
        except BaseException:
            control.forget()
            raise

    def open(self, slab: Slab, sealed: Bytes, slot: StagingBuffer | None) -> None:
        self._require_usable()
        assert isinstance(slot, CudaSlot)
        if slab.pieces is None:
            count = self._require_run(slab, sealed, slot)
            where = [self._memory.pointer + slab.start, slab.first, count, slab.stop - slab.start]
            self._open(slab, slot, sealed, None, "open", count, where)
            return
        count = self._require_gather(slab, slab.pieces, sealed, slot)
        if count:
            plan = self._require_plans().seal(slab.pieces, slab.sealed)
            chunks = slot.device_ptr + plan.opened
            starts = chunks + slab.pieces.chunks.nbytes
            where = [self._memory.pointer, chunks, starts, starts + slab.pieces.starts.nbytes]
            where += [count, len(slab.pieces.table), slab.stop, self._memory.nbytes]
            self._open(slab, slot, sealed, plan, "gather", count, where)

    def seal(self, slab: Slab, sealed: Bytes, slot: StagingBuffer | None) -> None:
        self._require_usable()
        assert isinstance(slot, CudaSlot)
        count = self._require_run(slab, sealed, slot)
        current, lane = self._require_list(), self._lane
        commands = current.commands
        self._land(slot)
        current.take(slot)
        current.mark("wait", slab)
        _wait_for(commands, slot.used)
        current.mark("issue", slab)
        where = [self._control.state, self._memory.pointer + slab.start, slot.device_ptr]
        where += [slab.first, count, slab.stop - slab.start]
        with self._shown("seal", "kernels", lane.kernels, slab):
            self._launch("seal", count, where)
        commands.record(slot.copied, lane.kernels)
        commands.wait(lane.downloads, slot.copied)
        with self._shown("copy", "downloads", lane.downloads, slab):
            commands.download(slot.memory[: slab.sealed], slot.device_ptr, lane.downloads)
        commands.record(slot.used, lane.downloads)
        current.mark(None, slab)
        self._landing[slot] = sealed, slab

    def issue(self) -> None:
        if not self._pipeline.forked:
            self._run(self._require_list())  # after a failure too: nothing of it is issued, and slots come back

    def end(self, *, wait: bool = False) -> None:
        if self._pipeline.forked or self._ended:
            return
        if self._error is None and self._list is None:
            self._issued.wait()  # it may have been handed over before the interrupt
            self.fail(DeviceError("it was interrupted"))
        if self._error is None:
            commands = self._require_list()
            for slot in list(self._landing):
                self._land(slot)
            self._control.finish(commands.commands, self._lane.kernels)
            if not self._pipeline.threaded:
                self._let_wait(commands.commands, wait=wait)
            self._run(commands)
            if self._pipeline.threaded:
                self._issued.wait()
                after = Commands()
                self._let_wait(after, wait=wait)
                if self._error is None:
                    self._guarded(partial(self._driver.issue, after))
        self._issued.wait()  # after a failure: until the key was wiped
        if self._list is not None:
            self._list.issued.set()  # or slots that a list holds which is not issued any more would never come back
        self._forget_plans()
        self._memory = replace(self._memory, array=None)
        self._ended = True
        if wait and self._error is None:
            self._read()

    def done(self) -> bool:
        if self._error is not None or self._word is not None or self._pipeline.forked:
            return True
        try:
            return self._issued.is_set() and self._driver.done(self._control.finished)
        except DeviceError:  # `verdict` will find out, and tell
            return True

    def verdict(self) -> int | None:
        if self._pipeline.forked:
            self._pipeline.require_usable()
        self.end(wait=True)  # an interrupt may have cut it short, and then `finished` still tells of another message
        self._issued.wait()
        if self._error is None and self._word is None:
            try:
                if not self._driver.done(self._control.finished):
                    self._pipeline.synchronize(self._control.finished)
                self._read()
            except DeviceError as error:
                self.fail(error)
        self._require_good()
        return self._bad

    def fail(self, error: BaseException) -> None:
        """Wait until the device leaves alone what it was given, wipe the key, and keep what went wrong."""
        self._error = self._error or error
        self._pipeline.settle()
        commands = Commands()
        self._control.clear(commands, self._lane.kernels)
        try:
            self._driver.issue(commands)
            self._pipeline.settle()
        except Exception:  # noqa: BLE001 - the first error is the one to tell
            self._pipeline.settle()
        self._control.forget()

    def __del__(self) -> None:
        ended = getattr(self, "_ended", None)  # None if `__init__` has raised before
        if ended is False and not self._pipeline.forked:  # dropped by an interrupt; closing wipes the device
            self._control.forget()
            self._forget_plans()
        # The verdict of this work was never asked for. `finished` tells when its control may be used again.
        if ended and self._word is None and self._error is None and self._issued.is_set():
            self._controls.give_back(self._control)

    # The list of commands.

    def _open(
        self,
        slab: Slab,
        slot: CudaSlot,
        sealed: Bytes,
        plan: SealedPlan | None,
        kernel: str,
        count: int,
        where: Sequence[int],
    ) -> None:
        current, lane, uploads = self._require_list(), self._lane, self._pipeline.uploads
        commands = current.commands
        current.take(slot)
        if address(sealed) != slot.address:
            current.mark("wait", slab)
            _wait_for(commands, slot.used)
            current.mark("source", slab)
            if slab.pieces is None:
                commands.copy(slot.memory[: slab.sealed], sealed[: slab.sealed])
            else:
                commands.pack(slot.memory[: slab.sealed], sealed, slab.pieces.chunks)
        if plan is not None:
            commands.copy(slot.memory[plan.start : plan.end], plan.sealed)
        current.mark("issue", slab)
        with self._shown("copy", "uploads", uploads, slab):
            commands.upload(slot.device_ptr, slot.memory[: slab.sealed if plan is None else plan.end], uploads)
        commands.record(slot.copied, uploads)
        commands.wait(lane.kernels, slot.copied)
        arguments = [self._control.state, slot.device_ptr, *where, self._control.verdict]
        with self._shown("open", "kernels", lane.kernels, slab):
            if plan is not None:
                self._open_plan(plan, slot)
                arguments.append(self._control.plan_verdict)
            self._launch(kernel, count, arguments)
        commands.record(slot.used, lane.kernels)
        current.mark(None, slab)

    def _open_plan(self, plan: SealedPlan, slot: CudaSlot) -> None:
        """Open the plan of a gather on the device, before the gather reads it."""
        control = self._control
        places = [control.plan_state, slot.device_ptr + plan.start, slot.device_ptr + plan.opened]
        self._launch("open", plan.count, [*places, plan.first, plan.count, plan.size, control.plan_verdict], bits=_PLAN)

    def _require_plans(self) -> PlanSealer:
        """Return what seals the plans of this work, whose key the device has."""
        if self._plans is None:
            key = self._session.next_key()
            try:
                self._control.put_plan_key(key)
                self._plans = PlanSealer(self._engine, key)
            finally:
                key.wipe()
            self._control.start_plans(self._require_list().commands, self._lane.kernels)
        return self._plans

    def _forget_plans(self) -> None:
        """Wipe the key of the plans here."""
        if self._plans is not None:
            self._plans.wipe()

    def _land(self, slot: CudaSlot) -> None:
        """Take what was sealed out of a slot, if that is still to be done."""
        if slot not in self._landing:
            return
        sealed, slab = self._landing.pop(slot)
        if address(sealed) == slot.address:
            return
        current = self._require_list()
        current.take(slot)
        current.mark("wait", slab)
        _wait_for(current.commands, slot.used, _SPIN)
        current.mark("store", slab)
        current.commands.copy(sealed, slot.memory[: slab.sealed])
        current.mark(None, slab)

    def _launch(self, kernel: str, count: int, arguments: Sequence[int], *, bits: int | None = None) -> None:
        function = self._driver.functions[f"{kernel}_{bits or self._bits}"]
        self._require_list().commands.launch(function, min(count, self._blocks), arguments, self._lane.kernels)

    def _let_wait(self, commands: Commands, *, wait: bool) -> None:
        """Have the caller's stream wait for the end, and with `wait` the thread too."""
        commands.wait(self._memory.stream, self._control.finished)
        if wait:
            _wait_for(commands, self._control.finished, _SPIN)

    def _new_list(self) -> _List:
        """Begin a list of commands, which keeps the interpreter's lock only where nothing can block.

        A call that puts something on a stream that is full blocks until the stream goes on. Those of a lane wait for
        nothing but the callers' streams.
        """
        made = _List()
        made.commands.require_idle(self._memory.stream)
        if self._lane.shared:
            made.commands.require_idle(self._lane.kernels)
        return made

    def _require_list(self) -> _List:
        if self._list is None:
            raise DeviceError(f"{self._driver.name}: a transfer was interrupted; start it again")
        return self._list

    def _shown(self, name: str, row: str, stream: Stream, slab: Slab) -> AbstractContextManager[None]:
        """When the device does what the block puts on a stream, if a timeline wants to know."""
        if self._clock is None:
            return nullcontext()
        return self._clock.span(name, row, stream, slab.detail, self._require_list().commands)

    # Running it.

    def _run(self, commands: _List) -> None:
        """Have the list issued, here or by the pipeline's thread, and begin another one."""
        self._list = None  # an interrupt that loses a list must not leave a verdict without it
        self._issued = commands.issued
        try:
            self._pipeline.require_usable()
            if self._pipeline.threaded:
                self._pipeline.submit(partial(self._execute, commands))
            else:
                self._execute(commands)
        except FastrackError as error:  # closed or given up; closing wipes what is on the device
            self._error = self._error or error
            self._control.forget()
            commands.issued.set()
        except BaseException:
            self._pipeline.submit_after_all(commands.issued.set)
            raise
        self._list = self._new_list()

    def _execute(self, commands: _List) -> None:
        try:
            if self._error is None:
                hold = not self._pipeline.threaded and commands.commands.copies <= _SMALL
                self._guarded(lambda: self._driver.issue(commands.commands, threads=self._threads, hold=hold))
                self._tell(commands)
        finally:
            commands.issued.set()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - told by `verdict`
            self.fail(error)

    def _tell(self, commands: _List) -> None:
        """Report when each part of a list was run."""
        for name, slab, start, stop in commands.spans():
            if not self._pipeline.threaded:
                if self._note is not None:
                    self._note(name, slab, start, stop)
            elif self._timeline is not None:
                self._timeline.add(name, start, stop, slab.detail)

    def _read(self) -> None:
        """Take the verdict, which is there, and give the control back."""
        with self._reading:  # or the control would come back twice, and serve two messages at once
            if self._word is None:
                word, plans = self._control.words
                if self._plans is not None and plans != _GOOD:
                    self._bad = BAD_PLAN
                elif word != _GOOD:
                    self._bad = word
                self._word = word  # last: an interrupt or another thread must not take a bad verdict for a good one
                self._controls.give_back(self._control)

    # Checks.

    def _require_usable(self) -> None:
        self._pipeline.require_usable()  # a forked child may not even write to a slot
        self._require_good()

    def _require_good(self) -> None:
        if self._error is not None:
            raise DeviceError(f"{self._driver.name} failed: {self._error}") from self._error

    def _require_run(self, slab: Slab, sealed: Bytes, slot: CudaSlot) -> int:
        """Count the chunks of a slab that lies within its message and its slot. The kernels rely on this check."""
        check_buffers(sealed)
        count = chunks_between(slab.sealed, slab.stop - slab.start, slab.first)
        fits = slab.stop <= self._memory.nbytes and slab.sealed <= min(slot.memory.size, sealed.size)
        if slab.start != slab.first * CHUNK_SIZE or not fits:
            raise ValueError(f"a slab reaches outside its message or its slot: {slab}")
        return count

    def _require_gather(self, slab: Slab, pieces: GatherPlan, sealed: Bytes, slot: CudaSlot) -> int:
        """Count the chunks of a gather that reaches for nothing it may not. The kernels rely on this check."""
        check_buffers(sealed)
        check_plan(pieces, ciphertext_size(slab.stop), slab.stop, self._memory.nbytes)
        count = pieces.chunks.size
        sizes = np.minimum(slab.stop - pieces.chunks * CHUNK_SIZE, CHUNK_SIZE) + TAG_SIZE
        ends = np.arange(count) * SEALED_CHUNK_SIZE + sizes
        whole = address(sealed) != slot.address
        if whole and sealed.size != ciphertext_size(slab.stop):
            raise ValueError("a gather is not given the message that its chunks are of")
        needed = int(ends.max()) if count else 0
        if needed > slab.sealed or room_for(pieces, slab.sealed) > slot.memory.size:
            raise ValueError("a gather does not fit into its slot, with its plan behind its chunks")
        if whole and count and needed != slab.sealed:
            raise ValueError("chunks of a gather are not side by side")
        return count


class _List:
    """Commands, what slots they use, and when parts of them ran."""

    def __init__(self) -> None:
        self.commands = Commands()
        self.issued = threading.Event()
        self._marks: list[tuple[str | None, Slab, int]] = []

    def take(self, slot: CudaSlot) -> None:
        """Say that a slot is in use until this list was issued."""
        slot.issued = self.issued

    def mark(self, name: str | None, slab: Slab) -> None:
        """Begin a part of this name, or none. What was begun before ends here."""
        self._marks.append((name, slab, self.commands.stamp()))

    def spans(self) -> list[tuple[str, Slab, int, int]]:
        """The parts, when all has run."""
        code = self.commands.code
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [(name, slab, code[start], code[stop]) for (name, slab, start), (*_, stop) in pairs if name is not None]


def _wait_for(commands: Commands, event: Event, spin: int = 0) -> None:
    """Block until an event happened, without the interpreter's lock unless that takes no longer than `spin`."""
    commands.poll(event, spin, stop=True)
    commands.synchronize(event)
