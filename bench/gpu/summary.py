"""Sum up a stage in one line of JSON: how it ended, what failed, and the key figures that fit."""

import json
import re

from bench.gpu.plan import MIB, size_of
from bench.gpu.record import DONE, FAILED, SKIPPED

LIMIT = 1500  # characters
_KEY_SIZE = 256 * MIB
_KEY_METRIC = re.compile(r"Throughput|Duration|SM Frequency|Occupancy|Issue|Eligible|Stall|Bank|Config|Registers")
_WHY = 160  # characters of a reason
_UNITS = {"latency": ("us", 1e6), "loop": ("ms", 1e3)}  # of steps with times in place of GB/s
_TOLD = {"step", "path", "size", "seconds", "gbps", "slowed", "beside", "beside_gbps"}


def line(document, name):
    """Return the line. `name` is the name of the document, where everything is."""
    told = {"stage": document["stage"], "outcome": document["outcome"], "seconds": round(document["seconds"], 1)}
    told |= {"why": document["why"][:_WHY]} if document["why"] else {}
    told["file"] = name
    left_out = sum(not _add(told, *figure) for figure in _figures(document))
    return _dump(told | ({"left out": left_out} if left_out else {}))


def _figures(document):
    """Yield reasons and figures as group, name and value: the important ones first."""
    steps, rows = document["steps"], document["rows"]
    for outcome in (FAILED, SKIPPED):
        yield from ((outcome, step["name"], step["why"][:_WHY]) for step in steps if step["outcome"] == outcome)
    for target in document["targets"]:
        if target["value"] is not None:
            yield "targets", target["name"], _short(target["value"])
    sizes = {}
    for row in rows:
        sizes.setdefault(row["step"], set()).add(row.get("size"))
    yield from (_figure(row) for row in rows if _is_key(row, sizes[row["step"]]))
    for step in steps if document["stage"] != "variants" else ():
        if step["outcome"] == DONE and step["found"] is not None and step["name"] not in sizes:
            yield "found", step["name"], _compact(step["found"])


def _figure(row):
    step = row["step"]
    if step == "profile":
        return step, row["metric"], f"{row['value']} {row['unit']}".strip()
    if "slowed" in row:
        return f"{step}, x and GB/s", row["beside"], [_short(row["slowed"]), _short(row["beside_gbps"])]
    unit, factor = _UNITS.get(step, ("GB/s", None))
    value = _short(row["gbps"] if factor is None else factor * row["seconds"]["median"])
    if step == "variants":
        return f"{row['variant']}, split {row['split']}, {unit}", f"{row['path']} {row['bits']}", value
    settings = [f"{key} {value}" for key, value in row.items() if key not in _TOLD]
    return f"{step}, {unit}", " ".join([row["path"], size_of(row["size"]), *settings]), value


def _is_key(row, sizes):
    """Return whether a row is a key figure: a few of each step."""
    match row["step"]:
        case "profile":
            return _KEY_METRIC.search(row["metric"])
        case "latency":
            return row["path"] == "to_device, sealed"
        case "kernels" if row.get("share") != "1":
            return False
        case "kernels" | "link" | "variants" | "transfers" | "ablation":
            return row["size"] == (_KEY_SIZE if _KEY_SIZE in sizes else max(sizes))
    return row["step"] != "sweep"


def _compact(found):
    """Leave out unknown values, and meaningless digits."""
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
    before = told.get(group, {})
    if len(_dump(told | {group: before | {name: value}})) > LIMIT - 20:
        return False
    told[group] = before | {name: value}
    return True


def _dump(told):
    return json.dumps(told, separators=(",", ":"))
