"""Validation of `fastrack plan`: sizes that were measured are left out, predicted, and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median, quantiles

from fastrack_bench.prediction.curves import REACH, Curve, Estimate, OutOfReachError
from fastrack_bench.prediction.profiles import CONTIGUOUS, LOADER, RANDOM, Point, Profile, Stage, lower_quartile
from fastrack_bench.prediction.sources import Measured

CLASSES = {"to 1 MiB": 1 << 20, "to 32 MiB": 32 << 20, "above 32 MiB": 1 << 50}  # by size, to so many bytes
_LEAST = 4  # sizes to go on from
REFUSED = "refused, as too far"


@dataclass(frozen=True, slots=True)
class Trial:
    """The prediction of one size beside what was measured there, and what a bandwidth alone gives for it."""

    stage: Stage
    size: int
    gap: float  # the factor between the neighbours that were left
    measured: float  # seconds, the lower quartile
    predicted: float
    baseline: float  # bytes by the bandwidth of the largest size that was left
    covered: float  # the share of the runs in the interval
    holds: bool  # the interval has the lower quartile
    width: float  # the upper end of the interval over the lower one
    halves: float | None  # the lower quartile of one half of the runs over that of the other

    @property
    def error(self) -> float:
        """The error of the prediction, relative to what was measured."""
        return abs(self.predicted / self.measured - 1)

    @property
    def baseline_error(self) -> float:
        """The error of the baseline."""
        return abs(self.baseline / self.measured - 1)

    @property
    def noise(self) -> float | None:
        """The error of one half of the runs as a prediction of the other."""
        return None if self.halves is None else abs(self.halves - 1)


@dataclass(frozen=True, slots=True)
class Summary:
    """The errors of some trials: medians, and 90th percentiles."""

    of: str
    trials: int
    gap: float  # the largest factor between neighbours
    error: tuple[float, float]
    baseline: tuple[float, float]
    noise: tuple[float, float] | None
    covered: float  # the share of runs in the intervals
    held: float  # the share of lower quartiles in them
    width: float  # the median of the upper end over the lower one


@dataclass(frozen=True, slots=True)
class Trials:
    """Trials of one kind, and those of sizes that are refused, which were predicted all the same."""

    trials: tuple[Trial, ...]
    refused: tuple[Trial, ...] = ()

    def summaries(self) -> Iterator[Summary]:
        """Yield summaries: of all, by class of size, and by stage."""
        groups: dict[str, list[Trial]] = {"all": list(self.trials)}
        for trial in sorted(self.trials, key=lambda each: each.size):
            size_class = next(name for name, limit in CLASSES.items() if trial.size <= limit)
            groups.setdefault(size_class, []).append(trial)
        for trial in sorted(self.trials, key=lambda each: each.stage):
            groups.setdefault(trial.stage.name, []).append(trial)
        yield from (_summary(of, trials) for of, trials in groups.items() if trials)
        if self.refused:
            yield _summary(REFUSED, self.refused)


def _summary(of: str, trials: Sequence[Trial]) -> Summary:
    noise = [trial.noise for trial in trials if trial.noise is not None]
    return Summary(
        of,
        len(trials),
        max(trial.gap for trial in trials),
        _spread([trial.error for trial in trials]),
        _spread([trial.baseline_error for trial in trials]),
        _spread(noise) if noise else None,
        sum(trial.covered for trial in trials) / len(trials),
        sum(trial.holds for trial in trials) / len(trials),
        median(trial.width for trial in trials),
    )


def leave_out(profile: Profile, *, every: int = 1) -> Trials:
    """Predict each size between others from the rest. With `every` of 2, each second size is all that is used."""
    trials, refused = list[Trial](), list[Trial]()
    for stage, points in profile.stages.items():
        kept = points[::every]
        for index in range(1, len(kept) - 1):
            point, gap = kept[index], kept[index + 1].size / kept[index - 1].size
            rest = Curve(stage, kept[:index] + kept[index + 1 :], profile.machine.caches)
            trial = _trial(stage, rest.unchecked(point.size), rest.points[-1], point, gap)
            (trials if rest.reaches(point.size) else refused).append(trial)
    return Trials(tuple(trials), tuple(refused))


def reach_past(profile: Profile) -> Trials:
    """Predict each size from those up to a quarter of it, as far as `plan` reaches."""
    trials, refused = list[Trial](), list[Trial]()
    for stage, points in profile.stages.items():
        for point in points:
            kept = tuple(each for each in points if each.size * REACH <= point.size)
            if len(kept) >= _LEAST:
                rest = Curve(stage, kept, profile.machine.caches)
                gap = point.size / kept[-1].size
                trial = _trial(stage, rest.unchecked(point.size), kept[-1], point, gap)
                (trials if rest.reaches(point.size) else refused).append(trial)
    return Trials(tuple(trials), tuple(refused))


def leave_out_rows(profile: Profile) -> Trials:
    """Predict batches of rows of each size between others from the rows of the other sizes."""
    trials = list[Trial]()
    for name in (RANDOM, CONTIGUOUS, f"{RANDOM}{LOADER}", f"{CONTIGUOUS}{LOADER}"):
        known = sorted(stage for stage in profile.stages if stage.name == name)
        for below, stage, above in zip(known, known[1:], known[2:], strict=False):
            others = {each: points for each, points in profile.stages.items() if each != stage}
            source = Measured(profile.machine, (replace(profile, stages=others),))
            for point in profile.stages[stage]:
                with suppress(OutOfReachError):
                    found = source.rows(name, stage.threads, stage.row, point.size // stage.row)
                    largest = profile.stages[above][-1]
                    trials.append(_trial(stage, found, largest, point, above.row / below.row))
    return Trials(tuple(trials))


def predict_later(profile: Profile, later: Profile) -> Trials:
    """Predict what was measured later, of the same stages and sizes, by all of what was measured before."""
    trials = []
    for stage in profile.stages.keys() & later.stages.keys():
        curve = Curve.of(profile, stage)
        sizes = {point.size for point in curve.points}
        trials += [
            _trial(stage, curve.at(point.size), curve.points[-1], point, 1.0)
            for point in later.stages[stage]
            if point.size in sizes
        ]
    return Trials(tuple(trials))


def _trial(stage: Stage, found: Estimate, largest: Point, point: Point, gap: float) -> Trial:
    even, odd = point.runs[::2], point.runs[1::2]
    return Trial(
        stage=stage,
        size=point.size,
        gap=gap,
        measured=point.seconds,
        predicted=found.middle,
        baseline=point.size * largest.seconds / largest.size,
        covered=sum(found.low <= run <= found.high for run in point.runs) / len(point.runs),
        holds=found.low <= point.seconds <= found.high,
        width=found.high / found.low,
        halves=None if point.is_summary or len(point.runs) < 6 else lower_quartile(even) / lower_quartile(odd),
    )


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 90th percentile."""
    return median(values), quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]
