"""Whether two ways to measure the same steps agree: ``python -m bench.agree bench.json --suite pytest-benchmark.json``.

The first is from `fastrack bench --json bench.json`, which runs the steps in turn; the second from `bench_ablation.py`
with `--benchmark-json`, which runs them one after the other. Times of two runs differ by what else the machine did, so
ratios are compared: to the bounce path, and to the plain copy. Two ratios agree if they differ by no more than the
tolerance, or by no more than their noise: if the ranges overlap that follow from the quartiles of the times.

A shared machine has phases, of minutes, in which memory is half as fast, and the cipher is not. Runs of both kinds, in
turns, tell that noise too: give several documents, and their medians are compared, and their whole ranges.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

BOUNCE, COPY = "bounce", "plain copy"
TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a step: the median and the quartiles around it."""

    median: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast a step is as another, and the range of that."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, runs, step, other):
        """In some runs, each the times by step."""
        pairs = [(run[step], run[other]) for run in runs]
        return cls(
            median(other.median / step.median for step, other in pairs),
            min(other.lower / step.upper for step, other in pairs),
            max(other.upper / step.lower for step, other in pairs),
        )

    def agrees(self, other, tolerance):
        near = max(self.value, other.value) <= (1 + tolerance) * min(self.value, other.value)
        return near or (self.low <= other.high and other.low <= self.high)


def main(argv):
    """Print row by row what both say. Gives 0, 1 if some rows do not agree, or 2 if there is nothing to compare."""
    options = _parse(argv)
    ours, theirs = [read_ours(path) for path in options.ours], [read_theirs(path) for path in options.suite]
    rows = list(compare(ours, theirs, options.tolerance))
    if not rows:
        print("The two documents have no step in common; measure the same sizes.")
        return 2
    print("Ratios: of fastrack bench, then of pytest-benchmark.\n")
    print(f"{'direction':<11}{'KiB':>8}  {'step':<27}{'x bounce':>16}{'of copy':>16}")
    for (direction, size, step), bounce, copy, is_good in rows:
        pairs = "".join(f"{mine.value:>9.3f}{other.value:>7.3f}" for mine, other in (bounce, copy))
        print(f"{direction:<11}{size >> 10:>8}  {step:<27}{pairs}  {'agree' if is_good else 'DIFFER'}")
    bad = sum(not is_good for *_, is_good in rows)
    print(f"\n{len(rows) - bad} of {len(rows)} agree, to {100 * options.tolerance:g} % or within their quartiles")
    return 1 if bad else 0


def compare(ours, theirs, tolerance):
    """Each step that both have: its place, both ratios to the bounce path and to the copy, whether they agree."""
    for place in ours[0]:
        direction, size, step = place
        others = [(direction, size, name) for name in (BOUNCE, COPY)]
        if step == BOUNCE or any(found not in run for run in (*ours, *theirs) for found in (place, *others)):
            continue
        bounce, copy = (tuple(Ratio.of(runs, place, other) for runs in (ours, theirs)) for other in others)
        yield place, bounce, copy, all(mine.agrees(other, tolerance) for mine, other in (bounce, copy))


def read_ours(path):
    """Times by direction, size and step, of a document of `fastrack bench`."""
    document = json.loads(path.read_text(encoding="utf-8"))
    found = document["settings"]["device"], document["settings"]["bits"]
    if found != ("cpu", 256):
        raise SystemExit(f"{path} is of {found[0]} with keys of {found[1]} bits, and the suite of cpu with 256")
    rows = document["ablation"]
    return {(row["direction"], row["size"], row["step"]): Timing(row["seconds"], *row["quartiles"]) for row in rows}


def read_theirs(path):
    """The same of a document of pytest-benchmark."""
    found = {}
    for each in json.loads(path.read_text(encoding="utf-8"))["benchmarks"]:
        info, stats = each["extra_info"], each["stats"]
        if {"direction", "size", "step"} <= info.keys():
            place = info["direction"], info["size"], info["step"]
            found[place] = Timing(stats["median"], stats["q1"], stats["q3"])
    return found


def _parse(argv):
    parser = argparse.ArgumentParser(prog="python -m bench.agree", description="Compare two measurements of the steps.")
    parser.add_argument("ours", type=Path, nargs="+", help="from fastrack bench --json")
    parser.add_argument("--suite", type=Path, nargs="+", required=True, help="from pytest --benchmark-json")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="that ratios may differ by; 0.25 if absent")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
