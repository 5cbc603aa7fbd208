from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import fastrack

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="the tests run outside a checkout, where nothing can be built"
)


def build(kind, folder):
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    return Parser().parsestr(wheel.read(f"fastrack-{fastrack.__version__}.dist-info/METADATA").decode())


@pytest.fixture(scope="module")
def sdist_names(tmp_path_factory):
    with tarfile.open(build("sdist", tmp_path_factory.mktemp("sdist"))) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def files_under(folder):
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


def test_the_wheel_holds_every_module(wheel):
    assert files_under("fastrack") <= set(wheel.namelist())


def test_the_kernels_travel_inside_the_package(wheel):
    kernels = files_under("kernels")
    assert kernels
    assert {f"fastrack/{name}" for name in kernels} <= set(wheel.namelist())
    for name in kernels:
        assert wheel.read(f"fastrack/{name}") == (ROOT / name).read_bytes()


def test_the_wheel_says_that_it_is_typed(wheel):
    assert "fastrack/py.typed" in wheel.namelist()


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {"fastrack", f"fastrack-{fastrack.__version__}.dist-info"}
    assert not [name for name in wheel.namelist() if {"tests", "bench", "__pycache__"} & set(name.split("/"))]


def test_the_wheel_is_for_every_platform(wheel):
    assert Path(wheel.filename).name == f"fastrack-{fastrack.__version__}-py3-none-any.whl"


def test_the_wheel_installs_the_command(wheel):
    points = wheel.read(f"fastrack-{fastrack.__version__}.dist-info/entry_points.txt").decode()
    assert "fastrack = fastrack._cli:main" in points


def test_the_metadata_says_what_the_project_is(metadata):
    assert metadata["Name"] == "fastrack"
    assert metadata["Version"] == fastrack.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# fastrack")


def test_heavy_packages_are_extras(metadata):
    assert set(metadata.get_all("Provides-Extra")) == {"torch", "cu12", "cu13", "demo", "bench"}
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in required if line.startswith(("torch", "cupy", "scikit", "matplotlib"))]


def test_the_licence_travels_along(wheel):
    licence = wheel.read(f"fastrack-{fastrack.__version__}.dist-info/licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("folder", ["examples", "fastrack", "kernels", "tests"])
def test_the_source_archive_holds_every_source(sdist_names, folder):
    assert files_under(folder) <= sdist_names


@pytest.mark.parametrize("name", ["Documentation", "Source", "Changelog", "Issues"])
def test_the_metadata_names_the_pages_of_the_project(metadata, name):
    assert any(line.startswith(f"{name}, https://") for line in metadata.get_all("Project-URL"))


def test_the_citation_has_the_version():
    assert f"\nversion: {fastrack.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_hooks_have_the_locked_versions():
    locked = dict(re.findall(r"^(\w+)==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    settings = (ROOT / ".pre-commit-config.yaml").read_text()
    hooks = re.findall(r"repo: \S+/(ruff|codespell)[\w-]*\n +rev: v(\S+)", settings)
    assert dict(hooks) == {name: locked[name] for name in ("ruff", "codespell")}


@pytest.mark.parametrize(
    "name",
    [
        *["pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "requirements.txt", ".ci/run"],
        *["SECURITY.md", "CONTRIBUTING.md", "CITATION.cff", ".pre-commit-config.yaml", ".github/workflows/ci.yml"],
    ],
)
def test_the_source_archive_can_be_worked_on(sdist_names, name):
    assert name in sdist_names
