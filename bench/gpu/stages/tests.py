"""Run the tests of `tests/gpu`, and the tests of `tests/kernels` that a GPU can run, a step for each file."""

import re
import sys

from bench.gpu.gpu import Skip, WrongResultError, require
from bench.gpu.processes import ROOT
from bench.gpu.processes import run as run_process

FOLDER = ROOT / "tests" / "gpu"
KERNELS = [ROOT / "tests" / "kernels" / f"test_cu_{name}.py" for name in ("chunks", "gather", "vectors")]


def run(stage):
    record = stage.record
    paths = {path.stem.split("_", 2)[2]: path for path in (*FOLDER.glob("test_*.py"), *KERNELS) if path.is_file()}
    for name, path in sorted(paths.items()):
        record.step(name, lambda path=path: run_tests(stage.device, path, record.left), is_check=True, here=False)
    if not record.document["steps"]:
        record.step("tests", _say_that_there_are_none, here=False)


def run_tests(device, path, seconds):
    """Run a file of tests on the device. Return the numbers of passed and skipped tests, and the reasons to skip."""
    require("pytest", "hypothesis")
    # Warnings are errors in this project, but here requirements.txt does not fix the versions of packages.
    warnings = ("default", "error::pytest.PytestUnhandledThreadExceptionWarning")
    command = [sys.executable, "-m", "pytest", str(path), "--gpu", device, "-q", "-rsfE", "--no-header", "--tb=short"]
    command += ["-p", "no:cacheprovider", *(part for text in warnings for part in ("-W", text))]
    code, output = run_process(command, seconds)
    lines = output.strip().splitlines() or ["it said nothing"]
    if code is None:
        print(output)
        raise WrongResultError(f"not done after {seconds:.0f} s; it said last: {lines[-1]}")
    # 5 is that of a file that skips itself, as without torch.
    if code not in {0, 5} or not re.search(r"\d+ (passed|skipped)", lines[-1]):
        print(output)
        failed = [line.split(" - ")[0].split("::")[-1] for line in lines if line.startswith(("FAILED", "ERROR "))]
        raise WrongResultError(f"pytest ended with {code}: {lines[-1].strip('= ')}; {', '.join(failed)}".strip("; "))
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|skipped)", lines[-1])}
    reasons = sorted({line.split(": ", 1)[-1] for line in lines if line.startswith("SKIPPED")})
    if not counts.get("passed"):
        raise Skip("; ".join(reasons))
    return counts | ({"reasons": reasons} if reasons else {})


def _say_that_there_are_none():
    raise Skip("this checkout has no tests/gpu")
