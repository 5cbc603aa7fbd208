"""Measurement of the steps from the bounce path to fastrack, and of the plain copy, the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from fastrack._bench.endpoints import DIRECTIONS, Direction
from fastrack._bench.measure import BOUNCE, COPY, timed_rounds
from fastrack._bench.steps import open_steps
from fastrack._keys.keys import Key
from fastrack._sealed.seal import seal
from fastrack._transfer.channel import Channel
from fastrack._transfer.trace_file import trace

_SMALL = 16 << 20  # bytes of plaintext up to which a run is short, and its time varies
_TOTAL = 2 << 30  # bytes that all rounds of a small tensor move
_MAX_ROUNDS = 500
_CACHED = 64 << 20  # bytes of plaintext up to which caches make a difference
_SETTLE = 3  # runs after which caches hold the data of a step


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of one step, in one direction, at one size."""

    direction: Direction
    size: int  # bytes of plaintext
    step: str
    passes: tuple[str, ...]  # the passes over all bytes, in order
    runs: int
    seconds: float  # median of the runs
    quartiles: tuple[float, float]  # the first and the third quartile of the seconds
    p99: float | None  # the 99th percentile of the seconds; None for fewer than 100 runs
    max: float  # seconds of the slowest run
    cpu_per_gib: float  # CPU seconds of all threads of the host for each GiB of plaintext
    estimated_traffic: int  # bytes of memory read and written for each byte of plaintext, by `Step.traffic`
    over_bounce: float  # speed relative to the bounce path
    over_previous: float | None  # speed relative to the step before; None for the bounce path and the plain copy
    of_copy: float  # speed relative to the plain copy

    @property
    def gbps(self) -> float:
        """Plaintext moved per second, in 1e9 bytes."""
        return self.size / self.seconds / 1e9

    @property
    def cost(self) -> float:
        """The communication cost: the time relative to the plain copy."""
        return 1 / self.of_copy

    def as_dict(self) -> dict[str, Any]:
        """Return the measurement for JSON."""
        return {**asdict(self), "p50": self.seconds, "gbps": self.gbps, "communication_cost": self.cost}


def ablate(
    sizes_mib: Sequence[float],
    *,
    directions: Sequence[Direction] = DIRECTIONS,
    device: object = None,
    bits: int = 256,
    repeat: int = 9,
    progress: Callable[[str], None] | None = None,
) -> list[Measured]:
    """Measure every step at each size (MiB), in the order of directions, sizes, and steps.

    `repeat` is the number of rounds for tensors above 16 MiB; smaller ones take more. Each round runs every step, in
    turn. `progress` is called with a description of each run before it.
    """
    report = progress or (lambda _: None)
    rows = []
    measurements = list(product(directions, sizes_mib))
    for number, (direction, size) in enumerate(measurements, 1):
        title = f"{direction} {size:g} MiB, {number} of {len(measurements)}"
        rows += _measure(direction, int(size * (1 << 20)), device, bits, repeat, partial(_report, report, title))
    return rows


def _report(report: Callable[[str], None], title: str, text: str) -> None:
    report(f"{title}, {text}")


def rounds_of(nbytes: int, repeat: int) -> int:
    """Return the number of rounds: `repeat` for a large tensor, and enough for a `p99` up to 16 MiB."""
    return repeat if nbytes > _SMALL else min(_MAX_ROUNDS, _TOTAL // nbytes)


def _measure(
    direction: Direction, nbytes: int, device: object, bits: int, repeat: int, report: Callable[[str], None]
) -> list[Measured]:
    """Measure all steps at one size. Its memory is freed on return."""
    report("making random data")
    with open_steps(direction, nbytes, device=device, bits=bits) as opened:
        report("checking each path")
        opened.check()
        rounds, settle = rounds_of(nbytes, repeat), _SETTLE if nbytes <= _CACHED else 0
        runs = {step.name: step.run for step in opened.steps}

        def tell(number: int, name: str) -> None:
            report(f"round {number}/{rounds}: {name}")

        times = timed_rounds(runs, rounds, settle=settle, progress=tell)
    seconds = {name: runs.median for name, runs in times.items()}
    before = {name: previous for previous, name in pairwise(seconds)}
    return [
        Measured(
            direction=direction,
            size=nbytes,
            step=step.name,
            passes=step.passes,
            runs=len(runs.seconds),
            seconds=runs.median,
            quartiles=runs.quartiles,
            p99=runs.p99,
            max=max(runs.seconds),
            cpu_per_gib=runs.cpu / (len(runs.seconds) * nbytes) * (1 << 30),
            estimated_traffic=step.traffic,
            over_bounce=seconds[BOUNCE] / runs.median,
            over_previous=None if step.name in {BOUNCE, COPY} else seconds[before[step.name]] / runs.median,
            of_copy=seconds[COPY] / runs.median,
        )
        for step, runs in zip(opened.steps, times.values(), strict=True)
    ]


def trace_transfers(nbytes: int, path: Path, *, device: str, bits: int) -> None:
    """Write a trace of one transfer of each kind, once the memory and the code of all of them are warm."""
    key = Key.generate(bits)
    plain = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    sealed = seal(plain, key)
    with Channel(device, keys=key) as channel:
        out = channel.to_device(plain)

        def move() -> None:
            channel.to_device(sealed, out=out)
            channel.to_device(plain, out=out)
            channel.to_host(out)

        move()
        with trace(path):
            move()
