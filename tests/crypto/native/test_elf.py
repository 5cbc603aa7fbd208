"""The file of the native extension: what the system's loader maps, links and protects."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import elf
from helpers.elf import SharedObject

from fastrack._crypto import native

# All that the module may call, as in `compiler`. Here again, so that to add a name takes a second thought.
LIBC = """
clock_gettime getauxval memcpy memmove memset pthread_cond_init pthread_cond_signal pthread_cond_wait pthread_create
pthread_mutex_init pthread_mutex_lock pthread_mutex_unlock pthread_self pthread_setaffinity_np pthread_setname_np
pthread_sigmask sched_getaffinity sched_getcpu sched_yield sigdelset sigfillset usleep
"""
LIBC = set(LIBC.split())
STABLE = """
PyBuffer_Release PyErr_BadArgument PyErr_Occurred PyEval_RestoreThread PyEval_SaveThread PyLong_AsLongLong
PyLong_FromLongLong PyModuleDef_Init PyObject_GetBuffer
"""
STABLE = set(STABLE.split())
OLDEST_GLIBC = 2, 28  # of manylinux_2_28
METH_FASTCALL = (0x80).to_bytes(4, "little")
GENERATOR = Path(__file__).parents[3] / "kernels"
MACHINES = {"x86_64": elf.X86_64, "aarch64": elf.AARCH64}


def make(architecture, folder):
    """Make the module for an architecture with zig's linker, as for a wheel."""
    pytest.importorskip("numba")
    if find_spec("ziglang") is None:
        pytest.skip("needs ziglang")
    path = folder / f"{architecture}.so"
    command = [sys.executable, "-m", "fastrack_native", "--architecture", architecture, "--output", path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": GENERATOR})
    return path


@pytest.fixture(scope="module", params=["here", *(pytest.param(name, marks=pytest.mark.slow) for name in MACHINES)])
def path(request, tmp_path_factory):
    if request.param != "here":
        return make(request.param, tmp_path_factory.mktemp("made"))
    if getattr(native.load(), "__file__", None) is None:
        pytest.skip("needs the module `_native`")
    return Path(native.load().__file__)


@pytest.fixture(scope="module")
def module(path):
    return SharedObject.read(path)


def methods_of(module):
    """Return the addresses of the functions that Python calls, by name, and of where the table has them."""
    found = {}
    for place, function in module.pointers.items():
        if module.is_code(function) and module.at(place + 8, 4) == METH_FASTCALL:
            found[module.text_at(module.pointers[place - 8])] = function, place
    return found


def test_it_is_a_shared_object_of_its_architecture(path, module):
    assert module.kind == elf.SHARED_OBJECT
    assert module.machine == MACHINES.get(path.stem, module.machine)


def test_it_exports_the_function_that_python_looks_for_alone(module):
    assert module.symbols(defined=True) == {"PyInit__native"}


def test_it_calls_nothing_but_the_c_library_and_the_stable_interface_of_python(module):
    assert module.symbols(defined=False) <= LIBC | STABLE
    assert module.libraries() <= {"libc.so.6", "libpthread.so.0"}


def test_it_needs_no_later_c_library_than_a_wheel_may(path, module):
    if path.stem not in MACHINES:
        pytest.skip("the linker of the system takes its own C library")
    versions = {tuple(map(int, name.removeprefix("GLIBC_").split("."))) for name in module.versions()}
    assert versions
    assert max(versions) <= OLDEST_GLIBC


def test_its_code_is_never_written_to(module):
    assert elf.TEXTREL not in module.dynamic
    assert not module.word(elf.FLAGS) & elf.DF_TEXTREL
    for segment in module.segments:
        assert segment.flags & (elf.WRITE | elf.EXECUTE) != elf.WRITE | elf.EXECUTE


def test_its_stack_is_not_executable(module):
    (stack,) = module.segments_of(elf.GNU_STACK)
    assert not stack.flags & elf.EXECUTE


def test_all_is_bound_when_it_is_loaded_and_then_read_only(module):
    (protected,) = module.segments_of(elf.GNU_RELRO)
    assert module.word(elf.FLAGS) & elf.DF_BIND_NOW or module.word(elf.FLAGS_1) & elf.DF_1_NOW
    # That holds the addresses of functions of others, and those of its own that Python calls.
    places = [*module.imported, *(place for _, place in methods_of(module).values())]
    assert places
    assert [place for place in places if not protected.has(place)] == []


def test_its_table_has_the_functions_that_it_says(path, module):
    names = set(methods_of(module))
    if path.stem in MACHINES:
        assert {"open_jobs_armv8" if path.stem == "aarch64" else "open_jobs_vaes_512", "plan_rows"} <= names
    else:
        assert names == {name for name, value in vars(native.load()).items() if callable(value) and name[0] != "_"}


def test_every_place_that_may_be_jumped_to_has_a_mark(module):
    kind, bit, mark = elf.LANDINGS[module.machine]
    assert module.properties().get(kind, 0) & bit
    functions = [function for function in module.pointers.values() if module.is_code(function)]
    assert len(functions) >= len(methods_of(module)) > 0
    assert {module.at(function, 4) for function in functions} == {mark}


def test_the_reader_finds_what_another_shared_object_has():
    import _ctypes

    if not getattr(_ctypes, "__file__", None):
        pytest.skip("ctypes is part of this interpreter")
    other = SharedObject.read(_ctypes.__file__)
    assert "PyInit__ctypes" in other.symbols(defined=True)
    assert not other.symbols(defined=False) <= LIBC | STABLE
    assert any(name.startswith("GLIBC_2.") for name in other.versions())
