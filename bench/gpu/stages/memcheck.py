"""Run a few chunks through every kernel under compute-sanitizer, a step for each of the tools."""

import re
import sys

from bench.gpu.few import RIGHT
from bench.gpu.gpu import Skip, WrongResultError, require_tools
from bench.gpu.processes import find_tool
from bench.gpu.processes import run as run_process

_REFUSED = re.compile(
    r"not supported|unable to|failed to initialize|no cuda-capable|unsupported|not permitted", re.IGNORECASE
)
_BAD = 86  # the exit status of a tool that reports an error
_OPTIONS = {"memcheck": ("--report-api-errors", "no")}  # CuPy reports failed calls


def run(stage):
    def action(tool, seconds):
        require_tools(stage.record.document["machine"])
        return sanitize(stage.device, tool, seconds)

    tools = stage.plan.tools
    for number, tool in enumerate(tools):
        seconds = min(stage.plan.tool_seconds, stage.record.left / (len(tools) - number))
        stage.record.step(tool, lambda tool=tool, limit=seconds: action(tool, limit), is_check=True, here=False)


def sanitize(device, tool, seconds):
    """Run a few chunks through every kernel under a tool, and return its summary.

    It is skipped if the tool is absent, refuses the device or takes too long.
    """
    program = find_tool("compute-sanitizer", "bin", "compute-sanitizer")
    if program is None:
        raise Skip("compute-sanitizer is neither on the PATH nor in a CUDA toolkit")
    command = [program, "--tool", tool, "--error-exitcode", str(_BAD), *_OPTIONS.get(tool, ())]
    code, output = run_process([*command, sys.executable, "-m", "bench.gpu.few", "check", device], seconds)
    lines = output.strip().splitlines() or ["it said nothing"]
    if code is None:
        raise Skip(f"not done after {seconds:.0f} s")
    summary = next((line.strip("= ") for line in reversed(lines) if "SUMMARY" in line), None)
    if code == 0 and RIGHT in output and summary is not None:
        return summary
    refusal = next((line.strip("= ") for line in lines if line.startswith("=") and _REFUSED.search(line)), None)
    if refusal is not None and code != _BAD:
        raise Skip(f"the tool refuses the device: {refusal}")
    print("\n".join(lines[-40:]))
    raise WrongResultError(f"{tool} ended with {code}: {summary or lines[-1]}")
