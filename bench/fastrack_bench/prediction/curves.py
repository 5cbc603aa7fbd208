"""Prediction of a stage from its points: the time by size, piecewise a + b n, with an interval, and where it ends.

The interval is conformal: each measured size is left out in turn and predicted from the others, and the ratios of what
was measured to what was predicted say how far off predictions are (Vovk, Gammerman, Shafer, "Algorithmic learning in
a random world", 2005; leaving one out is the jackknife+ of Barber et al., Annals of Statistics 49 (2021) 486).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fastrack._util.shown import format_size
from fastrack.errors import FastrackError
from fastrack_bench.prediction.profiles import Point, Profile, Stage

REACH = 4.0  # times past what was measured
COVERAGE = 0.9  # of an interval
_NEAR = 8.0  # the factor between sizes up to which they are off alike
_LEAST = 4  # sizes that are left out, of which an interval is made
_ASSUMED = 0.5, 2.0  # the factors of an interval where nothing can be left out


class OutOfReachError(FastrackError):
    """A size, or a setting, that the measurements do not reach."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds: what undisturbed runs take by the sources that differ most, and the interval of single runs."""

    low: float
    least: float  # the estimate of the source with the least one
    most: float  # and with the greatest, the same if there is one source
    high: float
    is_assumed: bool = False  # the ends come from no measurement, as too few sizes have any

    @classmethod
    def exact(cls, seconds: float) -> Estimate:
        """Return an estimate of a time that is given."""
        return cls(seconds, seconds, seconds, seconds)

    @property
    def middle(self) -> float:
        """The geometric mean of the sources."""
        if self.least == self.most:  # whose roots may multiply to less
            return self.least
        return math.sqrt(self.least) * math.sqrt(self.most)

    def __add__(self, other: Estimate) -> Estimate:
        """Add what comes one after the other. Both may be slow at once, so that ends are added."""
        return self._joined(other, [sum(pair) for pair in zip(self.values, other.values, strict=True)])

    def times(self, factor: float) -> Estimate:
        """Return the estimate of so many of it."""
        return self.mapped(lambda value: factor * value)

    def over(self, other: Estimate) -> Estimate:
        """Return the greater of both, of what goes on at the same time."""
        return self._joined(other, [max(pair) for pair in zip(self.values, other.values, strict=True)])

    def between(self, other: Estimate) -> Estimate:
        """Return the range from this to the other, where either may be so."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        return self._joined(other, (low, min(self.least, other.least), max(self.most, other.most), high))

    def _joined(self, other: Estimate, values: Sequence[float]) -> Estimate:
        low, least, most, high = values
        return Estimate(low, least, most, high, self.is_assumed or other.is_assumed)

    def mapped(self, change: Callable[[float], float]) -> Estimate:
        """Return the estimate of what grows with it."""
        return self._joined(self, [change(value) for value in self.values])

    @property
    def values(self) -> tuple[float, float, float, float]:
        """The seconds from the lowest to the highest."""
        return self.low, self.least, self.most, self.high


@dataclass(frozen=True)  # no slots: what is derived is kept
class Curve:
    """The seconds of one stage by size."""

    stage: Stage
    points: tuple[Point, ...]  # by ascending size
    caches: tuple[int, ...] | None  # bytes

    @classmethod
    def of(cls, profile: Profile, stage: Stage) -> Curve:
        """Return the curve of a stage of a profile."""
        return cls(stage, profile.stages[stage], profile.machine.caches)

    def at(self, size: float) -> Estimate:
        """Return the estimate for a message of some bytes. Raise `OutOfReachError` where nothing near was measured."""
        self.check(size)
        return self.unchecked(size)

    def unchecked(self, size: float) -> Estimate:
        """Return the estimate, however far from what was measured."""
        seconds, spread = self.seconds(size), self._spread(size)
        low, high = spread or _ASSUMED
        return Estimate(seconds * low, seconds, seconds, seconds * high, spread is None)

    def seconds(self, size: float) -> float:
        """Return the undisturbed seconds: a + b n through the neighbours, continued beyond the ends."""
        return self._line(self.points, size)

    def spread(self, size: float) -> tuple[float, float]:
        """Return the factors of an interval to the estimate, from the ratios at the sizes that are nearest."""
        return self._spread(size) or _ASSUMED

    def _spread(self, size: float) -> tuple[float, float] | None:
        first, last = self.points[0].size, self.points[-1].size
        tail = (1 - COVERAGE) / 2
        if first <= size <= last:
            near = sorted(self._ratios, key=lambda scores: abs(math.log(scores[0] / size)))
            chosen = [scores for scores in near if _apart(scores[0], size) <= _NEAR]
            chosen = chosen if len(chosen) >= _LEAST else near[:_LEAST]
        else:
            # None is near, and each may go on otherwise than those before: all of them, and farther out.
            chosen, tail = self._ratios_beyond(size), tail / 2
        if len(chosen) < 2:
            return None
        # Each size counts alike, however many runs it has.
        weighted = sorted((ratio, 1 / len(of_size)) for _, of_size in chosen for ratio in of_size)
        tail *= len(chosen) / (len(chosen) + 1)  # the new size is one more, and as likely extreme
        return min(1.0, _quantile(weighted, tail)), max(1.0, _quantile(weighted, 1 - tail))

    def reaches(self, size: float) -> bool:
        """Return whether `at` predicts a size."""
        try:
            self.check(size)
        except OutOfReachError:
            return False
        return True

    def check(self, size: float) -> None:
        """Raise `OutOfReachError` for a size past four times what was measured, or in a gap with an edge of a cache."""
        first, last = self.points[0].size, self.points[-1].size
        if not first / REACH <= size <= last * REACH:
            raise OutOfReachError(
                f"planning {self.stage} of {format_size(size)} failed: expected {format_size(first / REACH)} to "
                f"{format_size(last * REACH)}, four times past what was measured. Measure larger or smaller sizes: "
                "`fastrack plan measure --largest`"
            )
        gap = self._gap(size)
        if gap is not None:
            raise OutOfReachError(
                f"planning {self.stage} of {format_size(size)} failed: expected measurements on both sides of the "
                f"edge of a cache within a factor of 4, got {format_size(gap[0])} and {format_size(gap[1])}"
                f"{'' if self.caches is not None else ' and no sizes of caches'}. Run `fastrack plan measure`"
            )

    def _gap(self, size: float) -> tuple[float, float] | None:
        """Return the neighbours of a size between which an edge of a cache was not measured closely, or None."""
        sizes = [point.size for point in self.points]
        at = bisect_left(sizes, size)
        below = sizes[at - 1] if at else min(size, sizes[0])
        above = sizes[at] if at < len(sizes) else max(size, sizes[-1])
        if above == size and at < len(sizes):
            return None
        if self.caches is None:  # where an edge may be anywhere
            return (below, above) if above / below > REACH else None
        is_below, is_above = at == 0, at == len(sizes)
        for edge in self._edges:
            is_far = is_below or is_above or edge / below > REACH or above / edge > REACH
            # A size at an edge has passed it: other things are in a cache too. One alone beyond it shows no line.
            is_between = below < edge <= above or (is_above and below == edge)
            if is_between and is_far:
                return below, above
        return None

    @property
    def _edges(self) -> tuple[float, ...]:
        """The sizes of messages from which on a cache is full: of the largest one half, as a copy is in it too."""
        return (*self.caches[:-1], self.caches[-1] / 2) if self.caches else ()

    @cached_property
    def _ratios(self) -> list[tuple[int, list[float]]]:
        """The ratios of the runs of each size to what the others predict for it, for sizes between others."""
        found = []
        for index in range(1, len(self.points) - 1):
            point = self.points[index]
            predicted = self._line(self.points[:index] + self.points[index + 1 :], point.size)
            found.append((point.size, [run / predicted for run in point.runs]))
        return found

    def _ratios_beyond(self, size: float) -> list[tuple[int, list[float]]]:
        """Return the ratios to what is predicted as far past the rest as a size is past the ends."""
        found = []
        first, last = self.points[0].size, self.points[-1].size
        for point in self.points:
            if size > last:
                rest = [each for each in self.points if each.size * size <= point.size * last]
            else:
                rest = [each for each in self.points if each.size * size >= point.size * first]
            if len(rest) > 1:
                predicted = self._line(rest, point.size)
                found.append((point.size, [run / predicted for run in point.runs]))
        return found

    def _line(self, points: Sequence[Point], size: float) -> float:
        """Return the seconds on the lines between neighbouring points."""
        if len(points) == 1:
            return points[0].seconds * max(1.0, size / points[0].size)
        first, last = points[0], points[-1]
        if size > last.size:
            # As far back as `at` goes ahead: the last two points alone are within each other's noise.
            back = [point for point in points if point.size * REACH <= last.size] or points[:-1]
            # No message is quicker for more bytes.
            return last.seconds + max(0.0, _slope(back[-1], last)) * (size - last.size)
        if size < first.size:
            line = first.seconds + max(0.0, _slope(first, points[1])) * (size - first.size)
            # It may end under zero; bytes never take longer each in a larger message.
            return max(line, first.seconds * size / first.size)
        index = max(1, bisect_left([point.size for point in points], size))
        left, right = points[index - 1], points[index]
        # Up to the edge of the largest cache the line before goes on: one to the right has the cost of memory in it.
        edge = self._edges[-1] if self.caches else 0.0
        if index > 1 and left.size < edge < right.size:
            at_edge = left.seconds + max(0.0, _slope(points[index - 2], left)) * (edge - left.size)
            at_edge = min(at_edge, right.seconds)
            if size > edge:
                return at_edge + (right.seconds - at_edge) / (right.size - edge) * (size - edge)
            return left.seconds + (at_edge - left.seconds) / (edge - left.size) * (size - left.size)
        return left.seconds + _slope(left, right) * (size - left.size)


def _slope(left: Point, right: Point) -> float:
    return (right.seconds - left.seconds) / (right.size - left.size)


def _quantile(weighted: Sequence[tuple[float, float]], level: float) -> float:
    """Return a quantile of ascending values with weights."""
    goal, sum_so_far = level * math.fsum(weight for _, weight in weighted), 0.0
    for value, weight in weighted:
        sum_so_far += weight
        if sum_so_far >= goal:
            return value
    return weighted[-1][0]


def _apart(size: float, other: float) -> float:
    return max(size / other, other / size)
