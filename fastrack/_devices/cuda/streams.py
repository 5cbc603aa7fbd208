"""The streams of a CUDA device, and the thread that issues commands in confidential mode."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import Driver, Event, Stream
from fastrack._util.fork import register_fork_reset
from fastrack.errors import ClosedError, DeviceError

LANES = 4
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # the hardware's queues for streams, as CUDA reads it when a process begins
_DEFAULT_CONNECTIONS = 8
_MAX_KNOWN_STREAMS = 1024

Job = Callable[[], None]


@dataclass(slots=True)
class Lane:
    """The streams for transfers. They wait for one or more streams of the caller."""

    number: int  # less than `Pipeline.lanes`
    kernels: Stream  # runs kernels and small copies
    shared: bool = False  # several caller's streams use this lane
    downloads: Stream | None = None  # copies sealed slabs to the host; made at the first use


class Pipeline:
    """A driver and its streams.

    All uploads share one stream, which never waits for a kernel. Commands that wait for a caller's stream are on a
    lane, so that they do not delay transfers of other callers.

    Outside confidential mode the caller's thread issues its own commands. In confidential mode an asynchronous copy
    blocks its thread until the stream has finished all earlier work; one thread of the pipeline then issues all
    commands, and `threaded` is set. Correctness does not depend on streams that run concurrently.

    `forked` is True for a copy in a forked child, where the driver must not be used, not even to free memory.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.threaded = driver.confidential
        self.uploads = driver.stream(high_priority=True)
        self.forked = False
        self._idle: Stream | None = None
        self.lanes = count_lanes()
        self._lanes: list[Lane] = []
        self._lane_of: dict[int, Lane] = {}
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: BaseException | None = None
        register_fork_reset(self)
        weakref.finalize(self, self._jobs.put, None)  # ends the thread of a pipeline that is dropped without `close`

    def reset_after_fork(self) -> None:
        """Refuse all use in a forked child."""
        self.forked = True

    def require_usable(self) -> None:
        """Raise an error if the device was closed, has failed, or was opened before a fork."""
        name = self.driver.name
        if self.forked:
            raise DeviceError(
                f"{name} was opened before this process was forked, and CUDA does not survive a fork: start workers "
                "by the 'spawn' or 'forkserver' method, or open the channel in the child only"
            )
        if self._closed:
            raise ClosedError(f"{name} was closed; open another channel")
        if self._failure is not None:
            message = f"{name} failed and does not answer any more: {self._failure}; start the process again"
            raise DeviceError(message) from self._failure

    def lane(self, stream: Stream) -> Lane:
        """Return the lane of a caller's stream. Streams beyond the first `lanes` share lanes."""
        with self._lock:
            if stream.ptr not in self._lane_of:
                if len(self._lane_of) == _MAX_KNOWN_STREAMS:
                    self._lane_of.clear()
                number = len(self._lane_of) % self.lanes
                if number == len(self._lanes):
                    self._lanes.append(Lane(number, self.driver.stream(high_priority=False)))
                else:
                    self._lanes[number].shared = True
                self._lane_of[stream.ptr] = self._lanes[number]
            return self._lane_of[stream.ptr]

    def downloads(self, lane: Lane) -> Stream:
        """Return the stream of a lane for copies to the host.

        A lane has none before: streams that share a connection of the hardware wait for each other.
        """
        with self._lock:
            if lane.downloads is None:
                lane.downloads = self.driver.stream(high_priority=True)
            return lane.downloads

    @property
    def idle(self) -> Stream:
        """A stream for the events of clocks only."""
        with self._lock:
            if self._idle is None:
                self._idle = self.driver.stream(high_priority=True)
            return self._idle

    def submit(self, job: Job) -> None:
        """Have the pipeline's thread call `job` after all earlier jobs. A job must not raise."""
        self.require_usable()  # a forked child must not take the lock, which a thread of the parent may hold
        with self._lock:
            self.require_usable()
            if self._thread is None:
                name = f"fastrack {self.driver.name}"
                # Assigned before the start: after an interrupt in between, a second thread would overtake the first.
                self._thread = thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    self._thread = None
                    raise DeviceError(f"{name} has no thread to copy with: {error}. End other threads") from error
            self._jobs.put(job)

    def submit_unchecked(self, job: Job) -> None:
        """Have `job` called after all earlier jobs, without the checks of `submit`.

        For use after an interrupted `submit`, which may or may not have submitted its job.
        """
        if self._thread is None:
            job()
        else:
            self._jobs.put(job)

    def synchronize(self, event: Event) -> None:
        """Block this thread until an event is done."""
        commands = Commands()
        commands.synchronize(event)
        self.driver.issue(commands)

    def synchronize_all(self) -> None:
        """Wait, after a failure, until all streams are idle, so that all memory in use is free.

        If waiting fails too, the state of the device is unknown, and no more commands are accepted.
        """
        try:
            commands = Commands()
            own = (stream for lane in self._lanes for stream in (lane.kernels, lane.downloads) if stream is not None)
            for stream in (self.uploads, *own):
                event = self.driver.event()
                commands.record(event, stream)
                commands.synchronize(event)
                commands.keep_alive(event)
            self.driver.issue(commands)
        except Exception as error:  # noqa: BLE001 - after any error the state of the device is unknown
            self._failure = error

    def close(self) -> bool:
        """End the thread after its jobs, and return whether this was the first call."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        return True


def count_lanes() -> int:
    """Return the number of lanes: each has a connection of the hardware for its kernels, and uploads have one."""
    try:
        connections = int(os.environ.get(CONNECTIONS, ""))
    except ValueError:
        connections = _DEFAULT_CONNECTIONS
    return max(1, min(LANES, connections - 1))


def _run_jobs(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        with suppress(Exception):  # a job stores its own errors
            job()
        del job  # releases its staging buffers and array while the thread waits for the next job
