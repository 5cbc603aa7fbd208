"""Trainers of Transformers and Lightning that get SIGTERM in the middle: a sealed checkpoint, and no step is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import preempted_runs, trainer_runs

import fastrack

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

KEY = fastrack.Key.from_bytes(preempted_runs.KEY)


def run(trainer, folder, mode, processes):
    """Train, and return what each rank tells."""
    folder.mkdir(exist_ok=True)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, "-W", "ignore", *ranks, preempted_runs.__file__, trainer, str(folder), mode]
    path = os.pathsep.join([str(Path(preempted_runs.__file__).parents[1]), *sys.path])
    environment = {**os.environ, **trainer_runs.ENVIRONMENT, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads((folder / f"result-{mode}-{rank}.json").read_text()) for rank in range(processes)]


def saved_in(folder):
    """Return the files of a checkpoint with tensors."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in {".json", ".jinja", ".txt"}]
    return [path for path in files if path.stat().st_size > 1000]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_a_run_that_was_preempted_ends_with_the_bits_of_one_that_was_not(trainer, processes, tmp_path):
    pytest.importorskip(trainer)
    whole = run(trainer, tmp_path / "whole", "whole", processes)
    cut = run(trainer, tmp_path / "cut", "cut", processes)
    expected_status = 143 if trainer == "lightning" else 0  # `train` of transformers returns
    assert [(rank["steps"], rank["status"]) for rank in cut] == [(preempted_runs.CUT, expected_status)] * processes
    files = saved_in(tmp_path / "cut")
    assert files
    for path in files:
        fastrack.verify_file(path, KEY)
    everything = b"".join(
        path.read_bytes() for path in (tmp_path / "cut").rglob("*") if "result-" not in path.name and path.is_file()
    )
    needles = [bytes.fromhex(each) for rank in cut for kind in rank["needles"].values() for each in kind]
    assert len(needles) > 50
    assert not [needle for needle in needles if needle in everything]
    resumed = run(trainer, tmp_path / "cut", "resume", processes)
    assert [rank["steps"] for rank in resumed] == [preempted_runs.STEPS] * processes
    assert [rank["digest"] for rank in resumed] == [rank["digest"] for rank in whole]
    assert [rank["digest"] for rank in cut] != [rank["digest"] for rank in whole]
