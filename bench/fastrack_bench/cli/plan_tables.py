"""Tables and texts of ``fastrack plan``."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from fastrack._cli.console import new_table

if TYPE_CHECKING:
    from fastrack_bench.prediction.curves import Estimate
    from fastrack_bench.prediction.jobs import Plan, Schedule
    from fastrack_bench.prediction.profiles import Row
    from fastrack_bench.prediction.validation import Summary

_UNITS = ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (300.0, 1.0, "s"), (3 * 3600.0, 1 / 60, "min"))
LEGEND = (
    "time: undisturbed, by lower quartiles of what was measured; a range where sources differ. 90 %: nine of ten runs "
    "end between, by how far off predictions of sizes are that were left out. assumed: from half to twice, as too few "
    "sizes were measured to tell."
)


def format_seconds(seconds: float) -> str:
    """Return a time for people, with three digits."""
    _, factor, unit = next((each for each in _UNITS if seconds < each[0]), (0.0, 1 / 3600, "h"))
    value = seconds * factor
    digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(value)))
    return f"{value:.{digits}f} {unit}"


def format_estimate(estimate: "Estimate") -> tuple[str, str]:
    """Return a time and its interval for people. A time that was not measured has no interval."""
    least, most = format_seconds(estimate.least), format_seconds(estimate.most)
    low, high = format_seconds(estimate.low), format_seconds(estimate.high)
    is_given = (low, high) == (least, most)
    return (least if least == most else f"{least} to {most}"), (
        "" if is_given else f"{low} to {high}{', assumed' * estimate.is_assumed}"
    )


def show_plan(plan: "Plan", console: Console) -> None:
    """Print what a job takes, its stages, its bottleneck and what would move it."""
    console.print(plan.job, style="bold")
    console.print(f"on {plan.machine}")
    if plan.label:
        console.print(plan.label, style="bold")
    console.print()
    table = new_table("", "time", "90 %", right=("time", "90 %"))
    if len(plan.parts) > 1:
        for part in plan.parts:
            table.add_row(part.name, *format_estimate(part.seconds))
    table.add_row("all" if len(plan.parts) > 1 else plan.parts[0].name, *format_estimate(plan.seconds), style="bold")
    for move in plan.moves:
        table.add_row(f"with {move.name}", *format_estimate(move.seconds))
    console.print(table)
    console.print(f"\nbottleneck: {plan.bottleneck}" + ("" if plan.moves else "; nothing that was measured moves it"))
    if plan.sources:
        console.print("by source: " + ", ".join(f"{name} {format_seconds(value)}" for name, value in plan.sources))
    for note in plan.notes:
        console.print(note)


def show_schedules(schedules: "Sequence[Schedule]", console: Console) -> None:
    """Print how often to save."""
    console.print("\nhow often to save\n", style="bold")
    right = ("quick", "likely", "slow")
    table = new_table("", *right, right=right)
    table.add_row("a checkpoint takes", *(format_seconds(each.save) for each in schedules))
    table.add_row("a restart takes", *(format_seconds(each.restart) for each in schedules))
    for name in ("young", "daly", "best"):
        table.add_row(f"save after, by {name}", *(format_seconds(getattr(each, name)) for each in schedules))
    for name in ("young", "daly", "best"):
        table.add_row(f"time over undisturbed, {name}", *(f"{each.costs[name].slowdown:.3f}" for each in schedules))
    for share in ("saving", "lost", "restarting"):
        shares = (getattr(each.costs["best"], share) for each in schedules)
        table.add_row(f"share of the time: {share}", *(f"{100 * value:.2f} %" for value in shares))
    console.print(table)


def show_rows(rows: "Sequence[Row]", console: Console) -> None:
    """Print what was measured: the span of the sizes, and of the speeds, of each stage."""
    from fastrack_bench.prediction.profiles import lower_quartile

    right = ("sizes", "runs", "least", "most")
    table = new_table("stage", *right, right=right)
    stages = dict.fromkeys(row.stage for row in rows)
    for stage in stages:
        of_stage = [row for row in rows if row.stage == stage]
        seconds = [lower_quartile(row.seconds) for row in of_stage]
        runs = sorted({len(row.seconds) for row in of_stage})
        counts = "-".join(map(str, dict.fromkeys((runs[0], runs[-1]))))
        table.add_row(
            str(stage), str(len(of_stage)), counts, format_seconds(min(seconds)), format_seconds(max(seconds))
        )
    console.print(table)


def show_summaries(title: str, summaries: "Iterable[Summary]", console: Console) -> None:
    """Print the errors of predictions, a line for each group of trials."""
    console.print(f"{title}\n", style="bold")
    right = ("sizes", "gap", "error %", "bytes/bw %", "noise %", "covers", "width")
    table = new_table("", *right, right=right, is_close=True)
    for each in summaries:
        noise = "" if each.noise is None else _two(each.noise)
        covers = f"{100 * each.covered:.0f}; {100 * each.held:.0f}"
        counts = str(each.trials), f"{each.gap:.0f}"
        table.add_row(each.of, *counts, _two(each.error), _two(each.baseline), noise, covers, f"{each.width:.1f}")
    console.print(table)
    console.print()


def _two(pair: tuple[float, float]) -> str:
    return f"{100 * pair[0]:.1f}; {100 * pair[1]:.1f}"
