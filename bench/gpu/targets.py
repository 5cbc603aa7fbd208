"""The targets of a GPU."""

from bench.gpu import slowdown, transfers
from bench.gpu.plan import MIB, size_of
from bench.metric import Metric

_LARGE = 256 * MIB


def check_targets(rows, large=_LARGE):
    """Return a `Metric` for every target, at each size from `large` on, and at `large` even if not measured."""
    sizes = sorted({row.size for row in rows if row.step in {"kernels", "transfers"} and row.size >= large} | {large})
    metrics = []
    for size in sizes:
        opened = _row(rows, "kernels", "open", size, bits=256, share="1")
        name = f"open kernel, AES-256, {size_of(size)}"
        metrics.append(Metric(name, opened and opened.gbps, "GB/s", 150, aim=250))
    for size in sizes:
        name = f"to_device(sealed) / page-locked copy, {size_of(size)}"
        metrics.append(Metric(name, _ratio(rows, size, transfers.SEALED, transfers.LOCKED), "x", 0.95))
    name = f"to_device(sealed) / bounce path, {size_of(large)}"
    metrics.append(Metric(name, _ratio(rows, large, transfers.SEALED, transfers.BOUNCE), "x", 10))
    beside = next((row for row in rows if row.settings.get("beside") == slowdown.beside(1 / 4)), None)
    value = beside and beside.settings["slowed"]
    metrics.append(Metric("matrix product beside a stream at share 1/4 / alone", value, "x", 1.1, at_most=True))
    return metrics


def _ratio(rows, size, mine, other):
    """Divide the speed of one path by the speed of another."""
    mine, other = (_row(rows, "transfers", path, size) for path in (mine, other))
    return other.times.median / mine.times.median if mine and other else None


def _row(rows, step, path, size, **settings):
    for row in rows:
        if (row.step, row.path, row.size) == (step, path, size) and settings.items() <= row.settings.items():
            return row
    return None
