"""The stages of `make gpu` run through on the emulator from the kit alone, without a network."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from bench.gpu import kit
from bench.gpu.stages import STAGES
from emulator.conftest import ROOT

SITE = ROOT / "tests" / "emulator" / "site"
SECONDS = 300
NEED_MORE = {"memcheck", "loop", "profile"}  # compute-sanitizer, torch and ncu: they say so
LONG = {"first", "variants"}  # tests/benchmarks runs the one on a stand-in, tests/kernels the kernels of the other
NOT_EMULATED = {"instruction rates"}  # kernels of single PTX instructions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Gather the kit for this Python."""
    folder = tmp_path_factory.mktemp("kit") / "kit"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert kit.main([str(folder), "--python", version]) == 0
    return folder


def start(folder, out, *stages):
    """Run stages by the kit, in a namespace without a network where one can be had."""
    apart = ["unshare", "--net"] if os.geteuid() == 0 and shutil.which("unshare") else []
    paths = [str(path) for path in (SITE, ROOT, ROOT / "tests")]
    return subprocess.Popen(
        [*apart, "bash", str(folder / "run.sh"), *stages],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHON": sys.executable, "OUT": str(out)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# The tests of tests/gpu run on the emulator by themselves, on both devices.
@pytest.mark.parametrize(
    "stage",
    [pytest.param(stage, marks=[pytest.mark.nightly] * (stage in LONG)) for stage in STAGES if stage != "tests"],
)
def test_a_stage_runs_through(folder, tmp_path, stage):
    process = start(folder, tmp_path, stage)
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output + errors[-4000:]
    (line,) = output.splitlines()
    assert len(line) <= 1500
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    outcomes = {step["name"]: (step["outcome"], step["why"]) for step in document["steps"]}
    failed = {name for name, (outcome, _) in outcomes.items() if outcome == "FAILED"}
    assert failed <= NOT_EMULATED, outcomes
    assert "done" in {outcome for outcome, _ in outcomes.values()} or stage in NEED_MORE, outcomes


def test_a_stage_that_is_killed_leaves_what_it_found(folder, tmp_path):
    process = start(folder, tmp_path, "figures")
    deadline = time.monotonic() + SECONDS
    while True:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        rows = [json.loads(path.read_text())["rows"] for path in tmp_path.glob("*.json")]
        if rows and rows[0]:
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["rows"][: len(rows[0])] == rows[0]
