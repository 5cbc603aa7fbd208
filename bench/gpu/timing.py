"""Rows of a report, and rounds of runs that return their own seconds, such as by a device's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from fastrack._bench.measure import Times

MIN_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    step, path : the part that measured it, and its subject
    size : bytes of plaintext
    times : seconds of a run
    settings : other parameters
    """

    step: str
    path: str
    size: int
    times: Times
    settings: dict = field(default_factory=dict)

    @property
    def gbps(self):
        """1e9 bytes of plaintext a second, at the median."""
        return self.size / self.times.median / 1e9 if self.times.median else 0.0

    def as_dict(self):
        named = {"step": self.step, "path": self.path, "size": self.size, **self.settings}
        return {**named, "seconds": self.times.as_dict(), "gbps": self.gbps}


def interleave(runs, plan):
    """Times by name. Each of `runs` takes the number of the round and returns seconds; round 0 is dropped."""
    seconds = {name: [] for name in runs}
    for run in runs.values():
        run(0)
    start = time.perf_counter()
    for number in range(1, plan.rounds + 1):
        for name, run in runs.items():
            seconds[name].append(run(number))
        if number >= MIN_ROUNDS and time.perf_counter() - start > plan.budget:
            break
    return {name: Times(taken) for name, taken in seconds.items()}


def rows(step, size, runs, plan, **settings):
    """Yield a row for each of the runs, measured in turns."""
    for path, times in interleave(runs, plan).items():
        yield Row(step, path, size, times, settings)


def wall(action, *arguments, **options):
    """Seconds on the host's clock that a call takes. Its result is freed after the clock was read."""
    start = time.perf_counter()
    result = action(*arguments, **options)
    taken = time.perf_counter() - start
    del result
    return taken


def on_device(gpu, stream, jobs, group=1, ahead=None):
    """Median seconds of a job on the device's clock; `group` of them stand between two readings.

    `ahead` keeps the device busy first, so that all jobs are queued before it comes to them. In confidential mode,
    where events have no true times, it is the mean of all jobs on the host's clock.
    """
    if gpu.driver.confidential:
        gpu.wait(stream)
        return wall(lambda: ([job() for job in jobs], gpu.wait(stream))) / len(jobs)
    if ahead is not None:
        ahead()
    stamps = [gpu.stamp(stream)]
    for number, job in enumerate(jobs, 1):
        job()
        if number % group == 0:
            stamps.append(gpu.stamp(stream))
    gpu.wait(stream)
    times = [gpu.driver.elapsed(before, after) for before, after in pairwise(stamps)]
    if min(times) <= 0:
        raise RuntimeError(f"timing a kernel failed: expected a time between events, got {min(times):.1e} s")
    return median(times) / group
