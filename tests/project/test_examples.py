import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import fastrack

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXAMPLES.exists(), reason="the tests run without the examples"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the examples train with torch"),
]
has_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
has_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")

ALONE = [sys.executable]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


DIFFER = """
import sys, ddp
train = ddp.train
def differ(*arguments):
    model = train(*arguments)
    model.bias.data[3] += 1e-6 * ddp.dist.get_rank()
    return model
ddp.train = differ
sys.argv[1:] = ["--epochs", "1"]
sys.exit(ddp.main())
"""


def run(line, folder, *, start=ALONE, status=0, timeout=120, **variables):
    """Run an example and return its output. It leaves neither keys nor data behind."""
    name, *options = str(line).split()
    kept = {name: value for name, value in os.environ.items() if name not in {"RANK", "FASTRACK_KEY_FILE"}}
    with tempfile.TemporaryDirectory() as temporary:  # of a short name, as sockets have at most 107 characters
        done = subprocess.run(
            [*start, EXAMPLES / name, *options],
            cwd=folder,
            env={**kept, "OMP_NUM_THREADS": "1", "TMPDIR": temporary, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert not [path for path in Path(temporary).rglob("*") if path.suffix in {".key", ".safetensors"}]
    return done.stdout


def losses(said):
    return [float(loss) for loss in re.findall(r"^(?:step|epoch) \d+: loss (\d+\.\d+)$", said, re.MULTILINE)]


def test_a_language_model_learns_from_sealed_windows_and_is_resumed_to_the_bit(tmp_path):
    said = run("char_lm.py --steps 20 --width 32", tmp_path)
    first, *_, last = losses(said)
    assert last < first - 0.5
    assert "resumed at step 10: the same losses and weights, bit for bit" in said
    assert "\ndef " in said


@pytest.mark.nightly
def test_two_processes_end_with_the_same_weights(tmp_path):
    fastrack.Key.generate().save(tmp_path / "owner.key")
    said = run("ddp.py --epochs 2", tmp_path, FASTRACK_KEY_FILE=str(tmp_path / "owner.key"))
    first, last = losses(said)
    assert last < first
    assert said.endswith("the weights are the same on all processes\n")


@pytest.mark.nightly
def test_two_processes_are_started_by_torchrun_too(tmp_path):
    assert run("ddp.py --epochs 1", tmp_path, start=TWO).endswith("the weights are the same on all processes\n")


@pytest.mark.nightly
def test_processes_whose_weights_differ_are_noticed(tmp_path):
    (tmp_path / "differ.py").write_text(DIFFER)
    said = run(tmp_path / "differ.py", tmp_path, start=TWO, status=1, PYTHONPATH=str(EXAMPLES))
    assert said.endswith("the weights differ\n")


@pytest.mark.nightly
def test_a_sharded_run_of_which_a_process_was_killed_is_resumed(tmp_path):
    said = run("fsdp_checkpoint.py --steps 6 --crash-at 5", tmp_path)
    assert "resumed at step 4\n" in said
    assert float(re.search(r"^the weights are those of a run without a crash, to (\S+)$", said, re.MULTILINE)[1]) < 1e-6


@has_accelerate
@pytest.mark.parametrize(
    "start", [pytest.param(ALONE, id="one process"), pytest.param(TWO, id="two processes", marks=pytest.mark.nightly)]
)
def test_a_loop_with_accelerate_learns(tmp_path, start):
    said = run("accelerate_loop.py --epochs 3", tmp_path, start=start)
    seen = losses(said)
    assert len(seen) == 3
    assert seen == sorted(seen, reverse=True)
    assert float(re.search(r"^([\d.]+)% of the labels were guessed$", said, re.MULTILINE)[1]) > 80


@has_ray
@pytest.mark.timeout(600)
def test_two_workers_of_ray_see_each_sample_once(tmp_path):
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # as the names of sockets are
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": short}
        said = run("ray_train.py --epochs 2 --compare", tmp_path, timeout=580, **quiet)
    first, last = losses(said)
    assert last < first
    *_, seen, weights = said.splitlines()
    assert seen == "2000 samples an epoch, 2000 of them different"
    assert weights == "the weights are the same on all workers, and with plain gradients, bit for bit"


IMPORTS = {
    "images.py": ("sklearn", "PIL"),
    "text.py": ("sklearn",),
    "parquet.py": ("sklearn", "pyarrow"),
    "dicom.py": ("pydicom",),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name in {"dicom.py", "images.py", "text.py"}))
        for name in IMPORTS
    ],
)
def test_training_on_imported_samples_is_that_on_the_plain_ones_bit_for_bit(tmp_path, name):
    for package in IMPORTS[name]:
        pytest.importorskip(package)
    said = run(f"{name} --epochs 3", tmp_path)
    seen = losses(said)
    assert len(seen) == 3
    assert seen == sorted(seen, reverse=True)
    assert said.endswith(" the same losses, bit for bit\n")


def test_a_server_answers_as_the_plain_model_and_refuses_what_is_not_for_it(tmp_path):
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    said = run("serving demo", tmp_path, PYTHONPATH=str(EXAMPLES.parent))
    assert said.count("as of the plain model") == 3
    assert "reloaded edition-2: ok\n" in said
    assert "reloaded edition-3: refused\n" in said
    assert 'fastrack_requests_total{result="refused"} 7\n' in said


@pytest.mark.nightly
def test_three_holders_train_one_model_and_one_of_them_refuses(tmp_path):
    for package in ("sklearn", "starlette", "uvicorn"):
        pytest.importorskip(package)
    said = run("tour all", tmp_path, PYTHONPATH=str(EXAMPLES.parent))
    digits, text, refusal = re.split(r"^— \w+ —\n", said, flags=re.MULTILINE)[1:]
    assert int(re.search(r"^(\d+)% of 297 digits", digits, re.MULTILINE)[1]) > 80
    first, last = map(float, re.search(r"^loss (\S+) at first, (\S+) after", text, re.MULTILINE).groups())
    assert last < first - 1
    for whole in (digits, text):
        assert whole.endswith("equal to training on the joined data, bit for bit\n")
    assert "999" not in re.search(r"^the visitor sees: (.*)$", refusal, re.MULTILINE)[1]
    assert (
        "expected at least 999 (gpu.min_driver)" in re.search(r"^ben sees in its log: (.*)$", refusal, re.MULTILINE)[1]
    )
    assert "visit-0, visit-1 are left; the chain has 1 visit and no completion\n" in refusal
    assert refusal.endswith("the owner opens the model of before: equal to training on ada's data\n")


def test_every_example_is_described_and_run_here():
    folders = [path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"]
    names = sorted([*folders, *(path.name for path in EXAMPLES.glob("*.py"))])
    listed = re.findall(r"^- \[`(\w+(?:\.py)?)`\]\(\1\): ", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == names
    tests = Path(__file__).read_text()
    assert not [name for name in names if name not in {*IMPORTS, "kserve"} and f'run("{name} ' not in tests]


def test_the_demo_of_the_server_names_a_package_that_its_servers_lack():
    code = "import sys; sys.modules['uvicorn'] = None; from examples.serving.demo import run_demo; run_demo(1)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *filter(None, sys.path)])}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "uvicorn" in ran.stderr.splitlines()[-1]
