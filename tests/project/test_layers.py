"""The packages import only what stands below them, and the contract that says so would notice otherwise."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TURNED = [
    ("_util/fork.py", "from fastrack._tensors import dtypes"),
    ("_crypto/session.py", "from fastrack._transfer.api import to_device"),
    ("_devices/base.py", "from fastrack._sealed.tensor import SealedTensor"),
    ("_sealed/reader.py", "from fastrack._devices import canonical"),
    ("_training/loader.py", "def later():\n    from fastrack._cli import main"),
    ("attest/_exchange.py", "from fastrack._broker.ledger import Ledger"),
    ("attest/_x509.py", "from fastrack._sealed.tensor import SealedTensor"),
    ("errors.py", "from fastrack._util import fork"),
]


def check(folder):
    pytest.importorskip("importlinter")
    code = "import sys; from importlinter.cli import lint_imports_command as run; sys.exit(run())"
    arguments = ["--config", ROOT / "pyproject.toml", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, check=False)
    return done.returncode, done.stdout.decode()


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(ROOT / "fastrack", tmp_path / "fastrack", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_each_package_imports_only_those_below_it(folder):
    assert check(folder)[0] == 0


@pytest.mark.slow
def test_an_arrow_that_was_turned_is_found(folder):
    for name, line in TURNED:
        path = folder / "fastrack" / name
        text = path.read_text()
        path.write_text(f"{text}\n{line}\n")
        status, output = check(folder)
        path.write_text(text)
        assert status == 1, (name, output)
        assert "BROKEN" in output


def test_the_package_has_four_files_and_its_packages():
    tracked = [path for path in (ROOT / "fastrack").iterdir() if path.name not in {"__pycache__", "kernels"}]
    files = {path.name for path in tracked if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "_version.py", "errors.py", "py.typed"}
    packages = {path.name for path in tracked if path.is_dir()}
    assert sum(name.startswith("_") for name in packages) <= 11
    assert {name for name in packages if not name.startswith("_")} <= {
        "attest",
        "distributed",
        "grants",
        "providers",
        "ray",
        "transformers",
    }
