"""Time repeated runs: interleaved rounds, medians, one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median, quantiles
from typing import Any

COPY = "plain copy"
BOUNCE = "bounce"
MIN_RUNS = 100  # for a 99th percentile


@dataclass(frozen=True, slots=True)
class Times:
    """Times of repeated runs."""

    seconds: Sequence[float]  # wall-clock seconds of each run
    cpu: float = 0.0  # CPU seconds of all threads of this process, in all runs together

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile of the seconds."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        lower, _, upper = quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper

    @property
    def p99(self) -> float | None:
        """The 99th percentile of the seconds; None for fewer than 100 runs."""
        return quantiles(self.seconds, n=100, method="inclusive")[-1] if len(self.seconds) >= MIN_RUNS else None

    def as_dict(self) -> dict[str, float]:
        """Return the median, the quartiles and the number of runs, for JSON."""
        lower, upper = self.quartiles
        return {"median": self.median, "lower": lower, "upper": upper, "runs": len(self.seconds)}


def interleave(runs: Mapping[str, Callable[[], Any]], repeat: int, **options: Any) -> dict[str, list[float]]:
    """Return the seconds of `timed_rounds`, by name, after one call of each function to warm up."""
    for run in runs.values():
        run()
    return {name: list(times.seconds) for name, times in timed_rounds(runs, repeat, **options).items()}


def medians(runs: Mapping[str, Callable[[], Any]], repeat: int, **options: Any) -> dict[str, float]:
    """Return the median seconds of `interleave`, by name."""
    return {name: median(seconds) for name, seconds in interleave(runs, repeat, **options).items()}


def timed_rounds(
    runs: Mapping[str, Callable[[], Any]],
    repeat: int,
    *,
    settle: int = 0,
    order: Random | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> dict[str, Times]:
    """Return the times of `repeat` rounds, by name. Each round calls each function once, in turn.

    A slow moment of the machine thus falls on all functions. Each is called `settle` times without measurement before
    each timed call, so that caches hold its own data, not another function's. `order` shuffles each round,
    for functions that leave memory to the next one as fresh or used. `progress` is called with the number of the round
    and the name before each of these calls, outside of their times.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu = dict.fromkeys(runs, 0.0)
    for number in range(1, repeat + 1):
        for name, run in order.sample(list(runs.items()), len(runs)) if order else runs.items():
            if progress is not None:
                progress(number, name)
            for _ in range(settle):
                run()
            before = time.process_time()
            start = time.perf_counter()
            result = run()
            seconds[name].append(time.perf_counter() - start)
            cpu[name] += time.process_time() - before
            del result  # after the clock was read: freeing memory is not timed
    return {name: Times(seconds[name], cpu[name]) for name in runs}
