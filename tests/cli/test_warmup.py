"""`fastrack warmup`, and what `doctor` tells of compiled code."""

import dataclasses
import os
import subprocess
import sys

import pytest
from helpers.processes import run_python

from fastrack._cli import warmup as warmup_module
from fastrack._cli.compiled_code import needed_units, read_compiled_code
from fastrack._cli.selftest import CudaCheck
from fastrack._crypto import code_cache, engine, forms, library

pytestmark = pytest.mark.skipif(not forms.is_compiling(), reason="numba compiles nothing")


def test_code_that_is_there_is_told_with_its_place(cli):
    cli("warmup")
    document = cli.json("warmup")
    assert document["compiled"] == 0 or all(unit["path"] for unit in document["units"])
    assert document["engine"] == engine.selected_engine().name
    assert len(document["units"]) == len(needed_units())
    assert document["bytes"] == sum(unit["bytes"] for unit in document["units"]) > 0
    said = cli("warmup").stdout
    assert "unit" in said
    assert [folder for folder in document["folders"] if f"kept in {folder}\n" not in said] == []


def test_code_that_cannot_be_kept_is_an_error_that_says_what_to_set(cli, monkeypatch):
    cli("warmup")
    record = library.loaded()[0]
    failed = dataclasses.replace(record, path=None, problem=OSError(30, "Read-only file system"))
    monkeypatch.setattr(library, "loaded", lambda: [failed])
    monkeypatch.setattr(warmup_module, "needed_units", lambda: [record.unit])
    error = cli.error("warmup")
    assert "Read-only file system" in error
    assert code_cache.VARIABLE in error
    assert code_cache.VARIABLE in cli.json("warmup", status=1)["error"]["message"]


def test_without_a_compiler_there_is_nothing_to_do(cli, monkeypatch):
    monkeypatch.setattr(forms, "is_compiling", lambda: False)
    assert "NUMBA_DISABLE_JIT" in cli.error("warmup")
    monkeypatch.undo()
    monkeypatch.setattr("fastrack._cli.compiled_code.needed_units", list)
    assert "nothing is compiled" in cli("doctor").stdout


def test_the_kernels_of_a_gpu_are_compiled_too(cli, monkeypatch):
    monkeypatch.setattr(warmup_module, "read_graphics", lambda: type("Graphics", (), {"gpus": ["one"]}))
    for problem, told in ((None, "kernels compiled"), ("no compiler", "not usable: no compiler")):
        check = CudaCheck(problem is None, problem)
        monkeypatch.setattr(warmup_module, "check_cuda", lambda check=check: check)
        assert told in cli("warmup").stdout
        assert cli.json("warmup")["cuda"] == {"usable": problem is None, "problem": problem}


def test_doctor_tells_how_much_is_there(cli, monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_loaded", {})  # another test may have loaded, and kept, them in a folder of its own
    cli("warmup")
    assert f"state         {len(needed_units())} of" in cli("doctor").stdout
    monkeypatch.setenv(code_cache.VARIABLE, str(tmp_path / "new"))
    state = read_compiled_code()
    assert (state.found, state.bytes, state.writable) == (0, 0, True)
    assert state.folder == str(tmp_path / "new" / "fastrack")
    assert not (tmp_path / "new").exists()
    said = cli("doctor").stdout
    assert "`fastrack warmup` compiles the rest" in said
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setenv(code_cache.VARIABLE, str(blocked))
    assert not read_compiled_code().writable
    assert "set FASTRACK_CACHE_DIR" in cli("doctor").stdout
    assert cli.json("doctor")["code"]["found"] == 0


def test_units_are_those_of_the_engine_and_with_cupy_those_of_a_gpu(monkeypatch):
    monkeypatch.delenv(engine.ENGINE_VARIABLE, raising=False)
    builds = {unit.build for unit in needed_units()}
    monkeypatch.setattr("fastrack._cli.compiled_code.find_spec", lambda name: name)
    assert {unit.build for unit in needed_units()} - builds >= {"build_commands", "build_copy"}
    monkeypatch.setenv(engine.ENGINE_VARIABLE, "openssl")
    assert "build_runs" not in {unit.build for unit in needed_units()}


@pytest.mark.slow
@pytest.mark.skipif(engine.available_engines()[0] == "openssl", reason="this CPU has no vector engine")
def test_a_container_starts_with_what_its_image_compiled(tmp_path):
    cache = tmp_path / "cache"
    environment = {**os.environ, "FASTRACK_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}

    def command(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "fastrack", *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    count = len(needed_units())
    assert f"compiled {count} of" in command("warmup")
    assert "were there" in command("warmup")
    assert len(list(cache.rglob("*.code"))) == count
    for path in (*cache.rglob("*"), cache):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert run_python(TRANSFERS, FASTRACK_CACHE_DIR=str(cache)) == "[] False\n"
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o755)


TRANSFERS = """
import sys
import numpy as np
import fastrack
from fastrack._crypto import library
key = fastrack.Key.generate()
table = np.arange(900_000).reshape(300, 3000)
sealed = fastrack.seal(table, key)
assert (fastrack.to_device(sealed, keys=key, framework="numpy") == table).all()
assert (fastrack.to_device(sealed[[7, 3]], keys=key, framework="numpy") == table[[7, 3]]).all()
assert (fastrack.to_device(table) == table).all()
assert (fastrack.unseal(fastrack.to_host(table, key=key), key, framework="numpy") == table).all()
print([record.unit for record in library.loaded() if record.compiled], "numba" in sys.modules)
"""
