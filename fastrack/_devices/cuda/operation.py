"""The messages of a call on a CUDA device: record lists of commands, issue them, and wait for their results."""

from __future__ import annotations

import threading
import time
from enum import Enum, auto

from fastrack._crypto.base import Messages
from fastrack._devices.base import BadChunk, Slab, SpanCallback, StagingBuffer
from fastrack._devices.cuda.buffers import CudaStagingBuffer
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.recorder import CommandList, MessageRecorder, Resources
from fastrack._util import trace
from fastrack.errors import DeviceError, FastrackError

_MAX_HELD_COPY = 64 << 10  # bytes that the host copies in microseconds, so that it may hold the GIL


class _Phase(Enum):
    RECORDING = auto()  # more slabs may come
    ISSUING = auto()  # a list is being issued; after an interrupt it may be lost
    ISSUED = auto()  # the last list was issued
    FINISHED = auto()


class CudaOperation:
    """`DeviceOperation` on the streams of a lane.

    After an error later slabs are refused, staging buffers are still freed, and `result` raises the error.
    """

    def __init__(self, resources: Resources, messages: Messages, note: SpanCallback | None) -> None:
        self._resources = resources
        self._pipeline = pipeline = resources.pipeline
        self._driver = pipeline.driver
        self._note = note
        timeline = trace.active
        self._error: BaseException | None = None
        self._cleared = False  # whether the state was wiped on the device after an error
        self._result: tuple[BadChunk | None] | None = None  # what the verdict says, once it was read
        self._reading = threading.RLock()  # which a signal handler of the thread that reads may take, too
        self._lane = lane = pipeline.lane(messages.memories[0].stream)  # all messages share it
        self.lane = lane.number
        key, call = resources.link.key_for(self), next(resources.calls)
        self._state = state = resources.states.acquire(len(messages))
        try:
            # In confidential mode events have no true times.
            clock = None if timeline is None or pipeline.confidential else timeline.clock(self._driver, pipeline.idle)
            self._recorder = MessageRecorder(resources, state, messages, lane, key, call, clock)
            self._list = self._recorder.new_list()
            self._recorder.start(self._list.commands)
            self._phase = _Phase.RECORDING
        except FastrackError:
            resources.states.release(state)
            raise

    def open(self, slab: Slab | None, buffer: StagingBuffer | None) -> None:
        self._recorder.open(*self._require_usable(slab, buffer))

    def seal(self, slab: Slab | None, buffer: StagingBuffer | None) -> None:
        self._recorder.seal(*self._require_usable(slab, buffer))

    def issue(self) -> None:
        if not self._pipeline.forked:
            self._issue(_Phase.RECORDING)  # also after an error: the commands are dropped and their buffers are freed

    def finish(self, *, wait: bool = False) -> None:
        if self._pipeline.forked or self._phase is _Phase.FINISHED:
            return
        if self._error is None and self._phase is _Phase.ISSUING:
            self._fail(DeviceError("it was interrupted"))
        if self._error is None and self._phase is _Phase.RECORDING:
            downloaded = self._recorder.finish(self._list, wait=wait)
            self._issue(_Phase.ISSUED)
            if not downloaded and self._error is None:
                self._state.ended, self._state.is_unread = time.monotonic(), True
        self._list.issued.set()  # after an error, frees the buffers of a list that was never issued
        self._recorder.close()
        self._resources.link.release(self)
        interrupted, self._phase = self._phase is _Phase.ISSUING, _Phase.FINISHED
        if not interrupted:
            self._release_cleared()
        if wait and self._error is None:
            self._read_result()

    def done(self) -> bool:
        if self._error is not None or self._result is not None or self._pipeline.forked:
            return True
        try:
            return self._resources.states.is_due(self._state) and self._driver.done(self._state.finished)
        except DeviceError:  # `result` raises it
            return True

    def result(self) -> BadChunk | None:
        if self._pipeline.forked:
            self._pipeline.require_usable()
        self.finish(wait=True)  # after an interrupted `finish` the event `finished` may still belong to another message
        if self._error is None and self._result is None:
            try:
                if not self._driver.done(self._state.finished):
                    self._pipeline.synchronize(self._state.finished)
                self._read_result()
            except DeviceError as error:
                self._fail(error)
                self._release_cleared()
        self._require_no_error()
        assert self._result is not None
        return self._result[0]

    def __del__(self) -> None:
        phase = getattr(self, "_phase", None)  # None if `__init__` raised
        if phase is None or self._pipeline.forked:
            return
        if phase is not _Phase.FINISHED:  # after an interrupt; `CudaDevice.close` wipes the key on the device
            self._recorder.close()
            self._list.issued.set()  # it never will be: its buffers are free
        elif self._result is None and self._error is None:  # `result` was never called
            self._resources.states.release(self._state)

    def _issue(self, phase: _Phase) -> None:
        """Issue the list of commands, and begin the next list and phase."""
        current = self._require_list()
        if self._error is None and self._phase is _Phase.RECORDING:
            self._recorder.download_slab(current)
        self._phase = _Phase.ISSUING  # until the end: after an interrupt the list may be lost
        try:
            self._pipeline.require_usable()
            self._execute(current)
        except FastrackError as error:  # the device was closed or has failed, and closing wipes its memory
            self._error = self._error or error
        finally:
            current.issued.set()
        self._list = self._recorder.new_list()
        self._phase = phase

    def _execute(self, current: CommandList) -> None:
        """Run a list of commands, unless an earlier list has failed."""
        if self._error is not None:
            return
        hold = not self._pipeline.confidential and current.commands.copies <= _MAX_HELD_COPY
        try:
            self._driver.issue(current.commands, threads=self._resources.threads, hold=hold)
        except Exception as error:  # noqa: BLE001 - raised by `result`
            self._fail(error)
        else:
            if self._note is not None:
                for span in current.spans():
                    self._note(*span)

    def _fail(self, error: BaseException) -> None:
        """Store an error, wait until the device uses no memory of these messages, and wipe their expanded keys."""
        self._error = self._error or error
        self._pipeline.synchronize_all(self._lane)  # not those of others, whose streams may be busy for long
        commands = Commands()
        self._state.wipe_device(commands, self._lane.kernels)
        try:
            self._driver.issue(commands)
        except Exception:  # noqa: BLE001 - the first error is the one to raise
            cleared = False
        else:
            cleared = True
        self._pipeline.synchronize_all(self._lane)
        self._cleared = cleared  # after the wait: then another call may have the state

    def _release_cleared(self) -> None:
        """Release the message state after an error, once."""
        with self._reading:
            if self._cleared:
                self._cleared = False
                self._resources.states.release(self._state)

    def _read_result(self) -> None:
        """Read the verdict, which is downloaded if it was not, and release the message state."""
        with self._reading:  # or two threads would release the state twice, and two messages would share it
            if self._result is not None:
                return
            self._resources.states.read(self._state)
            result = (self._recorder.bad_chunk(),)
            if self._result is None:  # else a signal handler has read it meanwhile
                self._result = result
                self._resources.states.release(self._state)

    def _require_usable(
        self, slab: Slab | None, buffer: StagingBuffer | None
    ) -> tuple[CommandList, Slab, CudaStagingBuffer]:
        self._pipeline.require_usable()  # a forked child must not even write to a staging buffer
        self._require_no_error()
        assert slab is not None
        assert isinstance(buffer, CudaStagingBuffer)
        return self._require_list(), slab, buffer

    def _require_no_error(self) -> None:
        if self._error is not None:
            raise DeviceError(f"{self._driver.name} failed: {self._error}") from self._error

    def _require_list(self) -> CommandList:
        if self._phase is not _Phase.RECORDING:
            raise DeviceError(f"{self._driver.name}: a transfer was interrupted; start it again")
        return self._list
