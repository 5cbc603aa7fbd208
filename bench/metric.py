"""What the results say of a target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A measured number next to its target.

    name : what was measured, and against what
    value : the number, or None if it was not measured
    unit : "x" for a ratio
    target : the bound that it has to keep
    at_most : whether that is an upper bound
    aim : a further bound, which is not checked
    """

    name: str
    value: float | None
    unit: str
    target: float
    at_most: bool = False
    aim: float | None = None

    @property
    def is_met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def as_dict(self):
        """Return the metric for JSON, in which the target is called `reach`."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "reach": self.target,
            "at_most": self.at_most,
            "aim": self.aim,
            "is_met": self.is_met,
        }
