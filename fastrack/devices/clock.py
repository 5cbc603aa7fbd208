"""When things happen on a device, in the host's time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastrack.devices.driver import Driver, Event, Stream
from fastrack.timeline import Detail, Timeline

__all__ = ["Clock"]


class Clock:
    """The time of a device, fitted to the host's when this is made, on a stream that has nothing to do.

    Kept for one message: clocks drift, and the device counts milliseconds in 24 bits.
    """

    def __init__(self, timeline: Timeline, driver: Driver, stream: Stream) -> None:
        self._timeline = timeline
        self._driver = driver
        before = time.perf_counter_ns()
        self._zero = driver.stamp(stream)
        driver.synchronize(self._zero)
        self._host = (before + time.perf_counter_ns()) // 2

    @contextmanager
    def span(self, name: str, row: str, stream: Stream, detail: Detail) -> Iterator[None]:
        """Show what the block puts on a stream, which has a row of this name."""
        start = self._driver.stamp(stream)
        yield
        stop = self._driver.stamp(stream)
        where = self._driver.name, row, id(stream)
        self._timeline.add_later(name, where, partial(self._times, start, stop), detail)

    def _times(self, start: Event, stop: Event) -> tuple[int, int]:
        self._driver.synchronize(stop)
        return self._at(start), self._at(stop)

    def _at(self, event: Event) -> int:
        return self._host + round(1e9 * self._driver.elapsed(self._zero, event))
