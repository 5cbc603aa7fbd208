"""The streams of a CUDA device, and the thread that issues commands in confidential mode."""

from __future__ import annotations

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
_KNOWN = 1024  # streams whose lane is remembered

Job = Callable[[], None]


@dataclass(slots=True)
class Lane:
    """The streams of the transfers of one caller's stream, or of some: they wait for what is on it.

    number : below `LANES`
    kernels : runs the kernels, and copies what is small
    downloads : brings sealed slabs to the host
    shared : whether it is of several callers' streams
    """

    number: int
    kernels: Stream
    downloads: Stream
    shared: bool = False


class Pipeline:
    """A driver and its streams.

    Uploads share a stream, on which nothing ever waits for a kernel. What waits for a caller's stream has a lane, so
    that it holds up no other caller's transfers.

    Outside of confidential mode the caller's thread issues its own commands. In confidential mode an asynchronous copy
    blocks the thread that asks for it, until all that was put on its stream before is done: there one thread issues
    them all. Nothing relies on streams that run side by side.

    Attributes
    ----------
    forked : bool
        Whether this is a copy in a forked child. The driver must not be touched there, not even to free what it gave.
    threaded : bool
        Whether a thread of the pipeline issues commands.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.threaded = driver.confidential
        self.uploads = driver.stream(high_priority=True)
        self.forked = False
        self._idle: Stream | None = None
        self._lanes: list[Lane] = []
        self._lane_of: dict[int, Lane] = {}
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._broken: BaseException | None = None
        register_fork_reset(self)
        weakref.finalize(self, self._jobs.put, None)  # a pipeline that is dropped unclosed leaves no thread behind

    def reset_after_fork(self) -> None:
        """Find oneself in a forked child."""
        self.forked = True

    def require_usable(self) -> None:
        """Raise what says why nothing can be done here, if so."""
        name = self.driver.name
        if self.forked:
            raise DeviceError(
                f"{name} was opened before this process was forked, and CUDA does not survive a fork: start workers "
                "by the 'spawn' or 'forkserver' method, or open the channel in the child only"
            )
        if self._closed:
            raise ClosedError(f"{name} was closed; open another channel")
        if self._broken is not None:
            message = f"{name} failed and does not answer any more: {self._broken}; start the process again"
            raise DeviceError(message) from self._broken

    def lane(self, stream: Stream) -> Lane:
        """Return the lane of a caller's stream, made when first asked for. Streams beyond `LANES` share them."""
        with self._lock:
            if stream.ptr not in self._lane_of:
                if len(self._lane_of) == _KNOWN:
                    self._lane_of.clear()
                number = len(self._lane_of) % LANES
                if number == len(self._lanes):
                    driver = self.driver
                    self._lanes.append(
                        Lane(number, driver.stream(high_priority=False), driver.stream(high_priority=True))
                    )
                else:
                    self._lanes[number].shared = True
                self._lane_of[stream.ptr] = self._lanes[number]
            return self._lane_of[stream.ptr]

    @property
    def idle(self) -> Stream:
        """A stream on which nothing is put but the events of clocks."""
        with self._lock:
            if self._idle is None:
                self._idle = self.driver.stream(high_priority=True)
            return self._idle

    def submit(self, job: Job) -> None:
        """Have the pipeline's thread call `job`, after those it was given before. A job raises nothing."""
        self.require_usable()  # in a forked child, before a lock that a lost thread may hold
        with self._lock:
            self.require_usable()
            if self._thread is None:
                name = f"fastrack {self.driver.name}"
                # Before it starts: an interrupt meanwhile must not lead to a second one, which would overtake it.
                self._thread = thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    self._thread = None
                    raise DeviceError(f"{name} has no thread to copy with: {error}; end some others") from error
            self._jobs.put(job)

    def submit_after_all(self, job: Job) -> None:
        """Have `job` called after an interrupt that hides whether the thread was given another before."""
        if self._thread is None:
            job()
        else:
            self._jobs.put(job)

    def synchronize(self, event: Event) -> None:
        """Block this thread until an event happened."""
        commands = Commands()
        commands.synchronize(event)
        self.driver.issue(commands)

    def settle(self) -> None:
        """Wait, after something failed, until nothing is under way, so that all that was in use is free.

        If that fails too, nothing is known of the device any more, and it is given up.
        """
        try:
            commands = Commands()
            for stream in (self.uploads, *(own for lane in self._lanes for own in (lane.kernels, lane.downloads))):
                event = self.driver.event()
                commands.record(event, stream)
                commands.synchronize(event)
                commands.keep(event)
            self.driver.issue(commands)
        except Exception as error:  # noqa: BLE001 - whatever it was, the device is in no known state
            self._broken = error

    def close(self) -> bool:
        """End the thread when it has done what it was given. Says whether this was the first time."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        return True


def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        with suppress(Exception):  # a job keeps what went wrong itself
            job()
        del job  # it holds a slot and an array, and the next one may be long in coming
