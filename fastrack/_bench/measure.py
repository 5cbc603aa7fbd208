"""Time repeated runs: interleaved rounds, medians, one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

COPY = "plain copy"
BOUNCE = "bounce"
ENOUGH = 100  # runs without which the slowest in a hundred cannot be told


@dataclass(frozen=True, slots=True)
class Times:
    """What the runs of one thing took.

    seconds : of every run, by the clock
    cpu : seconds of all of this process's threads, in all runs together
    """

    seconds: Sequence[float]
    cpu: float

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        lower, _, upper = quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper

    @property
    def p99(self) -> float | None:
        """What 99 of 100 runs stay below; None where there were fewer runs than that."""
        return quantiles(self.seconds, n=100, method="inclusive")[-1] if len(self.seconds) >= ENOUGH else None


def interleave(runs: Mapping[str, Callable[[], Any]], repeat: int) -> dict[str, list[float]]:
    """Run everything once to warm up, then `repeat` rounds of each in turn; seconds of every run, by name."""
    for run in runs.values():
        run()
    return {name: list(times.seconds) for name, times in timed_rounds(runs, repeat).items()}


def timed_rounds(runs: Mapping[str, Callable[[], Any]], repeat: int, *, settle: int = 0) -> dict[str, Times]:
    """`repeat` rounds, each of which runs each in turn: so a slow moment of the machine falls on all of them.

    `settle` runs each so many times more, untimed, right before it is timed: then caches hold what it leaves there
    itself, and not what its neighbour does.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu = dict.fromkeys(runs, 0.0)
    for _ in range(repeat):
        for name, run in runs.items():
            for _ in range(settle):
                run()
            before = time.process_time()
            start = time.perf_counter()
            result = run()
            seconds[name].append(time.perf_counter() - start)
            cpu[name] += time.process_time() - before
            del result  # giving memory back is the next round's business, not this one's
    return {name: Times(seconds[name], cpu[name]) for name in runs}
