"""Measure guards in two environments, by pytest-benchmark in pairs of processes, and judge their times.

A pair gives one number, the log of head / base. Where a process's memory lies makes it faster or slower for as long as
it lives, so only pairs are independent of one another: the interval is Student's, over the pairs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev

from bench.compare import CannotCompareError

SIDES = ("base", "head")
WORSE = 1.10  # from this ratio on, slower is too slow
CONFIRMED = 6  # pairs before anything is called slower
# Student's t, 0.995 quantile, by degrees of freedom: two-sided 99 %. NIST/SEMATECH e-Handbook, section 1.3.6.7.2.
_T = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947)
_PYTEST = (
    *("-P", "-m", "pytest", "-m", "guard", "-q", "-rfEs", "--no-fold-skipped", "--tb=line"),
    *("--continue-on-collection-errors", "-p", "no:cacheprovider", "--benchmark-only", "--benchmark-quiet"),
    *("--benchmark-disable-gc", "--benchmark-warmup=on", "--benchmark-max-time=0.3"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The effort of a comparison."""

    pairs: int = 4  # of processes, for every benchmark
    most_pairs: int = 12  # for one that is undecided
    seconds: float = 400  # in which undecided benchmarks may be measured again
    patience: float = 900  # seconds that a process may take


class Verdict(StrEnum):
    OK = "ok"
    FASTER = "faster"
    SLOWER = "SLOWER"
    UNDECIDED = "undecided"
    NEW = "new"
    GONE = "gone"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Interval:
    """The time of head over that of the base: the estimate, and its 99 % confidence interval for a single look."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """A benchmark. Seconds are medians; without an interval, `why` says what was in the way."""

    name: str
    verdict: Verdict
    pairs: int = 0
    base: float | None = None
    head: float | None = None
    interval: Interval | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements of one side: seconds of a call by benchmark, and why others, or whole files, have none."""

    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, other: Run) -> None:
        for name in ("seconds", "failed", "skipped"):
            getattr(self, name).update(getattr(other, name))

    def why(self, name: str) -> str:
        reasons = self.failed | self.skipped
        return next((why for place, why in reasons.items() if name.startswith(place)), "it is not there")


def compare(pythons: dict[str, Path], suites: Path, say: Callable[[str], None], plan: Plan) -> list[Row]:
    """Measure the guards of `suites` with the Python of each side, in pairs of processes.

    All guards are measured in some pairs, those that are undecided in more, as long as there is time.

    Raises CannotCompareError if a process does not end as pytest does, or there is nothing that both sides can run.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    apart: dict[str, Row] = {}
    names: list[str] = []
    start = time.monotonic()
    for number in range(plan.most_pairs):
        order = SIDES if number % 2 == 0 else SIDES[::-1]  # who comes second finds other caches
        runs = {side: Run() for side in SIDES}
        for part in _parts(suites, names):
            say(f"pair {number + 1}, {part[0].partition('::')[0]}")
            for side in order:
                runs[side].add(measure(pythons[side], suites, part, number, plan.patience))
        base, head = (runs[side] for side in SIDES)
        for name in base.seconds.keys() & head.seconds.keys():
            pairs.setdefault(name, []).append((base.seconds[name], head.seconds[name]))
        apart |= {row.name: row for row in _find_apart(base, head)}
        rows = [judge(name, times) for name, times in sorted(pairs.items()) if name not in apart]
        if not rows:
            reasons = [f"{row.name}: {row.why}" for row in apart.values()] or ["no benchmark is marked as a guard"]
            raise CannotCompareError("\n".join(["there is nothing that both sides can run", *reasons]))
        if number + 1 < plan.pairs:
            names = [row.name for row in rows]
            continue
        is_late = time.monotonic() - start > plan.seconds
        undecided = [row for row in rows if row.verdict is Verdict.UNDECIDED]
        # Whatever would be called slower on more pairs gets them, however long it takes.
        names = [row.name for row in undecided if row.interval.low > WORSE or not is_late]
        if not names:
            break
    return [*rows, *apart.values()]


def _parts(suites: Path, names: Sequence[str]) -> list[list[str]]:
    """Return the guards of each file, or all files: both sides measure a file one right after the other."""
    if not names:
        return [[f"bench/{path.name}"] for path in sorted(suites.glob("bench/bench_*.py"))]
    return [list(part) for _, part in groupby(sorted(names), key=lambda name: name.partition("::")[0])]


def measure(python: Path, suites: Path, names: Sequence[str], number: int, patience: float) -> Run:
    """Run these guards, or all of a file, in a new process.

    Seconds are the first quartile of the rounds: whatever else runs on the machine only adds to them.
    """
    environment = {name: text for name, text in os.environ.items() if name not in {"PYTHONPATH", "PYTEST_ADDOPTS"}}
    with tempfile.TemporaryDirectory(dir=suites.parent) as folder:
        found = Path(folder, "found.json")
        environment |= {"PYTHONHASHSEED": str(number + 1), "TMPDIR": folder, "COLUMNS": "400"}
        command = [python, *_PYTEST, f"--benchmark-json={found}", *names]
        try:
            done = subprocess.run(
                command, cwd=suites, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=patience, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CannotCompareError(f"{python.parents[1].name}: no end within {patience:.0f} s") from None
        if done.returncode not in (0, 1, 5):  # all passed, some failed, there were none
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
            raise CannotCompareError(f"{python.parents[1].name}: the process ended with {done.returncode}\n{tail}")
        measured = json.loads(found.read_text())["benchmarks"] if found.exists() and found.stat().st_size else []
    run = Run({each["fullname"]: each["stats"]["q1"] for each in measured})
    for kind, place, why in re.findall(r"^(FAILED|ERROR|SKIPPED) (\S+)(?: - (.*))?$", done.stdout, re.MULTILINE):
        cause = re.search(rf"ERROR collecting {re.escape(place)} .*?^E +(.+?)$", done.stdout, re.DOTALL | re.MULTILINE)
        reasons = run.skipped if kind == "SKIPPED" else run.failed
        reasons.setdefault(place, why or (cause[1] if cause else "it failed"))
        run.seconds.pop(place, None)  # what fails after it was measured
    return run


def _find_apart(base: Run, head: Run) -> list[Row]:
    """Return rows of what is not measured on both sides, but for what both skip."""
    mine, theirs = base.seconds.keys() - head.seconds.keys(), head.seconds.keys() - base.seconds.keys()
    rows = [Row(name, Verdict.GONE, why=f"head: {head.why(name)}") for name in sorted(mine)]
    rows += [Row(name, Verdict.NEW, why=f"base: {base.why(name)}") for name in sorted(theirs)]
    for name in base.failed.keys() & head.failed.keys():
        rows.append(Row(name, Verdict.BROKEN, why=f"base: {base.failed[name]}; head: {head.failed[name]}"))
    return rows


def judge(name: str, pairs: Sequence[tuple[float, float]]) -> Row:
    """Judge a benchmark by the seconds of base and head, in pairs."""
    found = interval([log(head / base) for base, head in pairs])
    base, head = (median(times) for times in zip(*pairs, strict=True))
    verdict = Verdict.OK
    if found.low > WORSE and len(pairs) >= CONFIRMED:
        verdict = Verdict.SLOWER
    elif found.high > WORSE:
        verdict = Verdict.UNDECIDED
    elif found.high < 1 / WORSE:
        verdict = Verdict.FASTER
    return Row(name, verdict, len(pairs), base, head, found)


def interval(logs: Sequence[float]) -> Interval:
    middle = fmean(logs)
    if len(logs) < 2:
        return Interval(exp(middle), 0.0, float("inf"))
    reach = _T[min(len(logs) - 1, len(_T)) - 1] * stdev(logs) / sqrt(len(logs))
    return Interval(exp(middle), exp(middle - reach), exp(min(middle + reach, 700)))
