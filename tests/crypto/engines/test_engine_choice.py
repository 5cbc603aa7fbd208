"""Test the list of engines and the choice among them."""

import pytest
from helpers.cases import each
from helpers.processes import run_python

from fastrack._crypto import engine as registry
from fastrack._crypto import isa, openssl, workers
from fastrack._crypto.vector import VectorEngine
from fastrack.errors import DeviceError

NARROW = ("x86", "aes", "pclmul", "ssse3")
LEVEL_3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4.2")
VAES = (*LEVEL_3, "prfchw", "vaes", "vpclmulqdq")
WIDE = ("avx512f", "avx512bw", "avx512vl", "avx512cd", "avx512dq", "avx512vbmi")


needs_vectors = pytest.mark.skipif(registry.available_engines()[0] == "openssl", reason="this CPU has no vector engine")


def forget():
    for cached in (registry.selected_engine, registry._fault, registry.make_engine):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def _choose_anew(monkeypatch):
    """Forget what was chosen and what was found, as in a fresh process without the variable."""
    monkeypatch.delenv("FASTRACK_ENGINE", raising=False)
    forget()
    yield
    forget()


@pytest.fixture
def cpu_with(monkeypatch):
    """Pretends that the CPU has these features and no others."""

    def pretend(*features):
        monkeypatch.setattr(isa, "_cpu_features", lambda: frozenset(features))

    return pretend


def test_a_cpu_with_everything_has_every_engine(cpu_with):
    cpu_with(*NARROW, *VAES, *WIDE)
    assert registry.available_engines() == ("vaes-512", "vaes-256", "aesni", "openssl")


def test_a_cpu_that_lacks_one_feature_has_the_engines_that_do_without(cpu_with):
    for absent in (*NARROW, *VAES, *WIDE):
        cpu_with(*(name for name in (*NARROW, *VAES, *WIDE) if name != absent))
        wide = () if absent in VAES else ("vaes-256",) if absent in WIDE else ("vaes-512", "vaes-256")
        vector = () if absent in NARROW else (*wide, "aesni")
        assert (absent, registry.available_engines()) == (absent, (*vector, "openssl"))


def test_an_arm_cpu_has_a_form_of_its_own_if_it_has_aes(cpu_with):
    for absent in (None, "neon", "aes"):
        cpu_with(*{"arm", "neon", "aes", "pmull"} - {absent})
        assert (absent, registry.available_engines()) == (absent, ("openssl",) if absent else ("armv8", "openssl"))


def test_every_engine_has_a_cpu_that_can_run_it():
    assert registry.ENGINES == ("vaes-512", "vaes-256", "aesni", "armv8", "openssl")


def test_the_fastest_engine_is_taken_unless_one_is_named():
    assert registry.get_engine().name == registry.available_engines()[0]
    for name in registry.available_engines():
        assert registry.get_engine(name).name == name


# By the environment


def test_the_environment_chooses_an_engine(monkeypatch):
    for name in registry.available_engines():
        monkeypatch.setenv("FASTRACK_ENGINE", name)
        registry.selected_engine.cache_clear()
        assert registry.selected_engine() == registry.SelectedEngine(name, forced=True)
        assert registry.get_engine().name == name


def test_an_empty_variable_chooses_nothing(monkeypatch):
    monkeypatch.setenv("FASTRACK_ENGINE", "")
    assert registry.selected_engine() == registry.SelectedEngine(registry.available_engines()[0])


@each("name", ["vaes-512", "vaes-128", "OpenSSL", " openssl", "quantum"])
def test_an_engine_that_is_not_there_cannot_be_forced(cpu_with, monkeypatch, name):
    cpu_with()
    monkeypatch.setenv("FASTRACK_ENGINE", name)
    with pytest.raises(DeviceError, match=rf"\(openssl\), got '{name}'. Name"):
        registry.get_engine()


def test_an_engine_that_is_named_in_a_call_comes_before_the_environments(monkeypatch):
    monkeypatch.setenv("FASTRACK_ENGINE", "quantum")
    assert registry.get_engine("openssl").name == "openssl"


def test_a_process_obeys_the_environment():
    code = """
import numpy as np
import fastrack
from fastrack._crypto import vector

def refuse(*_):
    raise AssertionError("a vector engine was made")

vector.VectorEngine.__init__ = refuse
key = fastrack.Key.generate()
sealed = fastrack.seal(np.arange(50000), key)
with fastrack.Channel(keys=key) as channel:
    print(channel.to_device(sealed[3:5], framework="numpy"), fastrack.unseal(sealed, key, framework="numpy").sum())
"""
    assert run_python(code, FASTRACK_ENGINE="openssl") == "[3 4] 1249975000\n"


# By the test of an engine


def seal_other_bytes(_engine, _schedule, _source, target, _first):
    target[:] = 1


def fail_to_compile(*_):
    raise NotImplementedError("no such instruction")


@needs_vectors
@pytest.mark.parametrize(
    ("method", "wrong", "told"),
    [
        ("seal_run", seal_other_bytes, "expected sealed chunks"),
        ("expand_key", fail_to_compile, "no such instruction"),
        ("open_jobs", lambda *_: None, "of many messages"),
    ],
)
def test_openssl_takes_the_place_of_an_engine_that_fails(monkeypatch, method, wrong, told):
    monkeypatch.setattr(VectorEngine, method, wrong)
    first = registry.available_engines()[0]
    with pytest.warns(RuntimeWarning, match=rf"'{first}'.*{told}.*'openssl'"):
        assert registry.get_engine().name == "openssl"
    choice = registry.selected_engine()
    assert (choice.name, choice.forced) == ("openssl", False)
    assert told in choice.fault
    assert registry.get_engine(threads=3).name == "openssl"  # and says no more


@needs_vectors
def test_an_engine_that_fails_cannot_be_forced(monkeypatch):
    monkeypatch.setattr(VectorEngine, "seal_run", seal_other_bytes)
    first = registry.available_engines()[0]
    monkeypatch.setenv("FASTRACK_ENGINE", first)
    for name in (None, first):
        with pytest.raises(DeviceError, match=rf"'{first}' .* 128 .* not use"):
            registry.get_engine(name)
    assert registry.get_engine("openssl").name == "openssl"


def test_nothing_takes_the_place_of_openssl(cpu_with, monkeypatch):
    cpu_with()
    monkeypatch.setattr(openssl.OpenSSLEngine, "seal_run", seal_other_bytes)
    with pytest.raises(DeviceError, match="'openssl' failed"):
        registry.get_engine()


def test_an_engine_is_tested_once_in_a_process(monkeypatch):
    tested, build = [], registry._build
    monkeypatch.setattr(registry, "_build", lambda *given: tested.append(given) or build(*given))
    for _ in range(2):
        for name in (None, *registry.available_engines()):
            for threads in (2, 3):
                registry.get_engine(name, threads=threads)
    assert sorted(name for name, threads in tested if threads == 1) == sorted(registry.available_engines())


@needs_vectors
def test_the_code_that_was_tested_is_what_every_number_of_threads_runs():
    first = registry.available_engines()[0]
    engines = registry.get_engine(first, threads=2), registry.get_engine(first, threads=3), registry._build(first, 1)
    assert len({engine._functions.open_run for engine in engines}) == 1


# How many there are


def test_an_engine_is_made_once_for_each_number_of_threads():
    for name in registry.available_engines():
        assert registry.get_engine(name, threads=3) is registry.get_engine(name, threads=3)
        assert registry.get_engine(name, threads=3).threads == (1 if name == "openssl" else 3)
    assert registry.get_engine() is registry.get_engine(threads=workers.default_threads())


@each("name", ["vaes-512", "vaes-256", "vaes-128", "aes"])
def test_an_absent_engine_is_refused_and_the_ones_there_are_named(cpu_with, name):
    with pytest.raises(ValueError, match=rf"\({', '.join(registry.available_engines())}\)"):
        registry.get_engine("quantum")
    cpu_with()
    with pytest.raises(ValueError, match=rf"\(openssl\), got '{name}'$"):
        registry.get_engine(name, threads=77)
