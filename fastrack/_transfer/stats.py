"""What went through a channel, and where the time went."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass

from fastrack._devices.base import Slab
from fastrack._util import trace as timeline
from fastrack._util.trace import Steps, Timeline

_COUNTED = ("fill", "open", "seal")
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals of a channel. Transfers that run at the same time count their own seconds each.

    Attributes
    ----------
    transfers : int
        Tensors moved. One that failed is not counted, unless it was not waited for.
    bytes : int
        Bytes of plaintext moved.
    seconds : float
        Time spent moving them; for a transfer that was not waited for, until it was in the device's hands.
    fill, open, seal : float
        Seconds of that spent filling slabs on the host, opening them on the device, and sealing them on the device.
    """

    transfers: int = 0
    bytes: int = 0
    seconds: float = 0.0
    fill: float = 0.0
    open: float = 0.0
    seal: float = 0.0

    @property
    def gbps(self) -> float:
        """Plaintext moved, in 1e9 bytes a second."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def as_dict(self) -> dict[str, float]:
        """The figures by name, for a program to read."""
        return {**asdict(self), "gbps": self.gbps}


class Transfer:
    """One transfer while it is measured, and drawn if somebody wants a timeline."""

    __slots__ = ("_stages", "doing", "spent", "steps", "timeline")

    def __init__(self, wanted: Timeline | None, direction: str = "to_device") -> None:
        self.timeline = wanted
        work = "seal" if direction == "to_host" else "open"
        self._stages = {"source": "fill", "issue": work, "store": work, "wait": "wait"}
        self.doing = ""
        self.steps: Steps = []
        self.spent = dict.fromkeys((*_COUNTED, "wait"), 0)  # nanoseconds

    def stage(self, name: str, slab: Slab, shown: str) -> _Stage:
        """Count the time of a block to a stage, if it ends well. A timeline shows it under another name."""
        return _Stage(self, name, slab, shown)

    def note(self, name: str, slab: Slab, start: int, stop: int) -> None:
        """Count, and show, what a device did for a slab on this thread."""
        self.spent[self._stages[name]] += stop - start
        if self.timeline is not None:
            self.steps += (name, start, stop, slab.first, slab.sealed)

    def waiting(self, slab: Slab) -> AbstractContextManager[None]:
        """The time of a block that only a timeline shows, as a wait."""
        return _NOTHING if self.timeline is None else _Stage(self, "wait", slab, "wait")


class _Stage:
    """A class, since a generator costs more than what it would measure in a small transfer."""

    __slots__ = ("_name", "_shown", "_slab", "_start", "_transfer")

    def __init__(self, transfer: Transfer, name: str, slab: Slab, shown: str) -> None:
        self._transfer = transfer
        self._name = name
        self._slab = slab
        self._shown = shown

    def __enter__(self) -> None:
        self._transfer.doing = self._shown
        self._start = time.perf_counter_ns()

    def __exit__(self, kind: object, *_: object) -> None:
        stop = time.perf_counter_ns()
        transfer = self._transfer
        if kind is None:
            transfer.spent[self._name] += stop - self._start
        if transfer.timeline is not None:
            transfer.steps += (self._shown, self._start, stop, self._slab.first, self._slab.sealed)


class Recorder:
    """Adds up transfers. May be shared by threads."""

    def __init__(self) -> None:
        self._total = Stats()
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Make the lock anew."""
        self._lock = threading.Lock()

    @property
    def total(self) -> Stats:
        return self._total

    @contextmanager
    def transfer(self, nbytes: int, shown: str, name: str | None) -> Iterator[Transfer]:
        """Measure one transfer; it counts if it ends well."""
        wanted = timeline.current()
        record = Transfer(wanted, shown)
        if wanted is not None:
            wanted.mine.transfer = record
        start = time.perf_counter_ns()
        try:
            yield record
        finally:
            stop = time.perf_counter_ns()
            if wanted is not None:
                wanted.mine.transfer = None
                wanted.add_transfer(shown, start, stop, nbytes, name, record.steps)
        with self._lock:
            total = self._total
            self._total = Stats(
                total.transfers + 1,
                total.bytes + nbytes,
                total.seconds + (stop - start) / 1e9,
                *(getattr(total, stage) + record.spent[stage] / 1e9 for stage in _COUNTED),
            )
