"""The stages of `make gpu` run through on the emulator from only the kit, without a network."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from bench.gpu import decide
from bench.gpu.stages import STAGES
from emulator.conftest import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]  # the kit takes minutes; tests/benchmarks have stand-ins
SITE = ROOT / "tests" / "emulator" / "site"
SECONDS = 300
NEED_MORE = {"memcheck", "loop", "profile"}  # compute-sanitizer, torch and ncu: they say so
DECIDED = {"first": {"threads", "share"}, "variants": {"kernel", "carve-out"}, "figures": {"lead"}}  # without torch
NOT_EMULATED = {"instruction rates"}  # kernels of single PTX instructions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Gather the kit for this Python as `make gpu-kit` does, whose NVRTC knows all instructions of the candidates."""
    folder = tmp_path_factory.mktemp("kit") / "kit"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [ROOT / ".venv" / "bin" / "python", "-m", "bench.gpu.kit", folder, "--python", version]
    subprocess.run(command, check=True, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Make an environment without pip that has what a machine must have, NumPy and CuPy, and nothing else."""
    bare = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    here, there = (Path(sysconfig.get_path("purelib", vars=each)) for each in (None, {"base": str(bare)}))
    for pattern in ("numpy*", "cupy*", "nvidia*", "cuda*"):
        for path in here.glob(pattern):
            if not path.name.startswith("nvidia_ml_py"):
                (there / path.name).symlink_to(path)
    return bare / "bin/python"


def start(python, folder, out, *stages):
    """Run stages by the kit, in a namespace without a network where one can be had."""
    apart = ["unshare", "--net"] if os.geteuid() == 0 and shutil.which("unshare") else []
    paths = [str(path) for path in (SITE, ROOT, ROOT / "tests")]
    return subprocess.Popen(
        [*apart, "bash", str(folder / "run.sh"), *stages],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHON": str(python), "OUT": str(out)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_runs_through(python, folder, tmp_path, stage):
    process = start(python, folder, tmp_path, stage)
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output + errors[-4000:]
    (line,) = output.splitlines()
    assert len(line) <= 1500
    (path,) = tmp_path.glob("*-gpu-*.json")
    document = json.loads(path.read_text())
    outcomes = {step["name"]: (step["outcome"], step["why"]) for step in document["steps"]}
    failed = {name for name, (outcome, _) in outcomes.items() if outcome == "FAILED"}
    assert failed <= NOT_EMULATED, outcomes
    assert "done" in {outcome for outcome, _ in outcomes.values()} or stage in NEED_MORE, outcomes
    decided = json.loads((tmp_path / decide.FILE).read_text())["parameters"]
    assert {name for name, each in decided.items() if each["measured"]} == DECIDED.get(stage, set())


def test_a_stage_that_is_killed_leaves_what_it_found(python, folder, tmp_path):
    process = start(python, folder, tmp_path, "figures")
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
