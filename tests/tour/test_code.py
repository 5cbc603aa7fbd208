"""The digest by which a plan names its training code: all that Python would import for it counts, or is refused."""

import functools
import importlib
import marshal
import os
import py_compile
import runpy
import shutil
import struct
import sys
import zipfile
from hashlib import sha256
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest
from helpers.cases import each

from fastrack import tour
from fastrack.errors import FormatError

CODE = "def train(state, shards):\n    return state\n\n\ndef dump(state, shards):\n    return list(shards)\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of this name, and its file."""
    (tmp_path / "wards.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "wards"
    forget()


def test_it_is_the_digest_of_the_name_and_the_file_with_their_lengths(module):
    parts = b"train", b"wards.py", CODE.encode()
    expected = sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()
    assert tour.code_digest(f"{module}:train") == expected


def test_another_function_of_the_module_is_other_code(module):
    assert tour.code_digest(f"{module}:train") != tour.code_digest(f"{module}:dump")


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("code", [functools.partial(print), "wards:absent", "absent:train", "wards", "", print])
def test_what_is_no_function_in_a_file_is_refused(code):
    with pytest.raises(FormatError, match="expected"):
        tour.code_digest(code)


def test_a_wrapped_function_has_the_digest_of_its_own_file(module, tmp_path):
    text = f"import functools, {module}\n@functools.wraps({module}.train)\ndef train(state, shards):\n    pass\n"
    (tmp_path / "evil.py").write_text(text)
    try:
        assert tour.code_digest("evil:train") != tour.code_digest(f"{module}:train")
        with pytest.raises(FormatError, match="expected a function of wards"):
            tour.code_digest(sys.modules["evil"].train)
    finally:
        sys.modules.pop("evil", None)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of the package `ward`, whose function is ``ward.deep.core:train``."""
    folder = tmp_path / "ward" / "deep"
    folder.mkdir(parents=True)
    for path in (folder.parent / "__init__.py", folder.parent / "util.py", folder / "__init__.py"):
        path.write_text("")
    (folder / "core.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder.parent
    forget()


def forget():
    """Have Python import the modules of these tests anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] in {"ward", "wards", "space"}]:
        del sys.modules[name]
    importlib.invalidate_caches()


TRAIN = "ward.deep.core:train"


def test_all_of_the_outermost_package_is_code(package):
    before = tour.code_digest(TRAIN)
    (package / "util.py").write_text("x = 1\n")
    after = tour.code_digest(TRAIN)
    assert after != before
    folder = package / "folder"  # without an __init__.py, which Python imports all the same
    folder.mkdir()
    (folder / "more.py").write_text("")
    assert tour.code_digest(TRAIN) not in {before, after}


def test_a_package_by_another_name_is_other_code(package):
    """Its own modules would be imported from a package elsewhere, of the name in its sources."""
    (package / "deep-er.py").write_text("")  # after the folder, as paths are sorted part by part
    before = tour.code_digest(TRAIN)
    for other in ("wards", "space/ward"):
        shutil.copytree(package, package.parent / other)
        importlib.invalidate_caches()
        assert tour.code_digest(f"{other.replace('/', '.')}.deep.core:train") != before
    parts = (
        b"train",
        *(
            part
            for path in ("__init__.py", "deep/__init__.py", "deep/core.py", "deep-er.py", "util.py")
            for part in (b"ward/" + path.encode(), (package / path).read_bytes())
        ),
    )
    assert sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest() == before


def test_the_files_that_count_are_told(package):
    names = ["__init__.py", "deep/__init__.py", "deep/core.py", "util.py"]
    assert [path.relative_to(package).as_posix() for path in tour.code_files(TRAIN)] == names
    from ward.deep.core import train

    assert tour.code_files(train) == tour.code_files(TRAIN)
    assert tour.code_digest(train) == tour.code_digest(TRAIN)


def link(folder):
    (folder.parent / "elsewhere").mkdir()
    (folder / "steps").symlink_to(folder.parent / "elsewhere")


INSTEAD = {
    "a folder behind a link": link,
    "a file behind a link": lambda folder: (folder / "more.py").symlink_to(folder / "util.py"),
    "an extension module": lambda folder: (folder / "util.so").write_bytes(b""),
    "one of another version": lambda folder: (folder / "util.cpython-313-darwin.so").write_bytes(b""),
    "one of Windows": lambda folder: (folder / "util.pyd").write_bytes(b""),
    "an extension module in the folder of bytecode": lambda folder: (make_cache(folder) / "x.abi3.so").write_bytes(b""),
    "bytecode without a source": lambda folder: (folder / "more.pyc").write_bytes(b""),
    "bytecode in a folder that is a package": lambda folder: (make_cache(folder) / "more.pyc").write_bytes(b""),
    "a pipe": lambda folder: os.mkfifo(folder / "more.py"),
}


def make_cache(folder):
    (folder / "__pycache__").mkdir(exist_ok=True)
    return folder / "__pycache__"


@each("put", INSTEAD.values(), INSTEAD)
def test_what_python_would_import_beside_the_sources_is_refused(tmp_path, put):
    (tmp_path / "ward").mkdir()
    for file in ("__init__.py", "util.py"):
        (tmp_path / "ward" / file).write_text(CODE)
    sys.path.insert(0, str(tmp_path))
    try:
        tour.code_digest("ward.util:train")
        put(tmp_path / "ward")
        with pytest.raises((FormatError, OSError)):
            tour.code_digest("ward.util:train")
    finally:
        sys.path.remove(str(tmp_path))
        forget()


def plant_bytecode(source, mode, code="def train(state, shards):\n    return 0\n"):
    """Put other code into the cache of a source, which Python takes for that of the source."""
    other, cache = source.with_name("other.txt"), Path(cache_from_source(source))
    other.write_text(code)
    py_compile.compile(str(other), cfile=str(cache), dfile=str(source), doraise=True, invalidation_mode=mode)
    other.unlink()
    with cache.open("r+b") as file:
        file.seek(8)
        if mode is PycInvalidationMode.TIMESTAMP:
            stat = source.stat()
            file.write(int(stat.st_mtime).to_bytes(4, "little") + stat.st_size.to_bytes(4, "little"))
        else:
            file.write(importlib.util.source_hash(source.read_bytes()))


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("mode", PycInvalidationMode)
def test_bytecode_that_is_not_of_its_source_is_refused(package, tmp_path, mode):
    alone, part = tmp_path / "wards.py", package / "util.py"
    for source, train in ((alone, "wards:train"), (part, TRAIN)):
        before = tour.code_digest(train)
        py_compile.compile(str(source), doraise=True, invalidation_mode=mode)
        assert tour.code_digest(train) == before
        plant_bytecode(source, mode)
        with pytest.raises(FormatError, match="expected the bytecode of"):
            tour.code_digest(train)
    forget()
    assert importlib.import_module("wards").train(1, ()) == 0, "Python runs what is refused"


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("change", [{"co_stacksize": 0}, {"co_cellvars": ()}], ids=str)
def test_bytecode_that_python_calls_equal_but_runs_in_other_memory_is_refused(tmp_path, change):
    source, text = tmp_path / "wards.py", "def train(state, shards):\n    return lambda: state\n"
    source.write_text(text)
    code = compile(text, str(source), "exec")
    function, *others = code.co_consts
    changed = code.replace(co_consts=(function.replace(**change), *others))
    assert changed == code
    numbers = [0, int(source.stat().st_mtime), source.stat().st_size]
    cache = make_cache(tmp_path) / Path(cache_from_source(source)).name
    cache.write_bytes(MAGIC_NUMBER + struct.pack("<3I", *numbers) + marshal.dumps(changed))
    with pytest.raises(FormatError, match="expected the bytecode of"):
        tour.code_digest("wards:train")


def test_a_module_that_is_run_as_a_program_has_the_digest_of_its_package(package):
    text = f"{CODE}from fastrack import tour\ntold = tour.code_digest(train), tour.code_files(train)\n"
    (package / "deep" / "core.py").write_text(text)
    told = runpy.run_module("ward.deep.core", run_name="__main__", alter_sys=True)["told"]
    assert told == (tour.code_digest(TRAIN), tour.code_files(TRAIN))


def test_a_name_of_a_source_that_is_no_unicode_text_counts(package):
    before = tour.code_digest(TRAIN)
    (package / "\udcff.py").write_text("")
    assert tour.code_digest(TRAIN) != before


@pytest.mark.usefixtures("module")
def test_bytecode_of_an_older_source_is_not_run_and_not_refused(tmp_path):
    py_compile.compile(str(tmp_path / "wards.py"), doraise=True)
    (tmp_path / "wards.py").write_text(CODE + "# of another size\n")
    assert tour.code_digest("wards:train")
    cached = (tmp_path / "__pycache__").iterdir()
    assert [path.name for path in cached] == [Path(cache_from_source("wards.py")).name]


def test_code_in_an_archive_is_refused(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        for name in ("wards.py", "ward/__init__.py", "ward/core.py"):
            archive.writestr(name, CODE)
    monkeypatch.syspath_prepend(tmp_path / "code.zip")
    try:
        for module in ("wards", "ward.core"):
            for ask in (tour.code_digest, tour.code_files):
                with pytest.raises(FormatError, match="expected a file of Python"):
                    ask(f"{module}:train")
    finally:
        forget()


def test_a_module_of_a_package_without_an_init_is_refused_and_a_package_there_is_not(tmp_path, monkeypatch):
    (tmp_path / "space" / "ward").mkdir(parents=True)
    (tmp_path / "space" / "core.py").write_text(CODE)
    for name in ("__init__.py", "core.py"):
        (tmp_path / "space" / "ward" / name).write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(FormatError, match="with an __init__"):
            tour.code_digest("space.core:train")
        assert len(tour.code_files("space.ward.core:train")) == 2
    finally:
        forget()


@pytest.mark.usefixtures("module")
def test_a_function_by_another_name_than_its_own_is_refused(tmp_path):
    (tmp_path / "wards.py").write_text(CODE + "fit = train\n")
    with pytest.raises(FormatError, match="expected a function of wards"):
        tour.code_digest("wards:fit")
