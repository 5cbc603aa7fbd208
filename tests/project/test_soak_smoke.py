"""The soak of `make soak` for a few seconds: it runs, it counts, and it would tell."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fastrack

pytest.importorskip("torch")

from helpers.cases import each
from soak import gauges, gpu
from soak.worker import KEYS, Violation, Worker, without_folders

TESTS = Path(__file__).parents[1]


@pytest.mark.nightly
def test_a_few_seconds_lose_nothing(tmp_path):
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "soak", "--seconds", "3", "--light", "--seed", "5", "--json", str(out)]
    options = {"env": os.environ | {"PYTHONPATH": str(TESTS)}, "cwd": TESTS.parent, "timeout": 100}
    done = subprocess.run(command, **options, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["violations"] == []
    assert figures["wrong"] == 0
    assert figures["transfers"] > 20
    assert figures["bytes"] > 1 << 20
    assert len(figures["faults"]) > 3
    assert all(fault["injected"] == fault["caught"] for fault in figures["faults"].values())
    assert len(figures["gauges"]) == 2
    assert str(tmp_path) not in out.read_text()


def worker(tmp_path, job, seconds=0.05):
    made = Worker(0, "test", {job: 1}, time.monotonic() + seconds, tmp_path)
    made.run()
    return made


def test_wrong_bytes_are_told(tmp_path):
    done = worker(tmp_path, lambda worker: worker.check(np.zeros(3), np.ones(3)))
    assert done.wrong == 1
    assert "wrong bytes" in done.violations[0]


def test_a_fault_that_goes_unnoticed_or_is_another_than_the_documented_one_is_told(tmp_path):
    done = worker(tmp_path, lambda worker: worker.fault("kind", lambda: None, ValueError))
    assert (done.injected["kind"], done.caught["kind"]) == (1, 0)
    assert "nothing was raised" in done.violations[0]
    done = worker(tmp_path, lambda worker: worker.fault("kind", lambda: 1 / 0, ValueError))
    assert "ZeroDivisionError" in done.violations[0]


@each(
    ("failed", "error", "counted"),
    [
        *[(None, None, (0, 0)), ("upload", fastrack.DeviceError("upload"), (1, 1))],
        *[("done", None, (0, 0)), ("done", fastrack.DeviceError("done"), (1, 1))],
    ],
)
def test_a_call_that_failed_is_counted_as_the_driver_says(tmp_path, failed, error, counted):
    done = worker(tmp_path, lambda worker: None, seconds=0)
    gpu.require_told(done, failed, error)
    assert (done.injected.total(), done.caught.total()) == counted


def test_a_failure_of_the_driver_that_is_not_told_or_of_its_own_is_told(tmp_path):
    done = worker(tmp_path, lambda worker: gpu.require_told(worker, "upload", None))
    assert (done.injected.total(), done.caught.total()) == (1, 0)
    assert "upload of the driver failed, and nothing was raised" in done.violations[0]
    done = worker(tmp_path, lambda worker: gpu.require_told(worker, None, fastrack.DeviceError("of its own")))
    assert "no call of the driver was made to fail" in done.violations[0]


def test_a_file_that_is_left_behind_is_told_and_without_folders(tmp_path):
    done = worker(tmp_path, lambda worker: (worker.folder / "left").touch())
    assert "left in its folder" in done.violations[0]
    assert str(TESTS) not in done.violations[0]
    assert str(tmp_path) not in done.violations[0]
    assert 'File "worker.py", line' in done.violations[0]
    assert without_folders("'/a b/c/d.py' or /e/f.py: 3 / 4, a/b") == "'d.py' or f.py: 3 / 4, a/b"


def test_the_same_seed_makes_the_same_choices(tmp_path):
    def sizes():
        made = Worker(0, "7-0-0", {}, 0, tmp_path)
        return [made.array().nbytes for _ in range(20)]

    assert sizes() == sizes()


@pytest.mark.slow
def test_a_file_that_stays_open_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(gauges, "PATIENCE", 0)
    before = gauges.read()
    with (tmp_path / "open").open("wb"):
        _, problems = gauges.settled(before)
    assert any(problem.startswith("files:") for problem in problems)


def test_keys_of_the_soak_are_of_both_sizes():
    assert {key.bits for key in KEYS} == {128, 256}
    assert issubclass(Violation, AssertionError)
    assert fastrack.KeyRing(KEYS)
