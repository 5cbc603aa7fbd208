"""Statistics of a channel: bytes moved, and time by stage."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Self

from fastrack._devices.base import Messages, Slab
from fastrack._util.trace import Steps, current

_OPENING = {"source": "fill", "issue": "open", "store": "open", "wait": "wait"}  # the stage of a step
_SEALING = {"source": "fill", "issue": "seal", "store": "seal", "wait": "wait"}
_NOTHING: AbstractContextManager[None] = nullcontext()


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
    """The measurement of one call as a ``with`` block, with its steps if a trace is recorded."""

    __slots__ = ("_args", "_recorder", "_stages", "_start", "current_span", "stage_ns", "steps", "timeline")

    def __init__(self, recorder: Recorder, count: int, nbytes: int, direction: str, name: str | None) -> None:
        self.timeline = current()
        self._recorder = recorder
        self._args = (count, nbytes, direction, name)
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
        count, nbytes, direction, name = self._args
        if self.timeline is not None:
            self.timeline.local.transfer = None
            self.timeline.add_transfer(direction, start, stop, nbytes, name, self.steps)
        if kind is None:
            self._recorder.add(count, nbytes, stop - start, self.stage_ns)

    def stage(self, name: str, slab: Slab | Messages, label: str) -> _Stage:
        """Add the time of a block to a stage, unless it raises. A trace shows the block under `label`.

        `slab` is what the block works on: a slab, or all messages.
        """
        return _Stage(self, name, slab, label)

    def note(self, name: str, slab: Slab, start: int, stop: int) -> None:
        """Add the time of a step that a device did for a slab on this thread."""
        self.stage_ns[self._stages[name]] += stop - start
        if self.timeline is not None:
            self.steps += (name, start, stop, slab.first_chunk, slab.sealed_size)

    def waiting(self, slab: Slab) -> AbstractContextManager[None]:
        """Record the time of a block as a wait, if a trace is recorded."""
        return _NOTHING if self.timeline is None else _Stage(self, "wait", slab, "wait")


class _Stage:
    """A timed block. A class, since a generator costs more time than the block of a small transfer."""

    __slots__ = ("_label", "_name", "_slab", "_start", "_transfer")

    def __init__(self, transfer: Transfer, name: str, slab: Slab | Messages, label: str) -> None:
        self._transfer = transfer
        self._name = name
        self._slab = slab
        self._label = label

    def __enter__(self) -> None:
        self._transfer.current_span = self._label
        self._start = time.perf_counter_ns()

    def __exit__(self, kind: object, *_: object) -> None:
        stop = time.perf_counter_ns()
        transfer = self._transfer
        if kind is None:
            transfer.stage_ns[self._name] += stop - self._start
        if transfer.timeline is not None:
            transfer.steps += (self._label, self._start, stop, self._slab.first_chunk, self._slab.sealed_size)


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

    def transfer(self, count: int, nbytes: int, direction: str, name: str | None) -> Transfer:
        """Measure one call that moves `count` tensors, which are counted unless it raises."""
        return Transfer(self, count, nbytes, direction, name)

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
