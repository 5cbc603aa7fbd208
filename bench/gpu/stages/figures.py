"""Measure all figures: transfers, timeline, sweeps, slowdown, lanes, kernels and ablation, and a picture of them."""

from functools import partial

from bench.gpu.gpu import require
from bench.gpu.targets import check_targets


def run(stage):
    from bench.gpu import ablation, kernels, slowdown, sweep, timeline, transfers

    record, shown = stage.record, []

    def show(found):
        shown.append(found)
        record.put("timeline", found.as_dict())

    parts = {
        "transfers": transfers.measure,
        "timeline": partial(timeline.measure, show=show),
        "sweep": sweep.measure,
        "slowdown": slowdown.measure,
        "sweep beside a product": slowdown.sweep,
        "lanes": slowdown.lanes,
        "kernels": kernels.measure,
        "ablation": ablation.measure,
    }
    for name, measure in parts.items():
        record.measure(name, lambda measure=measure: measure(stage.gpu, stage.plan))
        record.put("targets", [metric.as_dict() for metric in check_targets(record.rows)])
    path = stage.path.with_suffix(".png")
    record.step("picture", lambda: _draw(record.rows, shown, path), here=False)


def _draw(rows, shown, path):
    from bench.gpu.picture import draw

    require("matplotlib")
    draw(rows, shown[0] if shown else None, path)
    return path.name
