"""Which engines there are, and which one is taken."""

from __future__ import annotations

import subprocess
import sys

import pytest
from llvmlite import binding

from fastrack import aead
from fastrack.aead import available, engine, vaes

VAES = ("aes", "pclmul", "avx2", "bmi2", "prfchw", "vaes", "vpclmulqdq")
WIDE = ("avx512f", "avx512bw", "avx512vl", "avx512cd", "avx512dq")


@pytest.fixture
def cpu_with(monkeypatch):
    """Pretends that the CPU has these features and no others."""

    def pretend(*features):
        monkeypatch.setattr(binding, "get_host_cpu_features", lambda: dict.fromkeys(features, True))

    return pretend


def test_a_cpu_with_everything_has_every_engine(cpu_with):
    cpu_with(*VAES, *WIDE)
    assert available() == aead.ENGINES == ("vaes-512", "vaes-256", "openssl")


@pytest.mark.parametrize("absent", WIDE)
def test_a_cpu_without_all_of_avx_512_keeps_to_256_bits(cpu_with, absent):
    cpu_with(*VAES, *(name for name in WIDE if name != absent))
    assert available() == ("vaes-256", "openssl")


@pytest.mark.parametrize("absent", VAES)
def test_a_cpu_that_lacks_one_vector_feature_has_openssl_alone(cpu_with, absent):
    cpu_with(*WIDE, *(name for name in VAES if name != absent))
    assert available() == ("openssl",)


def test_a_cpu_that_denies_a_feature_lacks_it(monkeypatch):
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: dict.fromkeys(VAES, True) | {"vaes": False})
    assert available() == ("openssl",)


def test_a_machine_that_llvm_does_not_know_has_openssl_alone(monkeypatch):
    def unknown():
        raise RuntimeError("no host CPU")

    monkeypatch.setattr(binding, "get_host_cpu_features", unknown)
    assert available() == ("openssl",)


def test_a_system_that_the_kernels_do_not_know_has_openssl_alone(cpu_with, monkeypatch):
    cpu_with(*VAES, *WIDE)
    monkeypatch.setattr(vaes.sys, "platform", "win32")
    assert available() == ("openssl",)


def test_the_fastest_engine_is_taken_unless_one_is_named():
    assert engine().name == available()[0]
    for name in available():
        assert engine(name).name == name


def test_an_engine_is_made_once_for_each_number_of_threads():
    for name in available():
        assert engine(name, threads=3) is engine(name, threads=3)
    assert engine() is engine(threads=aead.default_threads())


def test_an_engine_takes_as_many_threads_as_it_is_told():
    for name in available():
        assert engine(name, threads=3).threads == (1 if name == "openssl" else 3)


@pytest.mark.parametrize("name", ["vaes-512", "vaes-256", "vaes-128", "aes"])
def test_an_absent_engine_is_refused_and_the_ones_there_are_named(cpu_with, name):
    cpu_with()
    with pytest.raises(ValueError, match=f"no engine '{name}'; it has openssl$"):
        engine(name, threads=77)


def test_the_refusal_names_every_engine_there_is():
    with pytest.raises(ValueError, match=f"it has {', '.join(available())}$"):
        engine("quantum")


def test_without_vector_instructions_numba_is_never_loaded():
    code = """
import sys
import numpy as np
from llvmlite import binding
binding.get_host_cpu_features = dict
from fastrack.aead import available, engine
from fastrack.cobblestone import MessageKey

chosen = engine()
schedule = chosen.prepare(MessageKey.raw(bytes(32), bytes(12)))
plain, sealed, out = np.ones(100000, np.uint8), np.empty(100112, np.uint8), np.empty(100000, np.uint8)
chosen.seal_run(schedule, plain, sealed, 0)
print(available(), chosen.name, chosen.open_run(schedule, sealed, out, 0), (out == plain).all(), "numba" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "('openssl',) openssl None True False\n"


def test_asking_what_there_is_loads_no_numba():
    code = "import sys; from fastrack.aead import available; available(); print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
