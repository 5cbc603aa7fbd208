"""Choose how often to save on machines that are taken away: the intervals of Young and of Daly, and their costs.

Machines go at random times, with a mean time between two of them. What goes on since the last whole checkpoint is lost,
and done again after a restart. Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval",
CACM 17 (1974) 530; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22
(2006) 303.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_STEPS = 60  # of a bisection, each of which halves the bracket


@dataclass(frozen=True, slots=True)
class Revocations:
    """A rate of revocations, and what a checkpoint and a restart take. All are seconds above zero, restart or zero."""

    mean: float  # between two revocations of any machine of a job
    save: float  # that the job waits for a checkpoint
    restart: float = 0.0  # from a revocation to the first step after it

    def young(self) -> float:
        """Return Young's interval, in seconds of work between two checkpoints: sqrt(2 save mean)."""
        return math.sqrt(2 * self.save * self.mean)

    def daly(self) -> float:
        """Return Daly's higher order interval (equation 37), which holds for checkpoints that are not short either."""
        if self.save >= 2 * self.mean:
            return self.mean
        part = math.sqrt(self.save / (2 * self.mean))
        return self.young() * (1 + part / 3 + part * part / 9) - self.save

    def best(self) -> float:
        """Return the interval for which `at` gives the least time, which both approximate."""
        # The derivative of (e^((t + save) / mean) - 1) / t is 0 where (1 - t / mean) e^((t + save) / mean) is 1.
        low, high = 0.0, self.mean
        for _ in range(_STEPS):
            middle = (low + high) / 2
            # In logarithms: the power overflows for slow saves, and the difference from 1 vanishes for fast ones.
            grows = middle >= self.mean or math.log1p(-middle / self.mean) + (middle + self.save) / self.mean < 0
            low, high = (low, middle) if grows else (middle, high)
        return (low + high) / 2

    def at(self, interval: float) -> Costs:
        """Return what revocations cost with checkpoints after so many seconds of work (Daly, equation 14).

        Revocations are a Poisson process, also while a machine restarts.
        """
        segment = interval + self.save
        lives = _expm1(segment / self.mean)  # revocations before a segment is whole, but those in restarts
        lost = self.mean - segment / lives
        working = math.exp(-self.restart / self.mean)  # share of the time that is no restart
        return Costs(
            interval=interval,
            lost_each=lost,
            saving=self.save / self.mean / lives * working,
            lost=lost / self.mean * working,
            restarting=1 - working,
            slowdown=self.mean * lives / working / interval if working else math.inf,
        )


def _expm1(power: float) -> float:
    try:
        return math.expm1(power)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of revocations with an interval between checkpoints."""

    interval: float  # seconds of work between two checkpoints
    lost_each: float  # seconds that one revocation loses, of work and of saving, in the mean
    saving: float  # share of the time
    lost: float  # share of the time that is lost and done again
    restarting: float  # share of the time
    slowdown: float  # time over that of an uninterrupted run without checkpoints
