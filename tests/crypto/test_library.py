"""Compiled functions: compiled once for all processes, and safe to call with whatever they are given."""

import os
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers.forking import in_forked_child
from helpers.processes import run_python

from fastrack._crypto import code_cache, engine, forms, library, vector
from fastrack._crypto.forms import is_compiling
from fastrack._crypto.gather import PLANS
from fastrack._crypto.memcpy import COPY
from fastrack._crypto.workers import NONE_BAD

pytestmark = pytest.mark.skipif(not is_compiling(), reason="numba compiles nothing")


@pytest.fixture
def count():
    """A function of three arrays and an integer."""
    return library.load(PLANS).count_pieces


def arrays():
    """Ranges of one chunk, of two and of three."""
    return np.array([0, 16000, 99]), np.array([9, 999, 40000]), np.array([0, 9, 2000])


def test_a_function_takes_arrays_and_integers(count):
    for ranges, pieces in enumerate((0, 1, 3, 6)):
        assert count(*arrays(), np.int64(ranges)) == pieces


def test_wrong_arguments_are_refused_before_the_call(count):
    given = arrays()
    for few in ((), given, (*given, 3, 3)):
        with pytest.raises(TypeError):
            count(*few)
    with pytest.raises(TypeError):
        count(*given, 3.0)
    with pytest.raises(TypeError):
        count(*given, None)
    for number in (1 << 63, -(1 << 63) - 1):
        with pytest.raises(OverflowError):
            count(*given, number)
    with pytest.raises(TypeError):
        count(given[0], 5, given[2], 3)
    with pytest.raises(ValueError, match="contiguous"):
        count(given[0], np.zeros(6, np.int64)[::2], given[2], 3)


def test_minus_one_is_a_number_and_no_error():
    assert library.load(COPY).copy_chunks(0, 0, 0, -1, 1, 0, 0, 0, 0) == NONE_BAD


def test_memory_is_given_back_after_a_call_and_after_one_that_was_refused(count):
    memories = [bytearray(array) for array in arrays()]
    count(*memories, 3)
    for wrong in ((*memories, "3"), (memories[0], memories[1], 0, 3)):
        with pytest.raises(TypeError):
            count(*wrong)
    for memory in memories:
        memory.append(0)  # a memory in use could not grow


def test_code_that_could_raise_is_not_made():
    from fastrack._crypto.native.compiler import compile_functions, compiled

    def divide(a: "int", b: "int") -> "int":
        return a // b

    with pytest.raises(RuntimeError, match="Py"):
        compile_functions({"divide": compiled(divide)}, library.target())


def test_arguments_that_are_neither_integers_nor_addresses_are_refused():
    from fastrack._crypto.native.compiler import compile_functions, compiled

    def half(a: "float") -> "int":
        return int(a / 2)

    with pytest.raises(TypeError, match="a: 'float'"):
        compile_functions({"half": compiled(half)}, library.target())


def test_each_change_of_what_code_depends_on_changes_its_key(tmp_path):
    key = library._key()
    assert {"fastrack", "python", "target", "sources", "packages"} == key.keys()
    assert library.target().cpu in key["target"]
    file = tmp_path / "source.py"
    digests = set()
    for text in ("", "a", "b"):
        file.write_text(text)
        digests.add(library._digest([file]))
        digests.add(library._digest([file, file]))
    assert len(digests) == 6


def test_files_of_other_processors_and_units_have_other_names(monkeypatch):
    target = library.target()
    names = set()
    for other in (target, replace(target, cpu="other"), replace(target, features="+aes")):
        monkeypatch.setattr(library, "target", lambda other=other: other)
        names |= {library._file_name(unit) for unit in (PLANS, COPY, library.Unit("a.b", "build_c", (1, 2)))}
    assert len(names) == 9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_waits_for_a_thread_that_compiles(monkeypatch):
    """A child that has numba's and LLVM's locks as that thread held them could compile and load nothing."""
    unit = library.Unit("a.b", "build_c")
    monkeypatch.setattr(library, "_loaded", {})
    begun, finished = threading.Event(), threading.Event()

    def compile_slowly(_):
        begun.set()
        time.sleep(0.2)
        finished.set()
        return None, None

    monkeypatch.setattr(library, "_load", compile_slowly)
    thread = threading.Thread(target=library.load, args=(unit,))
    thread.start()
    assert begun.wait(60)
    assert in_forked_child(finished.is_set)
    thread.join()
    assert library._lock.acquire(blocking=False)  # the fork gave it back
    library._lock.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_waits_not_for_ever_and_not_for_its_own_thread():
    # In a process of its own: the child of a thread destroys what the main thread left in caches of torch, such as
    # groups of other tests, and may hang there.
    code = """
from concurrent.futures import ThreadPoolExecutor
from helpers.forking import in_forked_child
from fastrack._crypto import library
library._MAX_FORK_DELAY = 0.1
take = lambda: library._lock.acquire(blocking=False)
with library._lock, ThreadPoolExecutor(1) as pool:
    print(in_forked_child(take), pool.submit(in_forked_child, take).result())
"""
    assert run_python(code) == "True True\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.skipif(not forms.supported_forms(), reason="this CPU has no vector engine")
@pytest.mark.parametrize("part", ["jobs", "others"])
def test_a_child_can_load_what_a_thread_loaded_at_the_fork(part, monkeypatch):
    def load_part():
        return engine._load_jobs() if part == "jobs" else engine._others

    name = forms.supported_forms()[0]
    engine = vector.VectorEngine(name, forms.FORMS[name], 1)
    begun, forked = threading.Event(), threading.Event()

    def load_slowly(_):
        if threading.current_thread() is thread:
            begun.set()
            assert forked.wait(60)

    monkeypatch.setattr(vector, "load", load_slowly)
    monkeypatch.setattr(vector, "find_job_fault", lambda *_: None)
    thread = threading.Thread(target=load_part)
    thread.start()
    assert begun.wait(60)
    try:
        assert in_forked_child(load_part, seconds=10) is None
    finally:
        forked.set()
        thread.join()


FIRST_TRANSFER = """
import sys
import numpy as np
import fastrack
from fastrack._crypto import library
key = fastrack.Key.from_bytes(bytes(range(32)))
table = np.arange(90_000).reshape(300, 300)
sealed = fastrack.seal(table, key)
assert (fastrack.to_device(sealed, keys=key, framework="numpy") == table).all()
assert (fastrack.to_device(sealed[[7, 3]], keys=key, framework="numpy") == table[[7, 3]]).all()
made = sorted(record.unit.build for record in library.loaded() if record.compiled)
print(made, "numba" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.skipif(engine.available_engines()[0] == "openssl", reason="this CPU has no vector engine")
def test_a_second_process_compiles_nothing_and_damage_is_made_good(tmp_path):
    def run():
        return run_python(FIRST_TRANSFER, FASTRACK_CACHE_DIR=str(tmp_path))

    made, loaded = run().rsplit(" ", 1)
    assert loaded == "True\n"
    assert all(build in made for build in ("build_plans", "build_runs"))
    assert run() == "[] False\n"
    files = sorted((tmp_path / "fastrack").iterdir())
    assert len(files) == made.count("build") >= 3
    files[0].write_bytes(files[0].read_bytes()[:-1])
    files[1].write_bytes(b"")
    files[2].unlink()
    made, _ = run().rsplit(" ", 1)
    assert made.count("build") == 3
    assert run() == "[] False\n"


def test_no_numba_is_loaded_by_what_loads_code():
    assert (
        run_python("import sys, fastrack._crypto.vector, fastrack._crypto.gather; print('numba' in sys.modules)")
        == "False\n"
    )


def test_what_was_loaded_is_known():
    library.load(PLANS)
    (record,) = [record for record in library.loaded() if record.unit == PLANS]
    assert record.size > 0
    assert record.path is None or code_cache.read(record.path.name, library._key()) is not None
    assert sys.modules.get(PLANS.module) is not None or not record.compiled
