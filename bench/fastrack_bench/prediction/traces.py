"""Traces of `fastrack.trace` and `fastrack bench --timeline`, read: which steps an operation has, and which overlap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from fastrack._documents.canonical import parsing, require
from fastrack_bench.prediction.profiles import member, read_json

OPERATIONS = ("to_device", "to_host", "all_reduce", "all_gather", "reduce_scatter", "broadcast")
_MOST = 1_000_000  # events
_LONGEST = 1e13  # microseconds
_OVERLAPPED = 0.1  # the share of the steps' time from which on they count as overlapped
_EVEN = 0.5  # of the compute: the most by which the gaps of runs differ, but for a tenth at each end
_QUICKEST = 0.9  # of the compute: the least gap that is not by several runs a step
_Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Observed:
    """The runs of one operation in a trace."""

    operation: str
    runs: int
    seconds: float  # of all runs together
    steps: Mapping[str, float]  # seconds by step, in which it ran on any thread or stream
    overlap: float  # 1 - seconds / the sum of the steps: 0 where one step follows the other
    gaps: tuple[float, ...]  # seconds from the start of a run to the start of the next of its thread, ascending

    @property
    def bottleneck(self) -> str:
        """The step that takes the longest."""
        return max(self.steps, key=lambda name: self.steps[name])

    @property
    def is_overlapped(self) -> bool:
        """True if its steps go on at the same time."""
        return self.overlap >= _OVERLAPPED

    def overlap_with(self, compute: float) -> float | None:
        """Return how much of the shorter of a run and its compute, in seconds, goes on beside the other: 0 to 1.

        None if the trace does not tell: with several runs a step, some follow at once and others after the compute.
        """
        if not self.gaps:
            return None
        pace, tail = median(self.gaps), len(self.gaps) // 10
        is_even = self.gaps[-1 - tail] - self.gaps[tail] <= _EVEN * compute
        if not is_even or pace < _QUICKEST * compute:  # no step is quicker than its compute
            return None
        each = self.seconds / self.runs
        return min(1.0, max(0.0, (each + compute - pace) / min(each, compute)))


def read_trace(path: Path) -> dict[str, Observed]:
    """Read a trace, and return its operations by name. Raise `FormatError` if it is no trace."""
    with parsing(f"{path}: trace: expected JSON of `fastrack.trace` or `bench --timeline`", "record one"):
        return parse_trace(read_json(path))


def parse_trace(document: Any) -> dict[str, Observed]:
    """Return the operations of a trace. Raise one of the errors that `parsing` converts if it holds none."""
    events = member(document, "traceEvents", list)
    require(len(events) <= _MOST, "traceEvents")
    spans = [span for span in (_span(event) for event in events if member(event, "ph") == "X") if span[2] > span[1]]
    found = {}
    for name in OPERATIONS:
        whole = sorted((start, stop, track) for of, start, stop, track in spans if of == name)
        steps = [span for span in spans if span[0] not in OPERATIONS]
        if whole:
            found[name] = _observe(name, whole, steps)
    if not found:
        raise ValueError("it has no transfer and no collective")
    return found


def _span(event: Mapping[str, Any]) -> tuple[str, float, float, tuple[int, int]]:
    name, start, length, *track = (member(event, name) for name in ("name", "ts", "dur", "pid", "tid"))
    require(isinstance(name, str) and name.isprintable() and 1 <= len(name) <= 80, "name")
    for value in (start, length):
        require(type(value) in {int, float} and math.isfinite(value) and 0 <= value <= _LONGEST, "ts or dur")
    require(all(type(number) is int for number in track), "pid or tid")
    return name, start / 1e6, (start + length) / 1e6, (track[0], track[1])


def _observe(
    name: str, whole: Sequence[tuple[float, float, Any]], spans: Iterable[tuple[str, float, float, Any]]
) -> Observed:
    windows = _merged((start, stop) for start, stop, _ in whole)
    by_step: dict[str, list[_Interval]] = {}
    for step, start, stop, _ in spans:
        if any(first <= start and stop <= last + 1e-6 for first, last in windows):
            by_step.setdefault(step, []).append((start, stop))
    wall = _length(windows)
    steps = {step: _length(_merged(intervals)) for step, intervals in by_step.items()} or {name: wall}
    total = math.fsum(steps.values())
    gaps = sorted(later - start for (start, _, track), (later, _, other) in pairwise(whole) if track == other)
    return Observed(name, len(whole), wall, steps, max(0.0, 1 - wall / total), tuple(gaps))


def _merged(intervals: Iterable[_Interval]) -> list[_Interval]:
    """Return intervals without overlap that cover the same times."""
    merged: list[_Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def _length(intervals: Iterable[_Interval]) -> float:
    return math.fsum(stop - start for start, stop in intervals)
