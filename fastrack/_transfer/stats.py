"""Statistics of a channel: bytes moved, and time by stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeVar

from fastrack._devices.base import Messages, Slab
from fastrack._util import trace
from fastrack._util.trace import Steps

_OPENING = {"source": "fill", "issue": "open", "store": "open", "wait": "wait"}  # the stage of a step
_SEALING = {"source": "fill", "issue": "seal", "store": "seal", "wait": "wait"}
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals of a channel's transfers. Each transfer counts its own seconds, even while others run.

    Attributes
    ----------
    transfers : int
        Tensors moved. A transfer that failed is counted only if the call did not wait for it.
    bytes : int
        Bytes of plaintext moved.
    seconds : float
        Time spent moving them; without waiting, the time until the device had all commands.
    fill, open, seal : float
        Parts of `seconds` spent filling slabs on the host, opening them on the device, and sealing them on the device.
    """

    transfers: int = 0
    bytes: int = 0
    seconds: float = 0.0
    fill: float = 0.0
    open: float = 0.0
    seal: float = 0.0

    @property
    def gbps(self) -> float:
        """Plaintext moved per second, in 1e9 bytes."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the totals by name, for JSON."""
        return {**asdict(self), "gbps": self.gbps}


class Transfer:
    """The measurement of one call that moves `count` tensors, as a ``with`` block. They are counted unless it raises.

    It has the steps of the call if a trace is recorded.
    """

    __slots__ = (
        "_count",
        "_direction",
        "_name",
        "_nbytes",
        "_recorder",
        "_stages",
        "_start",
        "current_span",
        "stage_ns",
        "steps",
        "timeline",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, count: int, nbytes: int, direction: str, name: str | None) -> None:
        self.timeline = trace.active
        self._recorder = recorder
        self._count = count
        self._nbytes = nbytes
        self._direction = direction
        self._name = name
        self._stages = _SEALING if direction == "to_host" else _OPENING
        self.current_span = ""
        self.steps: Steps = []
        self.stage_ns = {"fill": 0, "open": 0, "seal": 0, "wait": 0}  # nanoseconds

    def __enter__(self) -> Self:
        if self.timeline is not None:
            self.timeline.local.transfer = self
        self._start = time.perf_counter_ns()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        start, stop = self._start, time.perf_counter_ns()
        if self.timeline is not None:
            self.timeline.local.transfer = None
            self.timeline.add_transfer(self._direction, start, stop, self._nbytes, self._name, self.steps)
        if kind is None:
            self._recorder.add(self._count, self._nbytes, stop - start, self.stage_ns)

    def run(
        self, stage: str, slab: Slab | Messages, label: str, function: Callable[..., _Result], *arguments: Any
    ) -> _Result:
        """Call a function, and add its time to a stage, unless it raises. A trace shows the call under `label`.

        `slab` is what the function works on: a slab, or all messages.
        """
        self.current_span = label
        start = time.perf_counter_ns()
        try:
            result = function(*arguments)
            self.stage_ns[stage] += time.perf_counter_ns() - start
        finally:
            if self.timeline is not None:
                self.steps += (label, start, time.perf_counter_ns(), slab.first_chunk, slab.sealed_size)
        return result

    def note(self, name: str, slab: Slab, start: int, stop: int) -> None:
        """Add the time of a step that a device did for a slab on this thread."""
        self.stage_ns[self._stages[name]] += stop - start
        if self.timeline is not None:
            self.steps += (name, start, stop, slab.first_chunk, slab.sealed_size)


class Recorder:
    """The sum of a channel's transfers. Thread-safe."""

    def __init__(self) -> None:
        self._totals = (0, 0, 0, 0, 0, 0)  # tensors, bytes, and nanoseconds: all, and of each stage
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Replace the lock, which may be held at a fork."""
        self._lock = threading.Lock()

    @property
    def total(self) -> Stats:
        """The totals so far."""
        with self._lock:
            transfers, nbytes, elapsed, *stages = self._totals
        return Stats(transfers, nbytes, elapsed / 1e9, *(stage / 1e9 for stage in stages))

    def add(self, count: int, nbytes: int, elapsed: int, stages: dict[str, int]) -> None:
        """Count tensors that were moved in so many nanoseconds."""
        with self._lock:
            transfers, total, seconds, fill, open_, seal = self._totals
            self._totals = (
                transfers + count,
                total + nbytes,
                seconds + elapsed,
                fill + stages["fill"],
                open_ + stages["open"],
                seal + stages["seal"],
            )
