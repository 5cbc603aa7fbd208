"""The suite for GPUs where there is none: its steps, tables, documents and picture, on a stand-in of host memory."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from helpers import fake_cuda, host_cupy
from helpers.stand_in_gpu import StandIn, StandInProduct

from bench.gpu import (
    ablation,
    command,
    host_data,
    kernels,
    known,
    needs,
    plan,
    slowdown,
    suite,
    sweep,
    timeline,
    transfers,
)
from bench.gpu.gpu import Gpu, Skip, WrongResultError
from bench.gpu.report import Outcome, Report, table
from bench.gpu.targets import Target, targets
from bench.gpu.timeline import Timeline
from bench.gpu.timing import Row, Times, interleave
from fastrack import arrays
from fastrack.cobblestone import CHUNK
from fastrack.errors import DeviceError

ROOT = Path(__file__).parents[1]
TINY = plan.Plan(
    kernel_sizes=(CHUNK, 3 * CHUNK + 5),
    kernel_shares=(1, 1 / 2),
    transfer_sizes=(1000, 20 * CHUNK),
    ablation_sizes=(1000, 20 * CHUNK),
    rounds=3,
    spread=8 * CHUNK,
    group=CHUNK,
    sweep_size=20 * CHUNK,
    sweep_slabs=(2 * CHUNK, 4 * CHUNK),
    sweep_depths=(2, 3),
    sweep_leads=(CHUNK, 2 * CHUNK),
    sweep_shares=(1, 1 / 4),
    timeline_size=400 * CHUNK,
    matrix=64,
    products=3,
    stream_size=20 * CHUNK,
    stream_shares=(1, 1 / 4),
    suite_seconds=0,
    tools=(),
)


@pytest.fixture
def gpu(monkeypatch):
    fake_cuda.install(monkeypatch)
    stand_in = StandIn()
    yield stand_in
    assert stand_in.driver.violations == []


@pytest.fixture
def session(gpu, tmp_path):
    options = argparse.Namespace(device="cuda:0", quick=True, out=tmp_path / "out")
    said = []
    session = command.Session(gpu, TINY, options, say=said.append, watch=False)
    session.said = said
    return session


def outcome(session, name):
    (found,) = [each for each in session.report.outcomes if each.name == name]
    return found.outcome, found.why


# All of it.


def test_a_whole_run_leaves_a_document_and_a_picture(session):
    assert session.run() == 0
    assert {each.outcome for each in session.report.outcomes if each.name != "tests on the device"} == {"done"}
    assert outcome(session, "tests on the device") == ("skipped", "left out by --quick")
    document = json.loads(session.report.path.read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-stand-in-gpu-host-memory-\d+cores\.json", session.report.path.name)
    assert (document["version"], document["suite"], document["quick"]) == (1, "gpu", True)
    assert document["machine"]["gpu"]["multiprocessors"] == 4
    steps = {"kernels", "transfers", "ablation", "timeline", "slowdown", "sweep"}
    assert {row["step"] for row in document["rows"]} == steps
    for row in document["rows"]:
        seconds = row["seconds"]
        assert 0 < seconds["lower"] <= seconds["median"] <= seconds["upper"]
        assert row["gbps"] > 0
    assert len(document["timeline"]["slabs"]) == 3
    assert session.report.path.with_suffix(".png").stat().st_size > 10_000
    assert list(session.report.path.parent.glob("*.part")) == []
    text = session.said[-1]
    for word in (
        "kernels",
        "transfers",
        "one idea after another",
        "one setting changed",
        "matrix product",
        "timeline",
        "steps",
        "targets",
    ):
        assert word in text
    assert str(session.report.path) in text


def test_the_gpu_itself_makes_the_calls_it_should(monkeypatch, tmp_path):
    """All of a run by CuPy's own calls, over a CuPy of host memory."""
    cupy = host_cupy.make()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(arrays, "installed", lambda framework: False)
    monkeypatch.setattr("bench.gpu.gpu.Product", lambda index, side: StandInProduct())
    monkeypatch.setattr(needs, "missing", lambda: ([], []))
    monkeypatch.setattr(command, "FULL", TINY)
    assert command.main(["--out", str(tmp_path), "--device", "cuda:0"]) == 0
    (path,) = tmp_path.glob("*-nvidia-host-memory-*cores.json")
    document = json.loads(path.read_text())
    assert document["machine"]["gpu"]["capability"] == "9.0"
    failed = [step for step in document["steps"] if step["outcome"] == "FAILED"]
    assert failed == []
    assert len(document["rows"]) == 20 + 20 + 20 + 1 + 4 + 8
    gpu = Gpu("cuda:0")
    assert gpu.in_use() == 1 << 29
    assert gpu.is_well()
    assert cupy.violations == []


def test_every_path_is_measured_at_every_size(gpu):
    rows = list(transfers.measure(gpu, TINY, print))
    assert len(rows) == 2 * 10
    assert len({(row.path, row.size) for row in rows}) == 20
    rows = list(ablation.measure(gpu, TINY, print))
    assert len({(row.settings["direction"], row.path, row.size) for row in rows}) == len(rows) == 2 * 2 * 5
    rows = list(kernels.measure(gpu, TINY, print))
    assert len(rows) == 2 * 2 * 5
    assert {row.settings.get("share") for row in rows} == {"1", "1/2", None}
    rows = list(sweep.measure(gpu, TINY, print))
    assert [row.settings["varied"] for row in rows] == ["slab"] * 2 + ["depth"] * 2 + ["lead"] * 2 + ["share"] * 2
    assert {row.settings["depth"] for row in rows if row.settings["varied"] == "depth"} == {2, 3}


def test_the_timeline_has_every_slab(gpu):
    shown, row = timeline.measure(gpu, TINY, print)
    assert row.times.runs == 7
    assert len(shown.copies) == len(shown.opens) == 3
    assert shown.copies[0][0] == 0
    assert shown.overlap == 0  # the stand-in does one thing at a time
    assert shown.span >= shown.opens[-1][1]


def test_the_product_is_measured_beside_everything(gpu):
    before = set(threading.enumerate())
    rows = list(slowdown.measure(gpu, TINY, print))
    assert [row.settings["beside"] for row in rows] == [
        "nothing",
        "page-locked copies",
        "to_device, sealed, share 1",
        "to_device, sealed, share 1/4",
    ]
    assert rows[0].settings["slowed"] == 1
    # Helpers of the engine stay, for whoever comes next.
    assert all(thread.name.startswith("fastrack") for thread in set(threading.enumerate()) - before)


def test_quick_and_full_plans_say_the_same_things():
    for each in (plan.FULL, plan.QUICK):
        assert 256 * plan.MIB in each.kernel_sizes
        assert 256 * plan.MIB in each.transfer_sizes
        assert 1 / 4 in each.stream_shares
        assert each.total_seconds + each.tool_seconds < 8 * 60


# What goes wrong.


def test_a_step_that_raises_does_not_stop_the_others(session, monkeypatch):
    def fail(*_):
        yield Row("kernels", "open", 1, Times.of([1.0]))
        raise MemoryError("no memory left")

    monkeypatch.setattr(kernels, "measure", fail)
    assert session.run() == 0  # a figure is missing, and no check failed
    assert outcome(session, "kernels") == ("FAILED", "MemoryError: no memory left")
    assert outcome(session, "transfers")[0] == "done"
    assert any("Traceback" in line for line in session.said)
    assert [row for row in session.report.rows if row.step == "kernels"]


@pytest.mark.parametrize("error", [WrongResultError("not that"), DeviceError("cuda:0 failed")])
def test_a_wrong_result_is_told_by_the_exit_status(session, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(transfers, "measure", fail)
    assert session.run() == 1


def test_a_device_that_is_lost_is_left_alone(session, gpu, monkeypatch):
    def fail(*_):
        gpu.well = False
        raise DeviceError("cuda:0 failed: an illegal address")

    monkeypatch.setattr(kernels, "measure", fail)
    assert session.run() == 1
    assert outcome(session, "timeline") == ("skipped", "the device does not answer since the step 'kernels'")
    assert outcome(session, "picture")[0] == "done"


def test_no_step_starts_when_the_time_is_up(session):
    session._start -= TINY.total_seconds + 1
    session.step("late", lambda: "done")
    assert outcome(session, "late") == ("skipped", "no time was left of 400 s")


def test_results_are_there_after_every_step(session):
    session.step("one", lambda: session.report.add(Row("kernels", "open", 1, Times.of([1.0]), {"bits": 256})))
    document = json.loads(session.report.path.read_text())
    assert [step["name"] for step in document["steps"]] == ["one"]
    assert len(document["rows"]) == 1


@pytest.mark.parametrize("kernel", ["open", "seal", "gather"])
def test_a_kernel_that_is_wrong_is_found(gpu, monkeypatch, kernel):
    original = fake_cuda.run_kernel

    def run(space, violations, name, arguments):
        original(space, violations, name, arguments)
        size = arguments[-1 if kernel == "seal" else -2]
        if name.startswith(kernel) and size > 300:
            space.at(arguments[2], 8)[0] ^= 1

    monkeypatch.setattr(fake_cuda, "run_kernel", run)
    with pytest.raises(WrongResultError, match="another answer"):
        known.check(gpu)


def test_a_kernel_that_writes_beside_its_buffer_is_found(gpu, monkeypatch):
    original = fake_cuda.run_kernel

    def run(space, violations, name, arguments):
        original(space, violations, name, arguments)
        if name.startswith("open"):
            space.at(arguments[2] - 1, 1)[:] = 0

    monkeypatch.setattr(fake_cuda, "run_kernel", run)
    with pytest.raises(WrongResultError, match="outside its buffer"):
        known.check(gpu)


def test_what_arrives_wrong_is_found(gpu):
    memory, stream = gpu.memory(100), gpu.stream()
    with pytest.raises(WrongResultError, match="something else arrived"):
        host_data.require_same("it", gpu, memory.pointer, np.zeros(100, np.uint8), stream)


def test_something_beside_the_product_that_fails_is_told():
    def fail(_):
        raise DeviceError("lost")

    with pytest.raises(DeviceError, match="lost"), slowdown._repeated(fail):
        pass


# Known answers.


@pytest.mark.parametrize("case", known.CASES, ids=lambda case: f"case-{case[0]}")
def test_the_published_cases_are_those_of_the_specification(case):
    _, key, nonce, plain, sealed = case
    assert AESGCM(bytes.fromhex(key)).encrypt(bytes.fromhex(nonce), bytes.fromhex(plain), None).hex() == sealed


def test_all_known_answers_are_right_on_the_stand_in(gpu):
    assert known.check(gpu) == 3 * 6 + 4 * 2 * len(known.SIZES)


# Figures.


def rows_of(**seconds):
    """Rows at 256 MiB as a run would give them."""
    times = {
        (transfers.SEALED, "transfers"): seconds.get("sealed", 0.005),
        (transfers.LOCKED, "transfers"): seconds.get("locked", 0.005),
        (transfers.BOUNCE, "transfers"): seconds.get("bounce", 0.1),
        ("open", "kernels"): seconds.get("open", 0.001),
    }
    settings = {"bits": 256, "share": "1"}
    rows = [Row(step, path, 256 * plan.MIB, Times.of([taken]), settings) for (path, step), taken in times.items()]
    slowed = {"beside": slowdown.beside(1 / 4), "slowed": seconds.get("slowed", 1.05)}
    return [*rows, Row("slowdown", "matrix product", 1, Times.of([1.0]), slowed)]


def test_targets_that_are_met():
    found = targets(rows_of())
    assert [each.is_met for each in found] == [True] * 4
    assert found[0].value == pytest.approx(268.4, abs=0.1)
    assert [each.value for each in found[1:]] == pytest.approx([1, 20, 1.05])
    assert found[0].aim == 250


@pytest.mark.parametrize(("place", "worse"), [*enumerate([{"open": 0.002}, {"sealed": 0.006}, {"bounce": 0.04}])])
def test_a_target_that_is_missed(place, worse):
    found = targets(rows_of(**worse))
    assert [each.is_met for each in found] == [place != number for number in range(4)]


def test_a_target_to_stay_below():
    assert targets(rows_of(slowed=1.2))[-1].is_met is False


def test_targets_that_were_not_measured():
    found = targets([])
    assert len(found) == 4
    assert {each.is_met for each in found} == {None}
    assert {each.as_dict()["value"] for each in found} == {None}


def test_larger_sizes_count_too():
    larger = [dataclasses.replace(row, size=plan.GIB) for row in rows_of(open=1.0)]
    assert [each.is_met for each in targets([*rows_of(), *larger])] == [True, False, True, True, True, True]


def test_the_overlap_is_a_share_of_the_opening():
    shown = Timeline(1, ((0.0, 2.0), (2.0, 4.0)), ((2.0, 3.0), (4.0, 6.0)), 6.0, 0.5)
    assert shown.overlap == pytest.approx(1 / 3)
    assert shown.span == 6


def test_a_slab_that_was_not_opened_is_found():
    with pytest.raises(WrongResultError, match="0 slabs were copied"):
        timeline._timeline([], 1, 1.0, 0.0)


def test_times_have_a_median_and_quartiles():
    assert Times.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Times(3.0, 2.0, 4.0, 5)
    assert Times.of([1.0]) == Times(1.0, 1.0, 1.0, 1)


def test_rounds_end_when_their_budget_is_spent():
    calls = []
    short = dataclasses.replace(TINY, rounds=100, budget=0.0)
    assert interleave({"a": lambda n: calls.append(n) or 1.0}, short)["a"].runs == 3
    assert calls == [0, 1, 2, 3]


def test_a_table_of_nothing_is_nothing():
    assert table("title", ("a",), []) == ""
    assert table("title", ("a", "b"), [("x", "1"), ("yy", "22")]) == "title\n  a    b\n  x    1\n  yy  22"


def test_a_report_tells_what_was_missed_and_skipped(gpu, tmp_path):
    report = Report(gpu, TINY, quick=False, folder=tmp_path)
    for row in rows_of(sealed=1.0):
        report.add(row) if "slowed" not in row.settings else None
    report.outcomes += [Outcome("one", "skipped", "no tool\nand more"), Outcome("two", "done", is_check=True)]
    text = report.tables()
    assert "MISSED" in text
    assert "not measured" in text
    assert "no tool\n" in text
    assert not report.is_wrong
    report.outcomes.append(Outcome("three", "FAILED", is_check=True))
    assert report.is_wrong


def test_sizes_and_shares_are_told_in_words():
    assert [plan.size_of(size) for size in (5, 64 << 10, 3 << 20, 1 << 30)] == ["5 B", "64 KiB", "3 MiB", "1 GiB"]
    assert [plan.fraction(share) for share in (1, 0.5, 1 / 16, 0.3)] == ["1", "1/2", "1/16", "0.3"]
    assert Target("x", 1.0, "x", 1.0).is_met


# Where there is no device.


def run_command(*arguments, **options):
    command_line = [sys.executable, "-m", "bench.gpu", *arguments]
    return subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, check=False, **options)


@pytest.mark.skipif(find_spec("cupy") is not None, reason="there may be a device")
def test_without_a_device_the_command_says_what_it_skipped():
    done = run_command("--quick")
    assert done.returncode == 2
    assert "There is no usable CUDA device: " in done.stdout
    assert "cupy-cuda13x is not installed" in done.stdout
    for name in command.STEPS:
        assert f"\n  {name}\n" in done.stdout
    assert done.stderr == ""


def test_a_device_that_cannot_be_opened_is_said_so(monkeypatch, capsys):
    def refuse(_):
        raise DeviceError("cuda:0 cannot be used: CUDA finds no GPU on this machine")

    monkeypatch.setattr(needs, "missing", lambda: ([], []))
    monkeypatch.setattr("bench.gpu.gpu.Gpu", refuse)
    assert command.main([]) == 2
    assert "There is no usable CUDA device: DeviceError: cuda:0 cannot be used" in capsys.readouterr().out


def test_an_interpreter_with_nothing_says_what_it_lacks():
    """Without any package, as the Python of a bare system."""
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-m", "bench.gpu"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "numpy is not installed, cryptography is not installed" in done.stdout
    assert "torch is not installed: without results in torch" in done.stdout


def test_old_packages_are_named(monkeypatch):
    monkeypatch.setattr(needs, "version", lambda name: "45.0.7")
    problem = needs.Need("cryptography", ("cryptography",), 50).problem()
    assert problem == "cryptography 45.0.7 is older than 50"
    assert needs.Need("cryptography", ("cryptography",), 45).problem() is None
    assert needs.Need("no_such_module", ("none",)).problem() == "none is not installed"


@pytest.mark.skipif(shutil.which("make") is None or find_spec("cupy") is not None, reason="needs make, and no device")
def test_make_gpu_ends_with_the_same_word():
    environment = {**os.environ, "GPU_PYTHON": sys.executable}
    done = subprocess.run(["make", "gpu"], cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert "There is no usable CUDA device" in done.stdout


# Other processes.


@pytest.mark.slow
def test_the_tests_for_a_device_run_on_a_stand_in():
    said = []
    last = suite.run_tests("stand-in", 300, say=said.append)
    assert re.match(r"\d{3} passed, \d+ skipped", last)
    assert any("this needs a GPU" in line for line in said)


def script(tmp_path, text, name="compute-sanitizer"):
    path = tmp_path / name
    path.write_text(f"#!{sys.executable}\nimport os, subprocess, sys, time\n{text}\n")
    path.chmod(0o755)
    return str(path)


def sanitize(monkeypatch, tmp_path, text, seconds=60):
    monkeypatch.setattr(suite, "find_sanitizer", lambda: script(tmp_path, text))
    return suite.sanitize("cuda:0", "memcheck", seconds, say=lambda _: None)


def test_a_sanitizer_that_finds_nothing_gives_its_summary(monkeypatch, tmp_path):
    text = 'print("all is right"); print("========= ERROR SUMMARY: 0 errors"); assert "memcheck" in sys.argv'
    assert sanitize(monkeypatch, tmp_path, text) == "ERROR SUMMARY: 0 errors"


def test_a_sanitizer_that_refuses_the_device_is_skipped(monkeypatch, tmp_path):
    text = 'print("========= Error: Device not supported. Please refer to the guide."); sys.exit(1)'
    with pytest.raises(Skip, match="refuses the device: Error: Device not supported"):
        sanitize(monkeypatch, tmp_path, text)


@pytest.mark.parametrize("status", [86, 1, 0])
def test_a_sanitizer_that_finds_something_fails(monkeypatch, tmp_path, status):
    text = f'print("========= Invalid __global__ write"); print("==== ERROR SUMMARY: 1 error"); sys.exit({status})'
    with pytest.raises(WrongResultError, match=f"memcheck ended with {status}: ERROR SUMMARY: 1 error"):
        sanitize(monkeypatch, tmp_path, text)


def test_a_sanitizer_that_hangs_is_ended_with_all_it_started(monkeypatch, tmp_path):
    text = 'subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"])'
    with pytest.raises(Skip, match="not done after 1 s"):
        sanitize(monkeypatch, tmp_path, text, seconds=1)


def test_without_a_sanitizer_that_step_is_skipped(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(suite, "find_sanitizer", lambda: None)
    with pytest.raises(Skip, match="neither on the PATH"):
        suite.sanitize("cuda:0", "memcheck", 1, say=print)


def test_a_sanitizer_of_a_toolkit_is_found(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    path = script(tmp_path / "bin", "")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert suite.find_sanitizer() == path


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('print("1 failed, 2 passed"); sys.exit(1)', "pytest ended with 1: 1 failed"),
        ('print("3 skipped")', "pytest ended with 0: 3 skipped"),
        ("time.sleep(600)", "not done after 2 s"),
    ],
)
def test_tests_that_do_not_pass_fail(monkeypatch, tmp_path, text, match):
    monkeypatch.setattr(suite.sys, "executable", script(tmp_path, text, "python"))
    with pytest.raises(WrongResultError, match=match):
        suite.run_tests("cuda:0", 2, say=lambda _: None)


def test_tests_are_skipped_without_pytest(monkeypatch):
    monkeypatch.setattr(needs, "lacks", lambda *_: "pytest is not installed")
    with pytest.raises(Skip, match="pytest is not installed"):
        suite.run_tests("cuda:0", 2, say=print)
