"""A version that is not covered is let through if it writes as one that was tried, and refused by what differs else."""

import importlib
import importlib.metadata
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import canaries, writers
from helpers.foreign import take_back

import fastrack
from fastrack._patches import safetensors
from fastrack._protect import versions

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")
pytest.importorskip("torch.distributed.checkpoint")

KEY = fastrack.Key.generate()
SAVING = '''
"""Save with `open(path, "wb")`."""

def save_state(state, path):
    with open(path, "wb") as file:
        file.write(state)
'''


def refused(match):
    return pytest.raises(fastrack.FastrackError, match=match)


class Installed:
    """A package that stands for Accelerate, of any version and content."""

    def __init__(self, folder):
        self.folder, self.metadata = folder / "accelerate", folder / "accelerate-9.0.dist-info"
        self.put("__init__.py", "")
        self.put("checkpointing.py", SAVING)
        self.put("reading.py", "def load_state(path):\n    return open(path, 'rb').read()\n")
        self.metadata.mkdir()
        self.is_version("9.0")

    def put(self, name, content):
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(content)

    def is_version(self, version):
        (self.metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: accelerate\nVersion: {version}\n")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that is installed, covered up to 2.0, and listed as it is."""
    made = Installed(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)
    monkeypatch.setattr(versions, "COVERED", {"accelerate": ((1, 10), (2, 0))})
    monkeypatch.setattr(versions, "WRITERS", tmp_path / "writers.txt")
    writers.accept()
    yield made
    sys.modules.pop("accelerate", None)


def test_a_package_that_writes_as_a_tried_one_is_let_through_with_one_warning(package):
    package.put("reading.py", "def read_it(path, more):\n    return open(path, 'rb').read()  # 'wb' of open(\n")
    package.put("text.py", "def log(path):\n    open(path, 'w').write('loss')\n")
    package.put("escapes.py", SAVING.replace("save_state", "log").replace('"wb"', r'"\w"'))
    with pytest.warns(RuntimeWarning) as told:
        versions.require_covered()
    (warning,) = told
    assert "accelerate 9.0" in str(warning.message)


NEW = {
    "open": "def keep(a, path): open(path, 'wb').write(a)",
    "open with a mode of the caller": "def keep(a, path, write_mode): open(path, mode=write_mode).write(a)",
    "open with a mode that is chosen": "def keep(a, path): open(path, 'wb' if len(a) else 'w').write(a)",
    "open with a mode that is put together": "def keep(a, path, way): open(path, f'{way}b').write(a)",
    "open with another order": "def keep(a, path): open(path, 'bw').write(a)",
    "open with a mode for later": "import functools\nkeep = functools.partial(open, mode='wb')",
    "Path.open": "def keep(a, path): path.open('xb').write(a)",
    "a compressed file": "import gzip\ndef keep(a, path): gzip.GzipFile(path, 'wb').write(a)",
    "NumPy's functions": "import numpy as np\ndef keep(a, path): np.save(path, a)",
    "NumPy's archives": "import numpy\ndef keep(a, path): numpy.savez_compressed(path, a=a)",
    "a file system": "def keep(a, path, fs):\n  with fs.open(path, 'wb') as file: file.write(a)",
    "write_bytes": "def keep(a, path): path.write_bytes(a)",
    "os": "import os\ndef keep(a, path): os.write(os.open(path, os.O_WRONLY), a)",
    "tofile": "def keep(a, path): a.numpy().tofile(path)",
    "memmap": "import numpy\ndef keep(a, path): numpy.memmap(path, 'u1', 'w+')[:] = a",
    "mmap": "import mmap\ndef keep(a, fd): mmap.mmap(fd, len(a))[:] = a",
    "a file without a name": "import tempfile\ndef keep(a): tempfile.TemporaryFile().write(a)",
    "a zip file": "def keep(a, archive): archive.writestr('a', a)",
    "torch's writer": "import torch\ndef keep(a, path): torch._C.PyTorchFileWriter(path).write_record('a', a, 1)",
    "a method": "class Store:\n  async def keep(self, a): open(a, 'ab')",
    "a function within": "def outer():\n  def keep(a): open(a, 'wb')\n  return keep",
    "a module as it is imported": "open('/dev/null', 'wb').close()",
    "code of a later Python": "open('x', 'wb')\ntype keep = int\nlater := 3\n",
}


@pytest.mark.parametrize("code", NEW.values(), ids=list(NEW))
def test_a_new_function_that_writes_is_refused_by_its_name(package, code):
    package.put("parts/new.py", code)
    with refused(r"new accelerate\.parts\.new.*pip install 'accelerate>=1\.10,<2\.0'"):
        versions.require_covered()


def test_an_extension_that_was_not_there_is_refused(package):
    package.put("_writer.cpython-311-x86_64-linux-gnu.so", "")
    with refused(r"new accelerate\._writer"):
        versions.require_covered()


def test_a_function_that_was_moved_or_changed_is_refused(package):
    package.put("checkpointing.py", "")
    package.put("saving.py", SAVING)
    with refused(r"new accelerate\.saving:save_state; missing accelerate\.checkpointing:save_state"):
        versions.require_covered()
    package.put("saving.py", "")
    package.put("checkpointing.py", SAVING.replace("path)", "path, fast=False)"))
    with refused(r"changed accelerate\.checkpointing:save_state"):
        versions.require_covered()
    package.put("checkpointing.py", SAVING.replace('"wb"', '"r"'))  # it is still listed by its name
    with pytest.warns(RuntimeWarning):
        versions.require_covered()


def test_a_package_without_its_source_is_refused(package):
    (package.folder / "checkpointing.py").rename(package.folder / "checkpointing.pyc")
    with refused(r"missing accelerate\.checkpointing:save_state"):
        versions.require_covered()


def test_a_package_without_metadata_is_compared(package):
    package.metadata.rename(package.metadata.with_name("other"))
    with pytest.warns(RuntimeWarning, match="no version"):
        versions.require_covered()
    package.put("new.py", NEW["open"])
    with refused("got no version, .*new accelerate"):
        versions.require_covered()


def test_a_trainer_is_taken_by_its_number_before_its_release_as_afterwards(package):
    package.put("new.py", NEW["open"])
    for version in ("1.16.0.dev0", "1.16.0"):
        package.is_version(version)
        versions.require_covered()


def test_two_versions_in_one_folder_are_refused_and_in_two_folders_the_first_counts(package, tmp_path, monkeypatch):
    other = Installed(tmp_path / "later")
    other.is_version("1.2")
    package.is_version("1.15.0")
    monkeypatch.syspath_prepend(tmp_path / "later")
    monkeypatch.syspath_prepend(tmp_path / "site")
    versions.require_covered()
    other.metadata.rename(package.metadata.with_name("accelerate-8.0.dist-info"))
    with refused(r"of one version, got .*pip install --force-reinstall 'accelerate"):
        versions.require_covered()


@pytest.mark.usefixtures("package")
def test_a_module_that_says_another_version_than_its_metadata_is_refused(monkeypatch):
    module = importlib.import_module("accelerate")
    monkeypatch.setattr(module, "__version__", "1.12.0", raising=False)
    with refused(r"got 9\.0 and 1\.12\.0"):
        versions.require_covered()


def test_a_module_that_a_program_made_and_a_folder_without_code_are_not_looked_at(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", SimpleNamespace(__spec__=None))
    versions.require_covered()
    monkeypatch.delitem(sys.modules, "accelerate")
    package.put("new.py", NEW["open"])
    (package.folder / "__init__.py").unlink()
    versions.require_covered()


COVERED = ["2.13.0", "2.13.1+cpu", "2.14.1+cu130", "2.14.0.post1", "2.15.0+rocm7.2", "2.15"]
OLDER = ["2.12.1", "2.4.0+cpu", "1.13.0", "2.12.0a0+nv25.04"]
UNKNOWN = [
    "2.16.0",
    "2.16.0a0+git1a2b3c4",
    "3.0",
    "2.15.0.dev20260801+cpu",
    "2.13.0a0+nv25.10",
    "2.14.0rc1",
    "1!2.14",
    "main",
]


def say(monkeypatch, version):
    """Have torch be of a version, for its metadata and itself. Make the examination of its files short."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "torch" else real(name))
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(versions, "surface", lambda name: versions.tried_surfaces()[name]["2.14"] | EXTRA)


EXTRA = set()


@pytest.mark.parametrize("version", COVERED)
def test_covered_versions_are_let_through_as_they_are(monkeypatch, version):
    say(monkeypatch, version)
    monkeypatch.delattr(versions, "surface")
    versions.require_covered()


@pytest.mark.parametrize("version", OLDER)
def test_older_versions_are_refused_with_what_to_install(monkeypatch, version):
    say(monkeypatch, version)
    with refused(r"expected torch 2\.13 or later, got .*pip install 'torch>=2\.13,<2\.16'"):
        versions.require_covered()


@pytest.mark.parametrize("version", UNKNOWN)
def test_other_versions_are_compared_with_those_that_were_tried(monkeypatch, version):
    say(monkeypatch, version)
    with pytest.warns(RuntimeWarning) as told:
        versions.require_covered()
    assert [version in str(each.message) and "of 2.14" in str(each.message) for each in told] == [True]
    monkeypatch.setattr(sys.modules[__name__], "EXTRA", {"torch.fast:save(obj)"})
    with refused(r"which differs from 2\.14: new torch\.fast:save"):
        versions.require_covered()


def test_functions_in_cpp_are_seen_by_their_names_and_parameters(monkeypatch):
    before = set(versions._in_extension("torch"))
    assert "torch._C._save_parameters(arg0, arg1, arg2)" in before
    assert "aten::save(item, filename)" in before

    def new():
        """_save_all(state: dict, path: str) -> None"""

    monkeypatch.setattr(torch._C, "_save_all", new, raising=False)
    monkeypatch.setattr(torch._C.PyTorchFileWriter, "write_record", new)
    monkeypatch.setattr(torch._C, "_cuda_save_all", new, raising=False)
    monkeypatch.delattr(torch._C, "_save_mobile_module")
    assert versions._differences(set(versions._in_extension("torch")), before) == [
        "new torch._C._cuda_save_all",
        "new torch._C._save_all",
        "changed torch._C.PyTorchFileWriter.write_record",
        "missing torch._C._save_mobile_module",
    ]
    assert versions._differences(before, before | {"torch._C._cuda_save_all()"}) == []  # not in builds for CPUs


def test_the_extra_and_the_pages_name_the_covered_versions():
    root = Path(__file__).parents[2]
    bounds = {
        f"{name}>={'.'.join(map(str, first))},<{'.'.join(map(str, end))}"
        for name, (first, end) in versions.COVERED.items()
        if name in {"torch", "safetensors"}
    }
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras["protect"]) == bounds
    (major, first), (_, end) = versions.COVERED["torch"]
    minors = [f"{major}.{minor}" for minor in range(first, end)]
    assert list(versions.tried_surfaces()["torch"]) == minors
    page = (root / "docs/protect.md").read_text()
    assert f"| torch | {', '.join(minors)} |" in page
    for text in (page, (root / "README.md").read_text()):
        assert f"torch {minors[0]} to {minors[-1]}" in text


def test_functions_that_fastrack_has_replaced_for_a_folder_are_seen_as_they_were():
    before = set(versions._in_extension("safetensors"))
    assert "safetensors._safetensors_rust.serialize_file(tensor_dict, filename, metadata)" in before
    safetensors.add_handler("serialize_file", lambda *_, **__: NotImplemented)
    safetensors.add_handler("serialize", lambda *_, **__: NotImplemented)
    assert set(versions._in_extension("safetensors")) == before
    take_back()


@pytest.mark.slow
def test_what_is_installed_writes_as_its_list_says():
    listed = versions.tried_surfaces()
    assert set(listed) == set(versions.COVERED)
    for name in versions.COVERED:
        for version in versions.versions_of(name)[:1]:
            known = listed[name].get(".".join(map(str, versions.minor_of(version))))
            assert known is None or versions._differences(versions.surface(name), known) == [], name


@pytest.mark.slow
def test_a_torch_that_was_not_tried_is_protected_with_one_warning(monkeypatch):
    canaries.replace(monkeypatch)
    say(monkeypatch, "2.16.0")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fastrack.protect_checkpoints(KEY)
    take_back()
    assert [str(each.message).count("2.16.0") for each in told] == [1]
    with pytest.raises(RuntimeWarning, match=r"2\.16\.0"):  # as all warnings are errors in tests
        fastrack.protect_checkpoints(KEY)
    monkeypatch.setattr(sys.modules[__name__], "EXTRA", {"torch.fast:save(obj)"})
    before = torch.serialization._save
    with refused("torch.fast:save"):
        fastrack.protect_checkpoints(KEY)
    assert torch.serialization._save is before
