"""``python -m bench.gpu.decide FOLDER``: choose each parameter of transfers by the results there, and say why.

Takes the newest document of each stage for the newest GPU. Writes decision.json beside them, and changes nothing else.
"""

import json
import re
import sys
from fractions import Fraction
from math import exp, log
from pathlib import Path
from statistics import fmean
from textwrap import wrap

from bench.gpu.channels import DEFAULTS
from bench.gpu.link import FILL, UP
from bench.gpu.plan import size_of
from bench.gpu.slowdown import ALONE
from bench.gpu.stages.variants import TREE

FILE = "decision.json"
GAIN, CLOSE, SPARE, COST, IDLE = 1.03, 0.98, 1.1, 1.01, 0.9  # of the rules below
ENOUGH, NARROW = 1.2, 58


def read_rows(folder):
    """Return the rows of the newest document of each stage for the GPU of the newest, and the names of these files."""
    found = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*-gpu-*.json"))]
    found.sort(key=lambda each: each[1]["date"])
    gpu = found[-1][1]["machine"]["gpu"]["name"] if found else None
    newest = {each["stage"]: (name, each) for name, each in found if each["machine"]["gpu"]["name"] == gpu}
    return [row for _, each in newest.values() for row in each["rows"]], [name for name, _ in newest.values()]


def kernel(rows):
    """Choose the fastest kernel by 3 % or more, by its best split of shared memory."""
    speeds = {}
    for (variant, _), speed in _variants(rows).items():
        speeds[variant] = max(speed, speeds.get(variant, 0))
    if TREE not in speeds:
        return None, speeds
    best = max(speeds, key=speeds.get)
    return best if _reaches(speeds[best], GAIN * speeds[TREE]) else TREE, speeds


def carveout(rows):
    """Choose the fastest split of shared memory, or 58 % if that is within 1 %."""
    chosen, variants = kernel(rows)[0], _variants(rows)
    speeds = {split: speed for (variant, split), speed in variants.items() if variant == chosen}
    best = max(speeds, key=speeds.get, default=None)
    is_close = best is not None and _reaches(speeds.get(NARROW, 0), 0.99 * speeds[best])
    return NARROW if is_close else best, speeds


def threads(rows):
    """Choose the fewest threads that fill staging buffers at 1.1 times the speed of the link, or the fastest."""
    speeds, link = {row["threads"]: row["gbps"] for row in _of(rows, "link", FILL)}, _link(rows)
    best = max(speeds, key=speeds.get, default=None) if link else None
    return _least(speeds, SPARE, link) or best, speeds | {"link": link}


def share(rows):
    """Choose the smallest share at which the kernel opens at 1.2 times the speed of the link, or all."""
    opened = [row for row in _of(rows, "kernels", "open") if row["bits"] == 256]
    size = max((row["size"] for row in opened), default=0)
    speeds, link = {row["share"]: row["gbps"] for row in opened if row["size"] == size}, _link(rows)
    return _least(speeds, ENOUGH, link, Fraction) or ("1" if speeds and link else None), speeds | {"link": link}


def slab(rows):
    """Choose the smallest slab within 2 % of the best, at its best depth, beside the product."""
    speeds = {}
    for (size, _), speed in _grid(rows).items():
        speeds[size] = max(speed, speeds.get(size, 0))
    return _least(speeds, CLOSE, max(speeds.values(), default=0)), speeds


def depth(rows):
    """Choose the fewest buffers of that slab within 2 % of its best, beside the product."""
    chosen = slab(rows)[0]
    speeds = {count: speed for (size, count), speed in _grid(rows).items() if size == chosen}
    return _least(speeds, CLOSE, max(speeds.values(), default=0)), speeds


def lead(rows):
    """Choose the first slab with the best median of the small transfers that costs the largest at most 1 %."""
    times = {}
    for row in rows:
        if row["step"] == "sweep" and row["varied"] == "lead":
            times.setdefault(row["size"], {})[row["lead"]] = row["seconds"]["median"]
    if len(times) < 2:
        return None, {}
    *small, large = (times[size] for size in sorted(times))
    # A first slab that is longer than a transfer is as long as the transfer.
    means = {lead: _mean([each[min(lead, max(each))] for each in small]) for lead in sorted(large)}
    allowed = {lead: mean for lead, mean in means.items() if _reaches(COST * min(large.values()), large[lead])}
    return min(allowed, key=allowed.get), {f"{size_of(each)}, us": 1e6 * mean for each, mean in means.items()}


def lanes(rows):
    """Choose the fewest lanes that leave an idle stream 90 % of its speed beside a busy one."""
    speeds = {row["lanes"]: row["gbps"] for row in rows if row["step"] == "lanes"}
    alone = speeds.pop(ALONE, 0)
    return (_least(speeds, IDLE, alone) or max(speeds, default=None)) if alone else None, speeds | {"alone": alone}


# Each parameter: its rule, its present value, and the line that has it.
PARAMETERS = {
    "kernel": (kernel, TREE, "kernels/, by the edits of bench/gpu/candidates/"),
    "carve-out": (carveout, 100, "_MAX_SHARED in fastrack/_devices/cuda/nvrtc.py"),
    "threads": (threads, DEFAULTS["threads"], "MAX_COPIERS in fastrack/_devices/cuda/device.py"),
    "share": (share, "1", "share= of CudaDevice in fastrack/_devices/cuda/device.py"),
    "slab": (slab, DEFAULTS["slab"], "max_slab_size in fastrack/_devices/cuda/device.py"),
    "depth": (depth, DEFAULTS["depth"], "DEPTH in fastrack/_transfer/channel.py"),
    "lead": (lead, DEFAULTS["lead"], "first_slab_size in fastrack/_devices/cuda/device.py"),
    "lanes": (lanes, DEFAULTS["lanes"], "LANES in fastrack/_devices/cuda/streams.py"),
}


def decide(rows):
    """Return the decision on each parameter, by its name. What was not measured stays as it is."""
    decisions = {}
    for name, (rule, present, line) in PARAMETERS.items():
        chosen, figures = rule(rows)
        told = {str(value): float(f"{figure:.4g}") for value, figure in figures.items()}
        value = present if chosen is None else chosen
        decisions[name] = {"present": present, "value": value, "measured": chosen is not None, "change": line}
        decisions[name] |= {"rule": rule.__doc__.removeprefix("Choose "), "figures": told}
    return decisions


def table(decisions):
    """Return the decisions as lines of at most 80 columns, and the lines of the code to change."""
    lines = [f"{'parameter':<10} {'present':>9} {'chosen':>13}  why"]
    for name, each in decisions.items():
        value = _told(name, each["value"]) if each["measured"] else "not measured"
        figures = ", ".join(f"{_told(name, key)}: {figure:g}" for key, figure in each["figures"].items())
        why = wrap(f"{each['rule']} {figures}" if each["measured"] else each["rule"], 44)
        lines.append(f"{name:<10} {_told(name, each['present']):>9} {value:>13}  {why[0]}")
        lines += [f"{'':36}{line}" for line in why[1:]]
    changes = {name: each for name, each in decisions.items() if each["value"] != each["present"]}
    lines.append("To change:" if changes else "Nothing is to be changed.")
    for name, each in changes.items():
        lines += wrap(f"  {name} {each['value']}: {each['change']}", 80, subsequent_indent="    ")
    return "\n".join(lines)


def write(folder):
    """Write the decisions by the results in a folder, and return their table."""
    rows, names = read_rows(folder)
    decisions = decide(rows)
    text = json.dumps({"from": names, "parameters": decisions}, indent=1)
    (folder / FILE).write_text(f"{text}\n", encoding="utf-8")
    return table(decisions)


def _variants(rows):
    """Return the geometric mean of a variant's speeds at all sizes, by its name and split, if it has all."""
    opened = [row for row in _of(rows, "variants", "open") if row["bits"] == 256]
    speeds = {}
    for row in opened:
        speeds.setdefault((row["variant"], row["split"]), {})[row["size"]] = row["gbps"]
    sizes = {row["size"] for row in opened}
    return {key: _mean(found.values()) for key, found in speeds.items() if found.keys() == sizes}


def _grid(rows):
    found = ((re.fullmatch(r"slab (\d+), depth (\d+)", row.get("beside", "")), row) for row in rows)
    return {(int(match[1]), int(match[2])): row["beside_gbps"] for match, row in found if match}


def _of(rows, step, path):
    return [row for row in rows if (row["step"], row.get("path")) == (step, path)]


def _link(rows):
    return max(((row["size"], row["gbps"]) for row in _of(rows, "link", UP)), default=(0, 0))[1]


def _least(speeds, factor, reference, order=int):
    """Return the smallest key whose speed is at least that factor of a reference, or None."""
    enough = (key for key, speed in speeds.items() if reference and _reaches(speed, factor * reference))
    return min(enough, key=order, default=None)


def _reaches(value, least):
    return value >= least * (1 - 1e-9)  # the last digit decides nothing


def _mean(values):
    return exp(fmean(map(log, values)))


def _told(name, value):
    is_size = name in {"slab", "lead"} and str(value).isdigit()
    return size_of(int(value)) if is_size else str(value)


def main(argv):
    print(write(Path(argv[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
