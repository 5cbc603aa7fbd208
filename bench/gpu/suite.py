"""What runs in processes of its own: the tests on the device, and a small run under compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from bench.gpu import needs
from bench.gpu.gpu import Skip, WrongResultError
from bench.gpu.small import RIGHT

ROOT = Path(__file__).resolve().parents[2]
_REFUSED = re.compile(
    r"not supported|unable to|failed to initialize|no cuda-capable|unsupported|not permitted", re.IGNORECASE
)
_BAD = 86  # what a tool is to exit with when it found something
_OPTIONS = {"memcheck": ("--report-api-errors", "no")}  # calls that fail are told by CuPy


def run_tests(device, seconds, *, say):
    """Run `tests/gpu` there. Gives its last line.

    Raises
    ------
    Skip, WrongResultError
        If that is not possible, or a test failed.
    """
    problem = needs.lacks("pytest", "hypothesis")
    if problem:
        raise Skip(problem)
    if not (ROOT / "tests" / "gpu").is_dir():
        raise Skip("this checkout has no tests/gpu")
    # Warnings are errors in this project, but here packages are of versions that nobody chose.
    warnings = ("default", "error::pytest.PytestUnhandledThreadExceptionWarning")
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--gpu", device, "-q", "-rs", "--no-header", "--tb=short"]
    command += ["-p", "no:cacheprovider", *(part for text in warnings for part in ("-W", text))]
    code, output = run(command, seconds)
    lines = output.strip().splitlines() or ["it said nothing"]
    if code is None:
        raise WrongResultError(f"not done after {seconds:g} s; it said last:\n" + "\n".join(lines[-15:]))
    if code != 0 or " passed" not in lines[-1]:
        say(output)
        raise WrongResultError(f"pytest ended with {code}: {lines[-1]}")
    for line in lines:
        if line.startswith("SKIPPED"):
            say(f"    {line}")
    return lines[-1].strip("= ")


def sanitize(device, tool, seconds, *, say):
    """Run a few chunks through every kernel under a tool of compute-sanitizer. Gives its summary.

    Raises
    ------
    Skip, WrongResultError
        If the tool is absent, refuses the device or takes too long, or if it found something.
    """
    found = find_sanitizer()
    if found is None:
        raise Skip("compute-sanitizer is neither on the PATH nor in a CUDA toolkit")
    command = [found, "--tool", tool, "--error-exitcode", str(_BAD), *_OPTIONS.get(tool, ())]
    code, output = run([*command, sys.executable, "-m", "bench.gpu.small", device], seconds)
    lines = output.strip().splitlines() or ["it said nothing"]
    if code is None:
        raise Skip(f"not done after {seconds:g} s")
    summary = next((line.strip("= ") for line in reversed(lines) if "SUMMARY" in line), None)
    if code == 0 and RIGHT in output and summary is not None:
        return summary
    refusal = next((line.strip("= ") for line in lines if line.startswith("=") and _REFUSED.search(line)), None)
    if refusal is not None and code != _BAD:
        raise Skip(f"the tool refuses the device: {refusal}")
    say("\n".join(lines[-40:]))
    raise WrongResultError(f"{tool} ended with {code}: {summary or lines[-1]}")


def find_sanitizer():
    """Where compute-sanitizer is, or None."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    places = [Path(home) / "bin" / "compute-sanitizer" for home in homes if home]
    places += [Path(home) / "compute-sanitizer" / "compute-sanitizer" for home in homes if home]
    there = (str(place) for place in places if os.access(place, os.X_OK) and place.is_file())
    return shutil.which("compute-sanitizer") or next(there, None)


def run(command, seconds):
    """Its exit status, or None if it took too long, and all it said."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # with all that it starts, so that it can be ended with all of that
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output
