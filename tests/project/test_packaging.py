import csv
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from importlib import metadata as installed
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.cases import each
from helpers.copies import copy_tree
from packaging.requirements import Requirement

import fastrack
from fastrack._devices.cuda.nvrtc import CUBINS, PTX, find_kernels

ROOT = Path(__file__).parents[2]
MODULE = "fastrack/_crypto/_native.abi3.so"
KERNELS = "fastrack/kernels"  # what is compiled of them lies there in a checkout too
CODE, CUBIN = "fastrack_native", "fastrack._devices.cuda.cubins"  # what makes machine code for CPUs, for GPUs
DIST = f"fastrack_io-{fastrack.__version__}"
# pip's fastrack, which is another project: as a requirement, with an extra or without.
OLD_NAME = re.compile(
    r"pip install[^`\n|&;]*?[\s'\"]fastrack(?=['\"`\s=<>~]|\[|$)"
    r"|(?<![\w./-])fastrack\\?\[(?:torch|broker|cu1\d|pkcs11|tpm|vault|aws|gcp|azure|ray|remote|demo|bench|jit|\{)",
    re.MULTILINE,
)

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(
        not (ROOT / "pyproject.toml").exists(), reason="the tests run outside a checkout, where nothing can be built"
    ),
]


def build(kind, folder, tree=ROOT, wheel="pure"):
    # ziglang, of which there is only one where wheels are made for others, is no condition here.
    options = ["--no-isolation", "--skip-dependency-check", "--outdir", str(folder)]
    command = [sys.executable, "-m", "build", f"--{kind}", *options, str(tree)]
    environment = {**os.environ, "FASTRACK_WHEEL": wheel}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Return a copy of what the project is built from, with what earlier builds left there."""
    folder = tmp_path_factory.mktemp("tree") / "fastrack"
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        check=False,
        text=True,
    ).stdout.split("\0")
    if not listed[0]:  # in the source archive
        copy_tree(ROOT, folder, ".venv*", ".ziglang")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / MODULE).write_bytes(b"of another day")
    (folder / KERNELS).mkdir()
    (folder / KERNELS / "sm_90-0123.cubin.xz").write_bytes(b"of another day")
    (folder / MODULE).with_name(".native-killed").mkdir()
    (folder / MODULE).with_name(".native-killed").joinpath("native.o").write_bytes(b"half")
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["ignored by git", "with nothing ignored"])
def wheel(request, tree, tmp_path_factory):
    if not request.param:
        (tree / ".gitignore").unlink(missing_ok=True)
    with zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel"), tree)) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    return Parser().parsestr(wheel.read(f"{DIST}.dist-info/METADATA").decode())


@pytest.fixture(scope="module")
def sdist_names(tree, tmp_path_factory):
    with tarfile.open(build("sdist", tmp_path_factory.mktemp("sdist"), tree)) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def files_under(folder):
    made = {ROOT / MODULE, *(ROOT / KERNELS).glob("*")}
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path not in made)
    installed = {"__pycache__", "node_modules"}
    return {path.relative_to(ROOT).as_posix() for path in files if installed.isdisjoint(path.parts)}


def test_the_wheel_holds_every_module_the_kernels_the_command_and_the_licences(wheel):
    names, kernels, folder = set(wheel.namelist()), [*(ROOT / "kernels").glob("*.cu*")], f"{DIST}.dist-info"
    assert files_under("fastrack") <= names
    assert kernels
    for path in kernels:
        assert wheel.read(f"fastrack/kernels/{path.name}") == path.read_bytes()
    assert "fastrack = fastrack._cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    for name in ("LICENSE", "LICENSE-numba"):
        assert wheel.read(f"{folder}/licenses/{name}") == (ROOT / name).read_bytes()


def test_the_wheel_holds_the_package_for_every_platform_and_nothing_else(wheel):
    names = wheel.namelist()
    assert Path(wheel.filename).name == f"{DIST}-py3-none-any.whl"
    assert "Root-Is-Purelib: true" in wheel.read(f"{DIST}.dist-info/WHEEL").decode()
    assert "fastrack/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"fastrack", f"{DIST}.dist-info"}
    assert not [name for name in names if {"tests", "bench", "__pycache__"} & set(name.split("/"))]
    assert not [name for name in names if name.endswith((".so", ".o", ".cubin.xz", ".ptx.xz")) or "_native." in name]


def test_numbas_licence_is_that_of_the_numba_that_is_compiled_with():
    try:
        files = installed.files("numba")
    except PackageNotFoundError:
        pytest.skip("numba is not installed")
    (path,) = (path for path in files if path.name == "LICENSE")
    assert path.read_text() == (ROOT / "LICENSE-numba").read_text()


def test_the_metadata_says_what_the_project_is(metadata):
    expected = {
        "Name": "fastrack-io",
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
    extras = "torch protect accelerate broker cu12 cu13 demo bench pkcs11 tpm vault aws gcp azure quantize ray remote"
    assert set(metadata.get_all("Provides-Extra")) == set(extras.split())
    heavy = ("torch", "cupy", "scikit", "matplotlib", "starlette", "uvicorn", "numba", "llvmlite")
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in required if line.startswith(heavy)]


def test_the_description_has_links_that_lead_somewhere_from_a_package_index(metadata):
    links = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    assert len(links) > 30
    assert [link for link in links if not link.startswith("https://")] == []
    for page in re.findall(re.escape("https://fastrack-io.github.io/fastrack/") + r"([^)#\s]*)\.html", " ".join(links)):
        assert (ROOT / f"docs/{page}.md").exists(), page


# What belongs to others, with the reason why it is linked.
OF_OTHERS = {
    "https://arxiv.org/abs/2410.15240": "the paper",
    "https://c2sp.org/chunked-encryption": "the format of messages",
    "https://github.com/safetensors/safetensors": "the format of files",
    "https://download.pytorch.org/whl/cpu": "where to get torch only for CPUs",
}
OUR_OWN = re.compile(
    r"https://(github\.com/fastrack-io/fastrack|fastrack-io\.github\.io/fastrack/|pypi\.org/project/fastrack-(io|testkit)/)"
)


def test_an_address_is_ours_or_has_a_reason():
    texts = [(ROOT / name).read_text() for name in ("README.md", "pyproject.toml", "CITATION.cff", "SECURITY.md")]
    found = set(re.findall(r"https?://[^\s\"')>`]+", "\n".join(texts)))
    assert {address for address in found if not OUR_OWN.match(address)} == set(OF_OTHERS)


def test_the_citation_has_the_version():
    assert f"\nversion: {fastrack.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_fastrack_bench_has_the_version_and_is_installed_where_tests_run():
    described = tomllib.loads((ROOT / "bench/pyproject.toml").read_text())["project"]
    assert described["version"] == fastrack.__version__
    assert described["dependencies"] == [f"fastrack-io=={fastrack.__version__}"]
    assert "fastrack-bench" in project()["project"]["optional-dependencies"]["bench"]
    assert installed.version("fastrack-bench") == fastrack.__version__, "run `make install`: its tests are skipped"


def test_the_wheel_of_fastrack_bench_holds_its_package_and_nothing_else(tree, tmp_path):
    with zipfile.ZipFile(build("wheel", tmp_path, tree / "bench")) as wheel:
        names = set(wheel.namelist())
    assert {name.partition("/")[0] for name in names} == {
        "fastrack_bench",
        f"fastrack_bench-{fastrack.__version__}.dist-info",
    }
    assert {name.removeprefix("bench/") for name in files_under("bench/fastrack_bench")} <= names


def test_hooks_have_the_locked_versions():
    locked = dict(re.findall(r"^(\w+)==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    settings = (ROOT / ".pre-commit-config.yaml").read_text()
    hooks = re.findall(r"repo: \S+/(ruff|codespell)[\w-]*\n +rev: v(\S+)", settings)
    assert dict(hooks) == {name: locked[name] for name in ("ruff", "codespell")}


def test_the_source_archive_holds_every_source_and_can_be_worked_on(sdist_names):
    for folder in ("examples", "fastrack", "kernels", "tests", ".ci"):
        assert files_under(folder) <= sdist_names
    assert not [name for name in sdist_names if name.endswith((".so", ".o", ".cubin.xz", ".ptx.xz"))]
    others = "pyproject.toml README.md LICENSE CHANGELOG.md Makefile requirements.txt .ci/run SECURITY.md LICENSE-numba"
    others += " CONTRIBUTING.md CITATION.cff .pre-commit-config.yaml .github/workflows/release.yml hatch_build.py"
    assert set(others.split()) <= sdist_names


# Names and versions.


def tracked():
    """Return the texts of the repository, or of the source archive."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=False).stdout
    paths = (ROOT / name for name in listed.split("\0") if name) if listed else ROOT.rglob("*")
    for path in paths:
        if path.is_file() and path.suffix not in {".png", ".pyc", ".so"} and path != Path(__file__):
            yield path, path.read_text(encoding="utf-8", errors="replace")


def test_nothing_says_to_install_the_package_of_the_old_name():
    found = {str(path.relative_to(ROOT)): match[0] for path, text in tracked() for match in OLD_NAME.finditer(text)}
    assert found == {}


@each(
    ("text", "is_old"),
    [
        ("RUN pip install fastrack && fastrack warmup", True),
        ("pip install --upgrade fastrack", True),
        ("pip install 'fastrack[torch]'", True),
        ("pip install fastrack==0.1", True),
        ("needs fastrack[ray]", True),
        (r"pip install 'fastrack\[cu13\]'", True),
        ("pip install 'fastrack-io[torch]'", False),
        ("pip install fastrack-io", False),
        ("pip install '.[torch]' && fastrack demo", False),
        ("pip install './fastrack[torch]'", False),
        ("fastrack[0]", False),
    ],
)
def test_the_old_name_is_found(text, is_old):
    assert bool(OLD_NAME.search(text)) == is_old


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def locked(name):
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE))


def makers():
    """Return the requirements that machine code is made with."""
    requirements = map(Requirement, project()["build-system"]["requires"])
    return {each.name: each for each in requirements if each.name != "hatchling"}


def test_machine_code_is_made_with_the_locked_versions():
    assert set(makers()) == {"llvmlite", "numba", "numpy", "nvidia-cuda-nvrtc", "ziglang"}
    versions = locked("requirements.txt")
    assert {name: str(each.specifier) for name, each in makers().items()} == {
        name: f"=={versions[name]}" for name in makers()
    }
    (linker,) = map(Requirement, project()["dependency-groups"]["linker"])
    assert str(linker.specifier) == str(makers()["ziglang"].specifier)


@each(
    ("system", "machine", "is_made"),
    [
        ("linux", "x86_64", True),
        ("linux", "aarch64", True),
        ("linux", "riscv64", False),
        ("darwin", "arm64", False),
        ("darwin", "x86_64", False),
        ("win32", "AMD64", False),
    ],
)
def test_only_linux_on_x86_64_and_aarch64_needs_what_makes_machine_code(system, machine, is_made):
    environment = {"sys_platform": system, "platform_machine": machine}
    assert {each.marker.evaluate(environment) for each in makers().values()} == {is_made}


def test_numba_is_for_those_who_compile():
    described = project()
    extras = described["project"]["optional-dependencies"].values()
    asked = [*described["project"]["dependencies"], *(text for texts in extras for text in texts)]
    assert not {Requirement(text).name for text in asked} & {"numba", "llvmlite", "ziglang"}
    (requirement,) = map(Requirement, described["dependency-groups"]["native"])
    (lowest,) = (each.version for each in requirement.specifier)
    assert requirement.name == "numba"
    assert locked("tests/lowest.txt")["numba"].startswith(f"{lowest}.")


# The build hook, with a stand-in for the generator.


@pytest.fixture
def hook(monkeypatch, tmp_path_factory):
    """Return the hook's module. Its `made` lists what the generator was told, which only writes a few bytes."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.made = []
    monkeypatch.setattr(module, "mkdtemp", lambda prefix: str(tmp_path_factory.mktemp(prefix)))
    monkeypatch.setattr(module.atexit, "register", lambda *_: None)

    def generate(root, *options):
        module.made.append((root, *options))
        if options[0] == CUBIN and options[1:]:
            Path(options[-1]).mkdir(exist_ok=True)
            (Path(options[-1]) / "sm_90-4567.cubin.xz").write_bytes(b"kernels")
        elif options[1:]:
            Path(options[-1]).write_bytes(b"code")

    monkeypatch.setattr(module, "generate", generate)
    monkeypatch.delenv("FASTRACK_WHEEL", raising=False)
    monkeypatch.delenv("FASTRACK_KERNELS", raising=False)
    return module


def run_hook(hook, version):
    data = {"force_include": {}}
    plugin = hook.MachineCode(str(ROOT), {}, None, None, "", "wheel")
    plugin.initialize(version, data)
    files = {target: Path(source).read_bytes() for source, target in data["force_include"].items()}
    for path in (ROOT / "kernels").glob("*.cu*"):
        assert files.pop(f"fastrack/kernels/{path.name}") == path.read_bytes()
    return data, files


@pytest.mark.parametrize(("found", "system"), [(object(), "manylinux_2_28"), (None, "linux")])
@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_a_wheel_of_an_architecture_has_its_machine_code(hook, monkeypatch, architecture, found, system):
    monkeypatch.setenv("FASTRACK_WHEEL", architecture)
    monkeypatch.setattr(hook, "find_spec", lambda name: found)
    data, files = run_hook(hook, "standard")
    code, kernels = hook.made
    assert code[:-1] == (str(ROOT), CODE, "--architecture", architecture, "--output")
    assert kernels[:-1] == (str(ROOT), CUBIN, "--output")
    assert files == {MODULE: b"code", f"{KERNELS}/sm_90-4567.cubin.xz": b"kernels"}
    assert (data["tag"], data["pure_python"]) == (f"cp311-abi3-{system}_{architecture}", False)


def test_the_generator_finds_the_kernels_that_were_made_earlier(hook, monkeypatch, tmp_path):
    """It makes those that a folder lacks, as `test_cubins` shows."""
    (tmp_path / "sm_80-4567.cubin.xz").write_bytes(b"earlier")
    monkeypatch.setenv("FASTRACK_KERNELS", str(tmp_path))
    monkeypatch.setenv("FASTRACK_WHEEL", "x86_64")
    _, files = run_hook(hook, "standard")
    assert files[f"{KERNELS}/sm_80-4567.cubin.xz"] == b"earlier"


def test_a_pure_wheel_makes_nothing(hook, monkeypatch):
    monkeypatch.setenv("FASTRACK_WHEEL", "pure")
    for version in ("standard", "editable"):
        assert run_hook(hook, version)[1] == {}
    assert hook.made == []


def test_an_editable_installation_has_its_machine_code_in_the_checkout(hook, monkeypatch):
    monkeypatch.setenv("FASTRACK_WHEEL", "x86_64")
    assert run_hook(hook, "editable")[1] == {}
    assert hook.made == [(str(ROOT), CODE), (str(ROOT), CUBIN)]


@pytest.mark.parametrize(
    ("tag", "wheel"),
    [
        ("cp311-abi3-manylinux_2_28_x86_64", "x86_64"),
        ("cp311-abi3-manylinux_2_28_aarch64", "aarch64"),
        ("cp311-abi3-manylinux_2_17_x86_64", "pure"),
        ("cp311-abi3-musllinux_1_2_x86_64", "pure"),
        ("cp314-cp314t-manylinux_2_28_x86_64", "pure"),
        ("cp311-abi3-macosx_14_0_arm64", "pure"),
    ],
)
def test_by_default_the_wheel_is_what_this_python_can_install(hook, monkeypatch, tag, wheel):
    monkeypatch.setattr(hook, "sys_tags", lambda: [tag])
    assert hook.chosen_wheel() == wheel


def test_another_architecture_is_refused_by_name(hook, monkeypatch):
    monkeypatch.setenv("FASTRACK_WHEEL", "riscv64")
    with pytest.raises(ValueError, match="expected FASTRACK_WHEEL to be one of x86_64, aarch64, pure, got 'riscv64'"):
        run_hook(hook, "standard")


def test_the_generator_leaves_nothing_else_in_the_tree(hook, monkeypatch):
    monkeypatch.undo()
    ran = []
    monkeypatch.setattr(hook, "subprocess", SimpleNamespace(run=lambda command, **more: ran.append((command, more))))
    hook.generate("there", CODE, "--output", "x")
    ((command, more),) = ran
    assert command == [sys.executable, "-m", CODE, "--output", "x"]
    assert (more["cwd"], more["env"]["PYTHONDONTWRITEBYTECODE"]) == ("there", "1")
    assert more["env"]["PYTHONPATH"].split(os.pathsep)[:2] == ["there", "there/kernels"]


@pytest.mark.nightly  # `make dist` makes and tries such wheels, too
def test_a_wheel_with_machine_code_is_a_pure_wheel_and_what_is_compiled(tree, tmp_path, monkeypatch):
    if sys.platform != "linux" or os.uname().machine not in {"x86_64", "aarch64"}:
        pytest.skip("there is no native extension for this machine")
    pytest.importorskip("numba")
    pytest.importorskip("nvidia")
    machine, sources = os.uname().machine, find_kernels()
    (tmp_path / "pure").mkdir()
    (tmp_path / "own").mkdir()
    with (
        zipfile.ZipFile(build("wheel", tmp_path / "pure", tree)) as pure,
        zipfile.ZipFile(build("wheel", tmp_path / "own", tree, machine)) as own,
    ):
        assert re.fullmatch(rf"{DIST}-cp311-abi3-(manylinux_2_28|linux)_{machine}\.whl", Path(own.filename).name)
        kernels = {sources.image(name).name for name in (*CUBINS, PTX)}
        assert set(own.namelist()) - set(pure.namelist()) == {MODULE, *(f"{KERNELS}/{name}" for name in kernels)}
        assert own.read(MODULE).startswith(b"\x7fELF")
        folder = f"{DIST}.dist-info"
        for name in set(pure.namelist()) - {f"{folder}/WHEEL", f"{folder}/RECORD"}:
            assert own.read(name) == pure.read(name), name
        assert MODULE in {row[0] for row in csv.reader(own.read(f"{folder}/RECORD").decode().splitlines())}
        own.extractall(tmp_path / "installed")
    script = "from fastrack._crypto import native; print(native.problem(), native.load().__file__)"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    told = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout == f"None {tmp_path / 'installed' / MODULE}\n"
