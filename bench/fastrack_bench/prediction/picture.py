"""A picture of the stages of a plan, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastrack._bench.plots import COLOURS, new_figure, save_figure
from fastrack._util.shown import format_size
from fastrack_bench.prediction.curves import Curve, Estimate
from fastrack_bench.prediction.jobs import Plan
from fastrack_bench.prediction.profiles import Profile, Stage


def draw_plan(profiles: Sequence[Profile], plans: Sequence[Plan], path: Path) -> None:
    """Save the stages of plans: what was measured, the model, its interval, and where it was used for the plan.

    `check_picture` tells whether the picture can be saved.
    """
    parts = {part.stage: part for plan in plans if not plan.label for part in plan.parts if part.stage is not None}
    figure, panels = new_figure(8, 1 + 4.2 * len(parts), len(parts))
    for axes, (stage, part) in zip(panels, parts.items(), strict=True):
        curves = [(curve, profile.source) for profile in profiles for curve in _curves_like(stage, profile)]
        for number, (curve, source) in enumerate(curves):
            _draw_curve(axes, curve, f"{curve.stage}; {source}", COLOURS[number % len(COLOURS)])
        for plan in plans:
            for each in plan.parts:
                if each.stage == stage and each.each is not None:
                    _draw_planned(axes, each.size, each.each, plan.job)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda size, _: format_size(size))
        axes.set_ylabel("seconds")
        axes.set_title(str(part.name), fontsize=10)
        axes.legend(fontsize=7)
    save_figure(figure, path)


def _draw_planned(axes: Any, size: float, seconds: Estimate, job: str) -> None:
    low, least, most, high = seconds.values
    ends = [max(0.0, seconds.middle - low)], [max(0.0, high - seconds.middle)]  # roots may be off by a rounding
    axes.errorbar(size, seconds.middle, ends, color="black", capsize=3)
    axes.plot([size, size], [least, most], "D-", color="black", markersize=4, label=f"planned: {job:.60}")


def _curves_like(stage: Stage, profile: Profile) -> list[Curve]:
    """Return the curve of a stage, or those with rows of the sizes that are nearest."""
    same = [each for each in profile.stages if replace(each, row=0) == replace(stage, row=0)]
    nearest = sorted(same, key=lambda each: max(each.row, stage.row) / max(1, min(each.row, stage.row)))
    chosen = nearest[:1] if stage in profile.stages else nearest[:2]
    return [Curve.of(profile, each) for each in chosen]


def _draw_curve(axes: Any, curve: Curve, label: str, colour: str) -> None:
    sizes = [point.size for point in curve.points]
    seconds = [point.seconds for point in curve.points]
    lows, highs = zip(*(curve.spread(size) for size in sizes), strict=True)
    axes.fill_between(
        sizes,
        [each * low for each, low in zip(seconds, lows, strict=True)],
        [each * high for each, high in zip(seconds, highs, strict=True)],
        color=colour,
        alpha=0.2,
        linewidth=0,
    )
    axes.plot(sizes, seconds, "o-", color=colour, markersize=3, label=label)
