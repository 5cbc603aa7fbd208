"""The packages import only what stands below them, and the contract that says so would notice otherwise."""

import ast
import functools
import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers.copies import copy_tree

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
TURNED = [
    ("_util/fork.py", "from fastrack._tensors import dtypes"),
    ("_crypto/session.py", "from fastrack._transfer.api import to_device"),
    ("_devices/base.py", "from fastrack._sealed.tensor import SealedTensor"),
    ("_sealed/messages.py", "from fastrack._devices import canonical"),
    ("_models/load.py", "from fastrack._training.collate import collate"),
    ("_training/loader.py", "def later():\n    from fastrack._cli import main"),
    ("attest/_exchange.py", "from fastrack._sets.manifest import Manifest"),
    ("attest/_formats/x509.py", "from fastrack._sealed.tensor import SealedTensor"),
    ("errors.py", "from fastrack._util import fork"),
    ("_cli/measurements.py", "from fastrack_bench import toll"),
    ("_crypto/engine.py", "from fastrack_native import compiler"),
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
    copy_tree(ROOT / "fastrack", tmp_path / "fastrack")
    copy_tree(ROOT / "bench/fastrack_bench", tmp_path / "fastrack_bench")
    copy_tree(ROOT / "kernels/fastrack_native", tmp_path / "fastrack_native")
    return tmp_path


def test_each_package_imports_only_those_below_it(folder):
    assert check(folder)[0] == 0


def test_each_arrow_that_was_turned_is_found(folder):
    for name, line in TURNED:
        with (folder / "fastrack" / name).open("a") as file:
            file.write(f"\n{line}\n")
    status, output = check(folder)
    assert status == 1
    assert "BROKEN" in output
    for name, _ in TURNED:
        module = ".".join(("fastrack", *Path(name).with_suffix("").parts))
        assert f"- {module} -> " in output, (name, output)


def test_the_package_has_few_files_and_its_packages():
    tracked = [path for path in (ROOT / "fastrack").iterdir() if path.name not in {"__pycache__", "kernels"}]
    files = {path.name for path in tracked if path.is_file()}
    assert files == {"__init__.py", "__init__.pyi", "__main__.py", "_version.py", "errors.py", "format.py", "py.typed"}
    packages = {path.name for path in tracked if path.is_dir()}
    assert sum(name.startswith("_") for name in packages) <= 20
    public = {"attest", "distributed", "grants", "kv", "providers", "ray", "tour", "transformers", "vllm"}
    assert {name for name in packages if not name.startswith("_")} <= public


def needs_of(folder):
    """Return the modules that each module names: imported late, only for types, and by texts too."""
    tops = "fastrack", "fastrack_bench", "fastrack_native"
    paths = {
        path.relative_to(folder).with_suffix("").parts: path for top in tops for path in (folder / top).rglob("*.py")
    }
    files = {".".join(parts).removesuffix(".__init__"): path for parts, path in paths.items()}

    def home(name):
        while name not in files:
            name = name.rpartition(".")[0]
        return name

    needs = {}
    for name, path in files.items():
        stub = path.with_suffix(".pyi")
        found = named(path.read_text() + (stub.read_text() if stub.exists() else ""))
        needs[name] = {home(each) for each in found if each.partition(".")[0] in tops} - {name}
    return needs


@functools.cache
def named(text):
    """Return what a module's text imports, and its strings that may name a module."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value.partition(":")[0] if "._" in node.value else "")
    return found


def circle_of(folder):
    try:
        TopologicalSorter(needs_of(folder)).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_circle_of_files_exists(folder):
    assert circle_of(folder) is None


def test_late_imports_those_for_types_and_texts_count_in_circles(folder):
    for name, line in [
        ("_sealed/contexts.py", "def later():\n    from fastrack._sealed.tensor import SealedTensor"),
        ("_sealed/contexts.py", "if TYPE_CHECKING:\n    from fastrack._sealed import tensor"),
        ("_sealed/contexts.py", "import_module('fastrack._sealed.tensor')"),
        ("_keys/keys.py", "OPENER = 'fastrack._keys.keyring:KeyRing'"),
        ("_util/fork.py", "import fastrack"),
    ]:
        path = folder / "fastrack" / name
        text = path.read_text()
        path.write_text(f"{text}\n{line}\n")
        assert circle_of(folder) is not None, line
        path.write_text(text)


def test_no_folder_has_more_files_than_a_listing_shows():
    folders = {path.parent for path in (ROOT / "fastrack").rglob("*.py")}
    assert [folder.name for folder in folders if len(list(folder.glob("*.py"))) > 20] == []


def test_no_two_files_of_tests_have_one_name():
    """Else pytest refuses the second one that it imports, wherever both can be."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py") if "node_modules" not in path.parts]
    assert len(set(names)) == len(names)


def test_the_lines_of_each_part_are_within_what_was_agreed():
    # A change that needs more raises the number here, and says for what in its message.
    agreed = {"fastrack": 68_300, "tests": 126_850, "bench": 17_410, "kernels": 3_350}
    lines = {name: sum(len(path.read_text().splitlines()) for path in (ROOT / name).rglob("*.py")) for name in agreed}
    assert {name: count for name, count in lines.items() if count > agreed[name]} == {}
