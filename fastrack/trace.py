"""What went through a channel, and where the time went."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from fastrack.forks import renew_after_fork

__all__ = ["Recorder", "Stats", "Transfer"]


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


@dataclass(slots=True)
class Transfer:
    """One transfer while it is measured."""

    nbytes: int
    stages: dict[str, float] = field(default_factory=lambda: {"fill": 0.0, "open": 0.0, "seal": 0.0})

    def stage(self, name: str) -> _Stage:
        """Count the time of a block to a stage, if it ends well."""
        return _Stage(self.stages, name)


class _Stage:
    """A class, since a generator costs more than what it would measure in a small transfer."""

    __slots__ = ("_name", "_stages", "_start")

    def __init__(self, stages: dict[str, float], name: str) -> None:
        self._stages = stages
        self._name = name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._stages[self._name] += time.perf_counter() - self._start


class Recorder:
    """Adds up transfers. May be shared by threads."""

    def __init__(self) -> None:
        self._total = Stats()
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        """Make the lock anew."""
        self._lock = threading.Lock()

    @property
    def total(self) -> Stats:
        return self._total

    @contextmanager
    def transfer(self, nbytes: int) -> Iterator[Transfer]:
        """Measure one transfer; it counts if it ends well."""
        record = Transfer(nbytes)
        start = time.perf_counter()
        yield record
        seconds = time.perf_counter() - start
        with self._lock:
            total = self._total
            self._total = Stats(
                total.transfers + 1,
                total.bytes + nbytes,
                total.seconds + seconds,
                *(getattr(total, name) + spent for name, spent in record.stages.items()),
            )
