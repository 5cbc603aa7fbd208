"""`Stats`: what a channel has moved, and how long it took."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

from fastrack._util.fork import per_process


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
        Time spent on transfers; without waiting, until the device had all commands.
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


class Recorder:
    """The sum of a channel's transfers. Thread-safe."""

    def __init__(self) -> None:
        # Tensors, bytes, nanoseconds in all, and nanoseconds in each stage.
        self.totals: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
        self.lock = per_process(self, "lock", threading.Lock)

    @property
    def total(self) -> Stats:
        """The totals so far."""
        with self.lock:
            transfers, nbytes, elapsed, *stages = self.totals
        return Stats(transfers, nbytes, elapsed / 1e9, *(stage / 1e9 for stage in stages))
