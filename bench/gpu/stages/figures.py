"""Measure all figures: kernels, transfers, ablation, timeline, slowdown and sweeps, and a picture of them."""

from __future__ import annotations

from pathlib import Path

from bench.gpu import needs
from bench.gpu.gpu import Skip
from bench.gpu.targets import check_targets


def run(stage):
    from bench.gpu import ablation, kernels, slowdown, sweep, timeline, transfers

    record, shown = stage.record, []

    def show(found):
        shown.append(found)
        record.put("timeline", found.as_dict())

    parts = {
        "kernels": lambda: kernels.measure(stage.gpu, stage.plan, print),
        "transfers": lambda: transfers.measure(stage.gpu, stage.plan, print),
        "timeline": lambda: timeline.measure(stage.gpu, stage.plan, print, show),
        "slowdown": lambda: slowdown.measure(stage.gpu, stage.plan, print),
        "sweep": lambda: sweep.measure(stage.gpu, stage.plan, print),
        "sweep beside a product": lambda: slowdown.sweep(stage.gpu, stage.plan, print),
        "ablation": lambda: ablation.measure(stage.gpu, stage.plan, print),
    }
    for name, rows in parts.items():
        record.measure(name, rows)
        record.put("targets", [metric.as_dict() for metric in check_targets(record.rows)])
    path = stage.path.with_suffix(".png")
    record.step("picture", lambda: _draw(record.rows, shown, path), here=False)


def _draw(rows, shown, path: Path):
    from bench.gpu.picture import draw

    problem = needs.lacks("matplotlib")
    if problem:
        raise Skip(problem)
    draw(rows, shown[0] if shown else None, path)
    return path.name
