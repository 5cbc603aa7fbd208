"""Sum up a stage in one line of JSON: how it ended, what failed, and its key figures, as many as fit."""

import json
import re

from bench.gpu.plan import MIB, size_of
from bench.gpu.record import DONE, FAILED, SKIPPED

LIMIT = 1500  # characters
_KEY_SIZE = 256 * MIB
_KEY_METRIC = re.compile(r"Throughput|Duration|SM Frequency|Occupancy|Issue|Eligible|Stall|Bank|Config|Registers")
_WHY = 160  # characters of a reason
_MICROSECONDS = ("latency", "single kernels")


def line(document, name):
    """Return the line. `name` is the name of the document, where everything is."""
    told = {"stage": document["stage"], "outcome": document["outcome"], "seconds": round(document["seconds"], 1)}
    told |= {"why": document["why"][:_WHY]} if document["why"] else {}
    told["file"] = name
    for outcome in (FAILED, SKIPPED):
        whys = {step["name"]: step["why"][:_WHY] for step in document["steps"] if step["outcome"] == outcome}
        for step, why in whys.items():
            _add(told, outcome, step, why)
    left_out = sum(not _add(told, *figure) for figure in _figures(document))
    if left_out:
        told["left out"] = left_out
    return _dump(told)


def _figures(document):
    """Yield figures as group, name and value: the important ones first."""
    for target in document["targets"]:
        if target["value"] is not None:
            yield "targets", target["name"], _short(target["value"])
    rows = document["rows"]
    for row in rows:
        if row["step"] == "profile":
            if _KEY_METRIC.search(row["metric"]):
                yield "profile", row["metric"], f"{row['value']} {row['unit']}".strip()
        elif _is_key(row, {each["size"] for each in rows if each["step"] == row["step"]}):
            yield _group(row), _name(row), _value(row)
    measured = {row["step"] for row in rows}
    if document["stage"] == "variants":
        return
    for step in document["steps"]:
        if step["outcome"] == DONE and step["found"] is not None and step["name"] not in measured:
            yield "found", step["name"], _compact(step["found"])


def _is_key(row, sizes):
    """Return whether a row is told: of each step the few that say most."""
    size = _KEY_SIZE if _KEY_SIZE in sizes else max(sizes)
    match row["step"]:
        case "latency":
            return row["path"] == "to_device, sealed"
        case "kernels":
            return row["size"] == size and row.get("share") == "1"
        case "link" | "variants" | "transfers" | "ablation":
            return row["size"] == size
    return row["step"] != "sweep"


def _group(row):
    if row["step"] == "variants":
        return f"{row['variant']}, split {row['split']}, GB/s"
    if row["step"] in _MICROSECONDS:
        return f"{row['step']}, us"
    if row["step"] == "loop":
        return "loop, ms"
    return f"{row['step']}, x and GB/s" if "slowed" in row else f"{row['step']}, GB/s"


def _value(row):
    if "slowed" in row:
        return [_short(row["slowed"]), _short(row["beside_gbps"])]
    median = row["seconds"]["median"]
    if row["step"] in _MICROSECONDS:
        return _short(1e6 * median)
    return _short(1e3 * median if row["step"] == "loop" else row["gbps"])


def _name(row):
    if row["step"] == "variants":
        return f"{row['path']} {row['bits']}"
    known = {"step", "path", "size", "seconds", "gbps", "slowed", "beside", "beside_gbps"}
    settings = [str(row["beside"])] if "beside" in row else [row["path"], size_of(row["size"])]
    return " ".join(settings + [f"{key} {value}" for key, value in row.items() if key not in known])


def _compact(found):
    """Leave out what is not known, and digits that say nothing."""
    if isinstance(found, dict):
        values = list(found.values())
        if len(values) > 1 and isinstance(values[0], dict) and all(value == values[0] for value in values):
            return {"each": values[0]}
        return {key: _compact(value) for key, value in found.items() if value is not None}
    return _short(found) if isinstance(found, float) else found


def _short(value):
    return float(f"{value:.4g}")


def _add(told, group, name, value):
    """Add a figure if the line stays short enough; some room is left for the number of those that do not fit."""
    before = dict(told.get(group, {}))
    told[group] = {**before, name: value}
    if len(_dump(told)) <= LIMIT - 20:
        return True
    told[group] = before
    if not before:
        del told[group]
    return False


def _dump(told):
    return json.dumps(told, separators=(",", ":"))
