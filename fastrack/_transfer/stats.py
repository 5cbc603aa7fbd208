"""Statistics of a channel: bytes moved, and time by stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field

from fastrack._devices.base import Slab
from fastrack._util.trace import Steps, Timeline, current

_STAGES = ("fill", "open", "seal")
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
    """The measurement of one transfer, with its steps if a trace is recorded."""

    __slots__ = ("_stages", "current_span", "stage_ns", "steps", "timeline")

    def __init__(self, timeline: Timeline | None, direction: str = "to_device") -> None:
        self.timeline = timeline
        work = "seal" if direction == "to_host" else "open"
        self._stages = {"source": "fill", "issue": work, "store": work, "wait": "wait"}
        self.current_span = ""
        self.steps: Steps = []
        self.stage_ns = dict.fromkeys((*_STAGES, "wait"), 0)  # nanoseconds

    def stage(self, name: str, slab: Slab, label: str) -> _Stage:
        """Add the time of a block to a stage, unless it raises. A trace shows the block under `label`."""
        return _Stage(self, name, slab, label)

    def note(self, name: str, slab: Slab, start: int, stop: int) -> None:
        """Add the time of a step that a device did for a slab on this thread."""
        self.stage_ns[self._stages[name]] += stop - start
        if self.timeline is not None:
            self.steps += (name, start, stop, slab.first_chunk, slab.sealed_size)

    def waiting(self, slab: Slab) -> AbstractContextManager[None]:
        """Record the time of a block as a wait, if a trace is recorded."""
        return _NOTHING if self.timeline is None else _Stage(self, "wait", slab, "wait")


@dataclass(slots=True)
class _Stage:
    """A timed block. A class, since a generator costs more time than the block of a small transfer."""

    _transfer: Transfer
    _name: str
    _slab: Slab
    _label: str
    _start: int = field(init=False)

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
        self.total = Stats()
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Replace the lock, which may be held at a fork."""
        self._lock = threading.Lock()

    @contextmanager
    def transfer(self, nbytes: int, direction: str, name: str | None) -> Iterator[Transfer]:
        """Measure one transfer, which is counted unless it raises."""
        timeline = current()
        record = Transfer(timeline, direction)
        if timeline is not None:
            timeline.local.transfer = record
        start = time.perf_counter_ns()
        try:
            yield record
        finally:
            stop = time.perf_counter_ns()
            if timeline is not None:
                timeline.local.transfer = None
                timeline.add_transfer(direction, start, stop, nbytes, name, record.steps)
        with self._lock:
            total = self.total
            self.total = Stats(
                total.transfers + 1,
                total.bytes + nbytes,
                total.seconds + (stop - start) / 1e9,
                *(getattr(total, stage) + record.stage_ns[stage] / 1e9 for stage in _STAGES),
            )
