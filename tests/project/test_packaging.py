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


def test_the_wheel_holds_the_package_for_every_platform_and_nothing_else(wheel):
    assert Path(wheel.filename).name == f"fastrack-{fastrack.__version__}-py3-none-any.whl"
    assert "fastrack/py.typed" in wheel.namelist()
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {"fastrack", f"fastrack-{fastrack.__version__}.dist-info"}
    assert not [name for name in wheel.namelist() if {"tests", "bench", "__pycache__"} & set(name.split("/"))]


def test_the_wheel_installs_the_command_and_brings_the_licence(wheel):
    folder = f"fastrack-{fastrack.__version__}.dist-info"
    assert "fastrack = fastrack._cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    assert wheel.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_metadata_says_what_the_project_is(metadata):
    expected = {
        "Name": "fastrack",
        "Version": fastrack.__version__,
        "Requires-Python": ">=3.11",
        "License-Expression": "Apache-2.0",
        "Description-Content-Type": "text/markdown",
    }
    assert {name: metadata[name] for name in expected} == expected
    assert metadata.get_payload().startswith("# fastrack")
    for name in ("Documentation", "Source", "Changelog", "Issues"):
        assert any(line.startswith(f"{name}, https://") for line in metadata.get_all("Project-URL"))


def test_heavy_packages_are_extras(metadata):
    assert set(metadata.get_all("Provides-Extra")) == {
        *("torch", "broker", "cu12", "cu13", "demo", "bench"),
        *("pkcs11", "tpm", "vault", "aws", "gcp", "azure", "remote"),
    }
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [
        line for line in required if line.startswith(("torch", "cupy", "scikit", "matplotlib", "starlette", "uvicorn"))
    ]


def test_the_citation_has_the_version():
    assert f"\nversion: {fastrack.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_hooks_have_the_locked_versions():
    locked = dict(re.findall(r"^(\w+)==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    settings = (ROOT / ".pre-commit-config.yaml").read_text()
    hooks = re.findall(r"repo: \S+/(ruff|codespell)[\w-]*\n +rev: v(\S+)", settings)
    assert dict(hooks) == {name: locked[name] for name in ("ruff", "codespell")}


def test_the_source_archive_holds_every_source_and_can_be_worked_on(sdist_names):
    for folder in ("examples", "fastrack", "kernels", "tests"):
        assert files_under(folder) <= sdist_names
    others = "pyproject.toml README.md LICENSE CHANGELOG.md Makefile requirements.txt .ci/run SECURITY.md"
    others += " CONTRIBUTING.md CITATION.cff .pre-commit-config.yaml .github/workflows/ci.yml"
    assert set(others.split()) <= sdist_names
