"""Visits of a holder, whose data go to a device through a buffer: by TLS and the bounce path, and as sealed pieces.

The buffer is filled, used and wiped, again and again, until all data were there once. This is the table of GPU
Travelling, by other means: its own columns, which have minutes for a hand-over, are modelled beside by ``tolls.toml``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Protocol

import numpy as np

from fastrack._bench.measure import Times, timed_rounds
from fastrack._bench.paths import BouncePath, touched
from fastrack._keys.keys import Key
from fastrack._sealed.tensor import SealedTensor
from fastrack._transfer.api import to_device
from fastrack_bench import toll
from fastrack_bench.holder import Load, SealedLink, TlsLink, Tokens, open_links
from fastrack_bench.workloads import AGAIN, BOUNCE, Case, compute_seconds

SEALED = "sealed"
WAYS = (BOUNCE, SEALED)
MB = 1_000_000
TOTAL = 600 * MB
BUFFERS = (4 * MB, 20 * MB, 100 * MB, 500 * MB, None)  # None: all data at once
# Sealed pieces of 4 MB are opened on two cores. The bounce path takes them by halves, which stay in the second level of
# the caches. 1, 2 and 4 MB were tried for both.
PIECE = 4 * MB

_HEAVY = Case("ResNet-50", "training", 64)


@dataclass(frozen=True, slots=True)
class Visit:
    """All data through a buffer of one size, in one way. Seconds are medians."""

    buffer: int | None  # bytes; None if it takes all data
    buffers: int  # how often it is filled
    way: str
    runs: int
    seconds: float  # of all buffers
    quartiles: tuple[float, float]  # of these seconds
    each: float  # seconds of a buffer
    again: float  # A/A: the seconds over those of the same way measured again
    over_bounce: float
    share: float  # of the time beside the paper's training, which is modelled
    share_heavy: float  # of the time beside a data-heavy training, which is modelled

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"row": "measured", **asdict(self)}


@dataclass(frozen=True, slots=True)
class Published:
    """A cell of the paper's table, beside what a number of hand-overs of equal length gives. Nothing is measured."""

    buffer: int | None
    buffers: int
    way: str  # "baseline" or "travelling"
    share: float  # of the time, published
    modelled: float | None  # the same by the model; None for what it does not explain
    off: float | None  # the factor between both, 1 or more

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"row": "paper", **asdict(self)}


def measure_visits(
    load: Load,
    buffers: Sequence[int | None],
    repeat: int,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Visit]:
    """Measure each buffer in both ways, in turns, in another order in each of `repeat` rounds.

    Raise RuntimeError if other bytes arrive than the holder has.
    """
    progress("a holder that seals its data")
    with open_ways(load) as ways:
        memory = touched(load.total).view(np.uint16)
        runs = {}
        for buffer in buffers:
            for name, way in ways.items():
                tour = _Tour(way, memory[: (buffer or load.total) // memory.itemsize], load.total)
                runs.update({(buffer, name): tour, (buffer, name + AGAIN): tour})
        progress("each way once, and comparing the data")
        _check(runs, load)
        names = {f"{buffer} {way}": run for (buffer, way), run in runs.items()}

        def report(number: int, _name: str) -> None:
            progress(f"round {number} of {repeat}")

        times = timed_rounds(names, repeat, order=Random(0), progress=report)  # noqa: S311 - no secret
    by_run = dict(zip(runs, times.values(), strict=True))
    return [row for buffer in buffers for row in _rows(load, buffer, by_run)]


def _check(runs: Mapping[tuple[int | None, str], _Tour], load: Load) -> None:
    tokens = load.tokens()
    for (_, way), run in runs.items():
        if AGAIN in way:
            continue

        def compare(first: int, part: Tokens, way: str = way) -> None:
            start = first // tokens.itemsize
            if not np.array_equal(part, tokens[start : start + part.size]):
                raise RuntimeError(f"{way!r} delivered other bytes than it was given; please report this")

        run(compare)


def _rows(load: Load, buffer: int | None, times: Mapping[tuple[int | None, str], Times]) -> list[Visit]:
    both = {way: Times([*times[buffer, way].seconds, *times[buffer, way + AGAIN].seconds]) for way in WAYS}
    count = -(-load.total // (buffer or load.total))
    inferred = toll.load_data()["visits"]["inferred"]
    compute = inferred["compute"] * load.total / inferred["data"]
    heavy = compute_seconds("h100", _HEAVY) * load.total / sum(_HEAVY.inputs.values())
    return [
        Visit(
            buffer,
            count,
            way,
            len(each.seconds),
            each.median,
            each.quartiles,
            each.median / count,
            times[buffer, way].median / times[buffer, way + AGAIN].median,
            each.median / both[BOUNCE].median,
            each.median / (each.median + compute),
            each.median / (each.median + heavy),
        )
        for way, each in both.items()
    ]


# The ways.


class Way(Protocol):
    """A way from the holder to the device."""

    def request(self, first: int, nbytes: int) -> None:
        """Ask the holder for its data from a byte on."""
        ...

    def fill(self, buffer: Tokens) -> None:
        """Fill a buffer with the data that were asked for."""
        ...


@dataclass(frozen=True, slots=True)
class _Tour:
    """All data through a buffer. While it is filled and wiped, the data of the next hand-over are on their way."""

    way: Way
    buffer: Tokens
    total: int

    def __call__(self, use: Callable[[int, Tokens], None] = lambda _first, _part: None) -> None:
        size = self.buffer.nbytes
        self.way.request(0, min(size, self.total))
        for first in range(0, self.total, size):
            part = self.buffer[: (self.total - first) // self.buffer.itemsize]
            if rest := self.total - first - part.nbytes:
                self.way.request(first + size, min(size, rest))
            self.way.fill(part)
            use(first, part)
            part.fill(0)


@contextmanager
def open_ways(load: Load) -> Iterator[dict[str, Way]]:
    """Start a holder, and yield each way."""
    with open_links(load) as (tls, sealed, key):
        yield {BOUNCE: _Bounce(tls, load), SEALED: _Sealed(sealed, load, key)}


class _Bounce:
    """TLS ends on the host, whose plaintext then takes the bounce path."""

    def __init__(self, link: TlsLink, load: Load) -> None:
        self._link = link
        half = load.piece // 2
        self._path = BouncePath(half, load.bits)
        self._plain = touched(half)

    def request(self, first: int, nbytes: int) -> None:
        self._link.request(first, nbytes)

    def fill(self, buffer: Tokens) -> None:
        for piece in buffer.reshape(-1, self._plain.size // buffer.itemsize):
            self._link.receive(self._plain)
            self._path.plain_to_device(self._plain, piece.view(np.uint8))


class _Sealed:
    """Pieces come as their owner sealed them, and are opened on the device."""

    def __init__(self, link: SealedLink, load: Load, key: Key) -> None:
        self._link, self._piece, self._key = link, load.piece, key

    def request(self, first: int, nbytes: int) -> None:
        self._link.request(first, nbytes)

    def fill(self, buffer: Tokens) -> None:
        for piece in buffer.reshape(-1, self._piece // buffer.itemsize):
            to_device(SealedTensor.from_bytes(self._link.receive()), "cpu", keys=self._key, out=piece)


# The paper.


def published() -> list[Published]:
    """Return the paper's table beside a model: as many hand-overs as there are buffers, and the training."""
    data = toll.load_data()["visits"]
    inferred, rows = data["inferred"], []
    for each in data["rows"]:
        buffer, share = each.get("buffer"), each["share"]
        count = -(-int(inferred["data"]) // (buffer or int(inferred["data"])))
        seconds = count * inferred["hand-over"]
        modelled = seconds / (seconds + inferred["compute"]) if each["way"] == "baseline" else None
        off = None if modelled is None else max(modelled / share, share / modelled)
        rows.append(Published(buffer, count, each["way"], share, modelled, off))
    return rows


def source() -> str:
    """Return where the table of the paper is from."""
    data = toll.load_data()["visits"]
    return f"paper: {data['source']}, {data['year']}"
