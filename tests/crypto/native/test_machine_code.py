"""The native extension: made of the sources that are here, called safely, and the only thing that a process loads."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest
from helpers.native_code import build, needs_compiler
from helpers.processes import run_python

from fastrack import DeviceError
from fastrack._crypto import isa, native, workers

pytestmark = pytest.mark.skipif(native.load() is None, reason="there is no native extension")
FIRST_TRANSFER = """
import sys
import numpy as np
import fastrack
from fastrack._crypto.engine import get_engine
key = fastrack.Key.from_bytes(bytes(range(32)))
table = np.arange(90_000).reshape(300, 300)
sealed = fastrack.seal(table, key)
assert (fastrack.to_device(sealed, keys=key, framework="numpy") == table).all()
assert (fastrack.to_device(sealed[[7, 3]], keys=key, framework="numpy") == table[[7, 3]]).all()
assert (fastrack.to_device([table, table[::2]], keys=key, framework="numpy")[0] == table).all()
print(get_engine().name, *sorted({"numba", "llvmlite"} & sys.modules.keys()))
"""


@pytest.fixture
def count():
    """A function of three arrays and an integer."""
    return native.functions().count_pieces


def arrays():
    """Ranges of one chunk, of two and of three."""
    return np.array([0, 16000, 99]), np.array([9, 999, 40000]), np.array([0, 9, 2000])


# Calls


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
    assert native.functions().copy_chunks(0, 0, 0, -1, 1, 0, 0, 0, 0) == workers.NONE_BAD


def test_memory_is_given_back_after_a_call_and_after_one_that_was_refused(count):
    memories = [bytearray(array) for array in arrays()]
    count(*memories, 3)
    for wrong in ((*memories, "3"), (memories[0], memories[1], 0, 3)):
        with pytest.raises(TypeError):
            count(*wrong)
    for memory in memories:
        memory.append(0)  # a memory in use could not grow


def test_every_form_has_every_function():
    names = {name: set(vars(native.functions(name))) for name in isa.supported_instruction_sets()}
    runs = {"open_run", "seal_run", "verify_run", "open_gather", "open_jobs", "expand_key", "derive_keys"}
    for name, functions in names.items():
        assert functions == runs, name


# What a process loads


def test_a_first_transfer_loads_neither_numba_nor_llvmlite():
    assert run_python(FIRST_TRANSFER, FASTRACK_ENGINE="").split() == [(*isa.supported_instruction_sets(), "openssl")[0]]


def test_a_module_of_other_sources_is_refused(monkeypatch, tmp_path):
    module = native.load()
    made = native.module_facts(module)["digests"]
    for name in ("fastrack/_crypto/gather.py", "kernels/fastrack_native/gcm_ir.py"):
        assert name in made
    if not (native._ROOT / "kernels").is_dir():
        pytest.skip("the sources of the native extension are in a checkout")
    assert native.is_of_these_sources(module)
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((native._ROOT / name).read_bytes())
    monkeypatch.setattr(native, "_ROOT", tmp_path)
    assert native.is_of_these_sources(module)
    for name in made:  # a change of any generator
        text = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(text + b"\n")
        assert not native.is_of_these_sources(module), name
        (tmp_path / name).unlink()
        assert not native.is_of_these_sources(module), name
        (tmp_path / name).write_bytes(text)
    for name in made:  # a package, which has no generator, and a program that is shipped without sources
        if name.startswith("kernels/"):
            (tmp_path / name).unlink()
    assert native.is_of_these_sources(module)
    (tmp_path / "fastrack/_crypto/gather.py").write_bytes(b"")
    assert not native.is_of_these_sources(module)
    for name in made:
        (tmp_path / name).unlink(missing_ok=True)
    assert native.is_of_these_sources(module)


def test_a_module_that_does_not_name_its_sources_is_refused():
    for text in (None, "{}", '{"sources": ["_crypto/native/gcm_ir.py"], "digest": "0"}'):
        assert not native.is_of_these_sources(ModuleType("_native", text))


@pytest.fixture
def another_module(monkeypatch):
    """Puts a module of other sources in the place of the native extension."""

    def put(**members):
        stale = ModuleType("stale", json.dumps({"digests": {"fastrack/_crypto/gather.py": "0" * 64}}))
        vars(stale).update(members)
        monkeypatch.setitem(sys.modules, "fastrack._crypto._native", stale)

    native._find.cache_clear()
    yield put
    native._find.cache_clear()


def test_what_is_refused_is_not_used_and_the_reason_is_given(another_module):
    another_module()
    assert native.load() is None
    assert native.problem() == "it was made of other sources than those here. Run `make native` in the checkout"
    with pytest.raises(DeviceError, match="other sources"):
        native.functions()


# What is compiled


def test_an_llvm_that_would_end_the_process_is_refused(monkeypatch):
    needs_compiler()
    from fastrack_native import compiler

    monkeypatch.setattr(compiler.binding, "llvm_version_info", (20, 1, 8))
    with pytest.raises(RuntimeError, match=r"expected LLVM 22 or later, .* got LLVM 20.1.8. Install"):
        compiler.target_machine(compiler.host_target())


@pytest.mark.slow
def test_code_that_could_raise_is_not_made():
    needs_compiler()
    from fastrack_native.compiler import compiled

    def divide(a: "int", b: "int") -> "int":
        return a // b

    with pytest.raises(RuntimeError, match="Py"):
        build({"divide": compiled(divide)})


@pytest.mark.slow
def test_arguments_that_are_neither_integers_nor_addresses_are_refused():
    needs_compiler()
    from fastrack_native.compiler import compiled

    def half(a: "float") -> "int":
        return int(a / 2)

    with pytest.raises(TypeError, match="a: 'float'"):
        build({"half": compiled(half)})
