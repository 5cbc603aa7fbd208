"""Record the time, thread and device stream of each step of every transfer."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from fastrack._devices.cuda.driver import Driver, Stream
from fastrack._transfer.device_clock import Clock
from fastrack._util import trace
from fastrack._util.fork import per_process
from fastrack._util.trace import Detail, Steps

Recorded = tuple[str, int, int, int, Detail]

HOST = "host"


class Timeline:
    """A collection of spans, added by any thread. Times are from `time.perf_counter_ns`."""

    def __init__(self) -> None:
        self.zero = time.perf_counter_ns()
        self.began = datetime.now(UTC)
        self.lost = 0  # spans whose times the device did not tell
        self.local = threading.local()  # `transfer`: the transfer that a thread executes; `track`: its number
        self.recorded: list[Recorded] = []  # `append` needs no lock
        self.deferred: list[tuple[str, Callable[[], tuple[int, int]], int, Detail]] = []
        self.transfers: list[tuple[int, str, int, int, int, str | None, Steps]] = []
        self.tracks: dict[int, tuple[str, str]] = {}
        self._numbers: dict[tuple[str, str, int], int] = {}  # of the tracks of workers and of streams
        self._lock = per_process(self, "_lock", threading.Lock)

    def add(self, name: str, start: int, stop: int, detail: Detail) -> None:
        """Add a span on the calling thread."""
        self.recorded.append((name, start, stop, self._track(), detail))

    def add_worker(self, number: int, start: int, stop: int) -> None:
        """Add a span of a worker thread that took part in the current step of the calling thread."""
        transfer = getattr(self.local, "transfer", None)
        if transfer is not None:
            track = self._number((HOST, f"fastrack_{number}", number))
            self.recorded.append((transfer.current_span, start, stop, track, {}))

    def add_transfer(self, name: str, start: int, stop: int, size: int, tensor: str | None, steps: Steps) -> None:
        """Add a transfer on the calling thread, and its steps in order."""
        self.transfers.append((self._track(), name, start, stop, size, tensor, steps))

    def add_deferred(
        self, name: str, stream: tuple[str, str, int], times: Callable[[], tuple[int, int]], detail: Detail
    ) -> None:
        """Add a span on a stream of a device. Its start and stop become known after its end.

        `stream` has the names of the device and of the stream, and a number, since each channel has its own streams.
        `times` returns start and stop. A span for which it raises `DeviceError` is counted as lost.
        """
        self.deferred.append((name, times, self._number(stream), detail))

    def clock(self, driver: Driver, stream: Stream) -> Clock:
        """Return a clock of a device for one message, synchronized by an event on an idle stream."""
        return Clock(self.add_deferred, driver, stream)

    def _number(self, row: tuple[str, str, int]) -> int:
        """Return the number of the track of a worker or a stream, which gets one at its first span."""
        with self._lock:
            if row not in self._numbers:
                self._numbers[row] = len(self.tracks) + 1
                self.tracks[self._numbers[row]] = row[:2]
            return self._numbers[row]

    def _track(self) -> int:
        try:
            track: int = self.local.track
        except AttributeError:
            with self._lock:
                track = self.local.track = len(self.tracks) + 1
                self.tracks[track] = HOST, threading.current_thread().name
        return track


@contextmanager
def recording() -> Iterator[Timeline]:
    """Collect the spans of all transfers while the block runs. Raise RuntimeError if a trace is already recorded."""
    timeline = Timeline()
    with _lock:
        if trace.active is not None:
            raise RuntimeError("a trace is being recorded already; end it first")
        trace.record(timeline)
    try:
        yield timeline
    finally:
        with _lock:
            trace.end(timeline)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Add the block as a step of the calling thread, if a trace is being recorded."""
    timeline = trace.active
    if timeline is None:
        yield
        return
    start = time.perf_counter_ns()
    try:
        yield
    finally:
        timeline.add(name, start, time.perf_counter_ns(), {})


_lock = per_process(sys.modules[__name__], "_lock", threading.Lock)
