"""Profile the kernel that opens by Nsight Compute, to see its bounds."""

from __future__ import annotations

import csv
import re
import sys
from functools import partial
from typing import NamedTuple

from bench.gpu.gpu import Skip, require_tools
from bench.gpu.processes import find_tool
from bench.gpu.processes import run as run_process

KERNEL = "open_256"
SECTIONS = ["SpeedOfLight", "Occupancy", "SchedulerStats", "WarpStateStats", "ComputeWorkloadAnalysis"]
SECTIONS += ["MemoryWorkloadAnalysis", "LaunchStats"]
_SKIP = 4  # launches that fill caches first
_COLUMNS = ("Section Name", "Metric Name", "Metric Unit", "Metric Value")
_REFUSED = re.compile(r"ERR_NVGPUCTRPERM|Failed to|not supported|No kernels were profiled", re.IGNORECASE)


class Metric(NamedTuple):
    """Hold one line of the details page, as a row of the document."""

    section: str
    metric: str
    unit: str
    value: str

    def as_dict(self):
        return {"step": "profile", **self._asdict()}


def run(stage):
    from bench.gpu.decide import kernel, read_rows  # late: only the stage misses NumPy
    from bench.gpu.stages.variants import TREE

    def action(name, report):
        require_tools(stage.record.document["machine"])
        metrics, advice = profile(stage.device, name, report, stage.record.left)
        for metric in metrics:
            stage.record.add(metric._replace(section=f"{name}: {metric.section}"))
        return {"advice": advice}

    winner = kernel(read_rows(stage.path.parent)[0])[0] or TREE
    for name in dict.fromkeys((TREE, winner)):
        report = stage.path.with_suffix(".ncu-rep" if name == TREE else f".{name}.ncu-rep")
        stage.record.step(f"{KERNEL} of {name}", partial(action, name, report), here=False)


def profile(device, variant, report, seconds):
    """Profile one launch of a variant into `report`, and return its metrics and the tool's advice."""
    tool = find_tool("ncu", "bin")
    if tool is None:
        raise Skip("ncu is neither on the PATH nor in a CUDA toolkit")
    command = [tool, "--clock-control", "none", "-k", f"regex:{KERNEL}", "--launch-skip", str(_SKIP)]
    command += ["--launch-count", "1", *(part for section in SECTIONS for part in ("--section", section))]
    command += ["--export", str(report), "--force-overwrite"]
    command += [sys.executable, "-m", "bench.gpu.few", "open", device, variant]
    code, output = run_process(command, seconds)
    lines = output.strip().splitlines() or ["it said nothing"]
    if code is None:
        raise TimeoutError(f"not done after {seconds:.0f} s; it said last: {lines[-1]}")
    if not report.exists():
        print(output)
        refusal = next((line.strip("= ") for line in lines if _REFUSED.search(line)), lines[-1])
        raise Skip(f"ncu made no report: {refusal}")
    details = ["--page", "details", "--print-details", "all", "--csv"]
    _, page = run_process([tool, "--import", str(report), *details], 60)
    return read_details(page)


def read_details(page):
    """Return metrics and advice of a details page in CSV, without the names of machines and programs."""
    lines = page.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    metrics, advice = [], []
    for row in csv.DictReader(lines[start:]):
        if row.get("Metric Name"):
            metrics.append(Metric(*(row.get(column) or "" for column in _COLUMNS)))
        if row.get("Rule Description"):
            advice.append({"rule": row.get("Rule Name") or "", "text": row["Rule Description"]})
    if not metrics:
        raise ValueError(f"expected a table of metrics from ncu, got {lines[-1] if lines else 'nothing'!r}")
    return metrics, advice
