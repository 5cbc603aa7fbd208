"""Judge the times of a benchmark, measured in pairs of processes.

A pair gives one number, the middle over its rounds of log(head / base): neighbours in time share the state of the
machine, and a median forgives disturbed rounds. The addresses of its memory make a process faster or slower for its
lifetime, so only pairs are independent of one another: the interval is Student's, over the pairs' medians.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import exp, log, sqrt
from statistics import fmean, median, stdev

WORSE = 1.10  # from this ratio on, slower is too slow
CONFIRMED = 6  # pairs before a benchmark is called slower
# Student's t, 0.995 quantile, by degrees of freedom: two-sided 99 %. NIST/SEMATECH e-Handbook, section 1.3.6.7.2.
_T = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947)


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
    """A benchmark. Seconds are medians; without an interval, `why` has the reason."""

    name: str
    verdict: Verdict
    pairs: int = 0
    base: float | None = None
    head: float | None = None
    interval: Interval | None = None
    why: str = ""


def judge(name: str, pairs: list[list[tuple[float, float]]]) -> Row:
    """Judge a benchmark by the seconds of base and head, in rounds, in pairs."""
    middles = [_middle([log(head / base) for base, head in rounds]) for rounds in pairs]
    estimate = interval(middles)
    base, head = (median(times[side] for rounds in pairs for times in rounds) for side in (0, 1))
    return Row(name, verdict(estimate, len(pairs)), len(pairs), base, head, estimate)


def _middle(logs: list[float]) -> float:
    """Return the mean of the medians of rounds with base first and with head first.

    The second side finds other caches. One median of all rounds would favour the more frequent order.
    """
    return fmean(median(half) for half in (logs[::2], logs[1::2]) if half)


def one_sided(name: str, broken: dict[str, str]) -> Row:
    """Return the row of a benchmark that a side cannot run, with the reason."""
    kinds = {"base": Verdict.NEW, "head": Verdict.GONE}
    kind = kinds[next(iter(broken))] if len(broken) == 1 else Verdict.BROKEN
    return Row(name, kind, why="; ".join(f"{side}: {why}" for side, why in broken.items()))


def interval(logs: list[float]) -> Interval:
    middle = fmean(logs)
    if len(logs) < 2:
        return Interval(exp(middle), 0.0, float("inf"))
    reach = _T[min(len(logs) - 1, len(_T)) - 1] * stdev(logs) / sqrt(len(logs))
    return Interval(exp(middle), exp(middle - reach), exp(min(middle + reach, 700)))


def verdict(found: Interval, pairs: int) -> Verdict:
    if found.low > WORSE and pairs >= CONFIRMED:
        return Verdict.SLOWER
    if found.high > WORSE:
        return Verdict.UNDECIDED
    return Verdict.FASTER if found.high < 1 / WORSE else Verdict.OK
