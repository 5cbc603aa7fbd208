"""What each of fastrack's ideas brings, and how near the limit that is: every step measured, one beside the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastrack._bench.measure import BOUNCE, COPY, Times, timed_rounds
from fastrack._bench.steps import DIRECTIONS, Direction, Step, open_steps

_SMALL = 16 << 20  # bytes of plaintext up to which a run is short, and its time uneven
_BYTES = 2 << 30  # that the rounds of a small tensor move together
_MOST = 500  # rounds
_CACHED = 64 << 20  # bytes of plaintext up to which caches make a difference
_SETTLE = 3  # runs after which they hold what a step leaves there


@dataclass(frozen=True, slots=True)
class Measured:
    """One step, in one direction, at one size.

    direction : "to_device" or "to_host"
    size : bytes of plaintext
    step : its name
    passes : each time that all bytes are read and written again, in order
    runs : how many there were
    seconds : median of the runs
    quartiles : of the runs, the first and the third
    p99 : seconds that 99 of 100 runs stay below; None where there were fewer runs than that
    max : seconds of the slowest run
    cpu_per_gib : seconds of all of the host's threads for each GiB of plaintext
    estimated_traffic : bytes of memory read and written for each byte of plaintext, by the model of `Step.traffic`
    over_bounce : times as fast as the bounce path
    over_previous : times as fast as the step before; None for the bounce path and the plain copy
    of_copy : share of the speed of the plain copy
    """

    direction: Direction
    size: int
    step: str
    passes: tuple[str, ...]
    runs: int
    seconds: float
    quartiles: tuple[float, float]
    p99: float | None
    max: float
    cpu_per_gib: float
    estimated_traffic: int
    over_bounce: float
    over_previous: float | None
    of_copy: float

    @property
    def gbps(self) -> float:
        """Plaintext moved, in 1e9 bytes a second."""
        return self.size / self.seconds / 1e9

    @property
    def cost(self) -> float:
        """The communication cost: times as long as the plain copy takes."""
        return 1 / self.of_copy

    def as_dict(self) -> dict[str, Any]:
        """The row for a program to read."""
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
    """Measure every step at each size, in both directions or some.

    Parameters
    ----------
    sizes_mib : sequence of float
        Sizes of the tensors, in MiB (1048576 bytes).
    directions : sequence of {"to_device", "to_host"}
        Which ways the tensors go.
    device : str, optional
        "cpu", the default, or "cuda:N".
    bits : {256, 128}
        The size of all keys.
    repeat : int
        Rounds of tensors above 16 MiB; smaller ones take more. Each runs every step, in turn.
    progress : callable, optional
        Called with what is about to be measured.

    Returns
    -------
    list of Measured
        Directions one after the other, sizes in the order given, and steps from the bounce path to the plain copy.

    Raises
    ------
    DeviceError
        If the device cannot be used.
    """
    say = progress or (lambda _: None)
    rows = []
    for direction in directions:
        for size in sizes_mib:
            say(f"{direction}, {size:g} MiB")
            rows += _measure(direction, int(size * (1 << 20)), device, bits, repeat)
    return rows


def rounds_of(nbytes: int, repeat: int) -> int:
    """How many rounds a size takes: `repeat` for a large tensor, and up to 16 MiB as many as its `p99` takes."""
    return repeat if nbytes > _SMALL else min(_MOST, _BYTES // nbytes)


def _measure(direction: Direction, nbytes: int, device: object, bits: int, repeat: int) -> list[Measured]:
    """One size. When this returns, its memory has been given back."""
    with open_steps(direction, nbytes, device=device, bits=bits) as opened:
        opened.check()
        runs = {step.name: step.run for step in opened.steps}
        times = timed_rounds(runs, rounds_of(nbytes, repeat), settle=_SETTLE if nbytes <= _CACHED else 0)
        return _rows(direction, nbytes, opened.steps, times)


def _rows(direction: Direction, nbytes: int, steps: Sequence[Step], times: dict[str, Times]) -> list[Measured]:
    seconds = {name: found.median for name, found in times.items()}
    before = [None, *(step.name for step in steps)]
    return [
        Measured(
            direction=direction,
            size=nbytes,
            step=step.name,
            passes=step.passes,
            runs=len(found.seconds),
            seconds=found.median,
            quartiles=found.quartiles,
            p99=found.p99,
            max=max(found.seconds),
            cpu_per_gib=found.cpu / (len(found.seconds) * nbytes) * (1 << 30),
            estimated_traffic=step.traffic,
            over_bounce=seconds[BOUNCE] / found.median,
            over_previous=None if previous is None or step.name == COPY else seconds[previous] / found.median,
            of_copy=seconds[COPY] / found.median,
        )
        for step, previous, found in ((step, name, times[step.name]) for step, name in zip(steps, before, strict=False))
    ]
