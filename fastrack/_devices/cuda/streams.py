"""The streams of a CUDA device."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import Driver, Event, Stream
from fastrack._util.fork import register_fork_reset
from fastrack.errors import ClosedError, DeviceError

LANES = 4
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # the hardware's queues for streams, as CUDA reads it when a process begins
_DEFAULT_CONNECTIONS = 8
_MAX_KNOWN_STREAMS = 1024


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

    Each caller's thread issues its own commands. In confidential mode a copy blocks its thread until the stream has
    finished all earlier work, and nothing published says whether other copies wait meanwhile. So no copy follows work
    of others on its stream: keys and slabs go on `uploads`, and results come once the thread waited for their event.
    Correctness does not depend on that, nor on streams that run concurrently.

    `forked` is True for a copy in a forked child, where the driver must not be used, not even to free memory.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.confidential = driver.confidential
        self.uploads = driver.stream(high_priority=True)
        self.forked = False
        self._idle: Stream | None = None
        self.lanes = count_lanes()
        self._lanes: list[Lane] = []
        self._lane_of: dict[int, Lane] = {}
        self._lock = threading.RLock()  # as that of `Link`
        self._closed = False
        self._failure: BaseException | None = None
        register_fork_reset(self)

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
    def kernels(self) -> list[Stream]:
        """The streams that run kernels: that for uploads, and those of all lanes."""
        return [self.uploads, *(lane.kernels for lane in self._lanes)]

    @property
    def idle(self) -> Stream:
        """A stream for work that nothing waits for: the events of clocks, and the wiping of a link's keys."""
        with self._lock:
            if self._idle is None:
                self._idle = self.driver.stream(high_priority=True)
            return self._idle

    def synchronize(self, event: Event) -> None:
        """Block this thread until an event is done."""
        commands = Commands()
        commands.synchronize(event)
        self.driver.issue(commands)

    def synchronize_all(self, *lanes: Lane) -> None:
        """Wait, after a failure, until these lanes are idle, or all, and uploads, so that memory in use is free.

        If waiting fails too, the state of the device is unknown, and no more commands are accepted.
        """
        try:
            commands = Commands()
            used = ((lane.kernels, lane.downloads) for lane in lanes or self._lanes)
            own = (stream for both in used for stream in both if stream is not None)
            for stream in (self.uploads, *own):
                event = self.driver.event()
                commands.drain(stream, event)
                commands.keep_alive(event)
            self.driver.issue(commands)
        except Exception as error:  # noqa: BLE001 - after any error the state of the device is unknown
            self._failure = error

    def close(self) -> bool:
        """Refuse all use from now on, and return whether this was the first call."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        return not was_closed


def count_lanes() -> int:
    """Return the number of lanes: each has a connection of the hardware for its kernels, and uploads have one."""
    try:
        connections = int(os.environ.get(CONNECTIONS, ""))
    except ValueError:
        connections = _DEFAULT_CONNECTIONS
    return max(1, min(LANES, connections - 1))
