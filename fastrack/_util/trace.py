"""The timeline that is recorded, if one is, to which transfers tell their steps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fastrack._util.fork import per_process

Detail = Mapping[str, int | str]

Steps = list[str | int]  # five items per step: name, start, stop, first chunk of the slab, and its sealed size


class DeviceClock(Protocol):
    """The clock of a device: a `Clock` of `fastrack._transfer.device_clock`."""

    def span(
        self, name: str, track: str, stream: Any, detail: Detail, commands: Any
    ) -> AbstractContextManager[None]: ...


class Timeline(Protocol):
    """A collection of spans: a `Timeline` of `fastrack._transfer.timeline`. Times are from `time.perf_counter_ns`."""

    local: threading.local  # `transfer`: the transfer that a thread executes

    def add(self, name: str, start: int, stop: int, detail: Detail) -> None: ...
    def add_worker(self, number: int, start: int, stop: int) -> None: ...
    def add_transfer(self, name: str, start: int, stop: int, size: int, tensor: str | None, steps: Steps) -> None: ...
    def clock(self, driver: Any, stream: Any) -> DeviceClock: ...


def record(timeline: Timeline) -> None:
    """Have transfers tell their steps to a timeline from now on."""
    global active  # noqa: PLW0603
    active = timeline


def end(timeline: Timeline) -> None:
    """Have transfers tell their steps to none, unless another timeline has begun in a forked child."""
    global active  # noqa: PLW0603
    if active is timeline:
        active = None


active: Timeline | None = per_process(sys.modules[__name__], "active", lambda: None)  # the trace is its parent's
