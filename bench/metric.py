"""Compare results with their targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A measured number next to its target."""

    name: str  # the measurement and its reference
    value: float | None  # None if it was not measured
    unit: str  # "x" for a ratio
    target: float  # the bound that it has to keep
    at_most: bool = False  # whether that is an upper bound
    aim: float | None = None  # a further bound, which is not checked

    @property
    def is_met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def as_dict(self):
        """Return the metric for JSON, where the target is called `reach`."""
        document = asdict(self)
        return document | {"reach": document.pop("target"), "is_met": self.is_met}
