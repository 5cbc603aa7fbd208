"""When things happen on a device, in the host's time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import Driver, Event, Stream
from fastrack._util.trace import Detail, Timeline


class Clock:
    """The time of a device, fitted to the host's when this is made, on a stream that has nothing to do.

    Kept for one message: clocks drift, and the device counts milliseconds in 24 bits.
    """

    def __init__(self, timeline: Timeline, driver: Driver, stream: Stream) -> None:
        self._timeline = timeline
        self._driver = driver
        self._zero = driver.event(timed=True)
        commands = Commands()
        commands.record(self._zero, stream)
        commands.synchronize(self._zero)
        before = time.perf_counter_ns()
        driver.issue(commands)
        self._host = (before + time.perf_counter_ns()) // 2

    @contextmanager
    def span(self, name: str, row: str, stream: Stream, detail: Detail, commands: Commands) -> Iterator[None]:
        """Show what the block puts on a stream, which has a row of this name."""
        start, stop = self._driver.event(timed=True), self._driver.event(timed=True)
        commands.keep((start, stop))
        commands.record(start, stream)
        yield
        commands.record(stop, stream)
        where = self._driver.name, row, stream.ptr
        self._timeline.add_deferred(name, where, partial(self._times, start, stop), detail)

    def _times(self, start: Event, stop: Event) -> tuple[int, int]:
        commands = Commands()
        commands.synchronize(stop)
        self._driver.issue(commands)
        return self._at(start), self._at(stop)

    def _at(self, event: Event) -> int:
        return self._host + round(1e9 * self._driver.elapsed(self._zero, event))
