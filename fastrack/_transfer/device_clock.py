"""Device times on the clock of the host, for timelines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import Driver, Event, Stream
from fastrack._util.trace import Detail
from fastrack.errors import DeviceError


class Clock:
    """The clock of a device, synchronized with the host's by an event on an idle stream.

    A clock serves one message: host and device drift apart, and the device counts milliseconds in 24 bits.
    """

    def __init__(self, add: Callable[..., None], driver: Driver, stream: Stream) -> None:
        self._add = add
        self._driver = driver
        self._zero = driver.event(timed=True)
        commands = Commands()
        commands.drain(stream, self._zero)
        before = time.perf_counter_ns()
        driver.issue(commands)
        self._host_zero = (before + time.perf_counter_ns()) // 2

    @contextmanager
    def span(self, name: str, track: str, stream: Stream, detail: Detail, commands: Commands) -> Iterator[None]:
        """Add a span for the commands that the block puts on a stream to a track of the timeline."""
        start, stop = self._driver.event(timed=True), self._driver.event(timed=True)
        commands.keep_alive((start, stop))
        commands.record(start, stream)
        yield
        commands.record(stop, stream)
        row = self._driver.name, track, stream.ptr
        self._add(name, row, partial(self._times, start, stop), detail)

    def _times(self, start: Event, stop: Event) -> tuple[int, int]:
        commands = Commands()
        commands.synchronize(stop)
        self._driver.issue(commands)
        if self._driver.elapsed(start, stop) < 0:
            raise DeviceError(f"the clock of {self._driver.name} runs backwards")
        return self._host_time(start), self._host_time(stop)

    def _host_time(self, event: Event) -> int:
        return self._host_zero + round(1e9 * self._driver.elapsed(self._zero, event))
