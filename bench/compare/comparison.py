"""A whole comparison: pair after pair, of all guards at first, then of undecided ones."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from bench.compare import CannotCompareError
from bench.compare.pairs import run_pair
from bench.compare.report import short
from bench.compare.verdicts import CONFIRMED, WORSE, Row, Verdict, judge, one_sided

_SUSPICIOUS = 1.05
_AT_ONCE = 8  # benchmarks to measure again: with little time left, a few are decided sooner than all


@dataclass(frozen=True, slots=True)
class Plan:
    """The effort of a comparison: pairs of processes, rounds and seconds."""

    pairs: int = 4  # of processes, for every benchmark
    most_pairs: int = 12  # for one that is undecided
    rounds: int = 31  # of each benchmark in a pair, if they do not take too long
    seconds: float = 150  # for measuring undecided benchmarks again
    patience: float = 120  # seconds that a process may be silent


def compare(pythons: dict[str, Path], suites: Path, folder: Path, say, plan: Plan) -> list[Row]:
    """Measure the suites under `suites` with the Python of each side; logs go to `folder`.

    Raises CannotCompareError if a side does not start, or there is no benchmark that both can run.
    """
    measured: dict[str, list[list[tuple[float, float]]]] = {}
    broken: dict[str, dict[str, str]] = {}
    failures: Counter[str] = Counter()
    start, number, last = time.monotonic(), 0, 0.0
    names: list[str] | None = None
    while names is None or names:
        begin = time.monotonic()
        results = run_pair(
            pythons, suites, folder, number=number, rounds=plan.rounds, names=names, patience=plan.patience,
            progress=lambda name, pair=number + 1: say(f"pair {pair}, {short(name)}"),
        )  # fmt: skip
        number += 1
        for name in results.names:
            measured.setdefault(name, []).extend([results.rounds[name]] if name in results.rounds else [])
        failures.update(results.broken.keys())
        # Two failures, if it ran once: a busy machine may delay one of them for too long.
        broken |= {name: why for name, why in results.broken.items() if failures[name] > 1 or not measured.get(name)}
        last = time.monotonic() - begin
        time_left = time.monotonic() - start + last < plan.seconds
        names = _next({name: pairs for name, pairs in measured.items() if name not in broken}, plan, time_left)
    rows = [judge(name, pairs) for name, pairs in measured.items() if name not in broken]
    sided = [one_sided(name, why) for name, why in broken.items()]
    if not rows:
        reasons = "\n".join(f"{row.name}: {row.why}" for row in sided[:10]) or "no benchmark is marked as a guard"
        raise CannotCompareError(f"there is nothing that both sides can run.\n{reasons}")
    return rows + sided


def rehearse(pythons: dict[str, Path], suites: Path, folder: Path, say, plan: Plan) -> None:
    """Run everything without measuring it, if an environment is new: code is compiled, and kept for the pairs."""
    marks = [python.parents[1] / "compiled" for python in pythons.values()]
    if not all(mark.exists() for mark in marks):
        say("compiling")
        run_pair(pythons, suites, folder, number=0, rounds=0, patience=plan.patience)
        for mark in marks:
            mark.touch()


def _next(measured: dict[str, list[list[tuple[float, float]]]], plan: Plan, time_left: bool) -> list[str]:
    """Choose the benchmarks to measure in another pair.

    Benchmarks that a dead process left out come first. Undecided ones follow: likely regressions, nearest to a verdict
    first, or else all others.
    """
    rows = [judge(name, pairs) for name, pairs in measured.items() if 0 < len(pairs) < plan.most_pairs]
    lacking = [name for name, pairs in measured.items() if len(pairs) < plan.pairs]
    # A benchmark that more pairs would call slower gets them, however long it takes.
    almost = [row.name for row in rows if row.interval.low > WORSE and row.pairs < CONFIRMED]
    lacking += [name for name in almost if name not in lacking]
    if lacking or not time_left:
        return lacking
    undecided = sorted((row for row in rows if row.verdict is Verdict.UNDECIDED), key=lambda row: -row.interval.low)
    suspicious = [row.name for row in undecided if row.interval.ratio > _SUSPICIOUS]
    return suspicious[:_AT_ONCE] or [row.name for row in undecided]
