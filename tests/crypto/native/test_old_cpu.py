"""Test fastrack on older CPUs for x86-64, which QEMU emulates: an instruction that one lacks would end the process."""

import os
import platform
import re
import shutil
import subprocess
import sys

import pytest
from helpers.exchange import STRANGER, Exchange

from fastrack._crypto import native

QEMU = shutil.which("qemu-x86_64")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64, of Debian's qemu-user"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="needs a Python for x86-64"),
    pytest.mark.skipif(getattr(native.load(), "__file__", None) is None, reason="needs the native extension"),
]


def run_on(cpu, code, *arguments):
    """Run a program on a CPU, which ends well and complains of nothing, and return what it prints."""
    variables = {name: value for name, value in os.environ.items() if name != native.ENGINE_VARIABLE}
    done = subprocess.run(
        [QEMU, "-cpu", cpu, sys.executable, "-c", code, *map(str, arguments)],
        env={**variables, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    complaints = re.sub(r"qemu-x86_64: warning: TCG doesn't support requested feature.*\n", "", done.stderr)
    assert (done.returncode, complaints) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def exchange(tmp_path_factory):
    return Exchange(tmp_path_factory.mktemp("exchange"))


@pytest.mark.parametrize(
    ("cpu", "engines"),
    [
        pytest.param("Nehalem", ["openssl"], id="SSE4.2 and no AES", marks=pytest.mark.nightly),
        pytest.param("Haswell,-aes", ["openssl"], id="AVX2 and no AES"),
        pytest.param("Haswell,-pclmulqdq", ["openssl"], id="AES and no PCLMULQDQ", marks=pytest.mark.nightly),
        pytest.param("Westmere", ["aesni", "openssl"], id="AES and no AVX"),
        pytest.param("SandyBridge", ["aesni", "openssl"], id="AES and AVX", marks=pytest.mark.nightly),
        pytest.param("Haswell,-xsave", ["aesni", "openssl"], id="wide registers that are not saved"),
        pytest.param("Haswell", ["aesni", "openssl"], id="AVX2 and AES of one block", marks=pytest.mark.nightly),
        pytest.param("EPYC", ["aesni", "openssl"], id="AMD", marks=pytest.mark.nightly),
    ],
)
def test_an_older_cpu_seals_and_opens_what_this_one_opens_and_seals(exchange, cpu, engines):
    exchange.check(run_on(cpu, STRANGER, exchange.folder), engines)


# Without NumPy, whose wheels need SSE4.2.
COPY = """
import ctypes
import sys
from fastrack._crypto import isa, native, workers

source = bytearray(range(251)) * 9_001
target = bytearray(len(source))
addresses = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in (source, target)]
count = -(-len(source) // (16384 + 16))
code = native.load()
bad = workers.run(code.copy_chunks, (*addresses, count, len(source)), count, 4, threshold=1, waking_threshold=1)
print(isa.supported_instruction_sets(), bad, target == source, "numpy" in sys.modules)
"""


@pytest.mark.parametrize("cpu", ["qemu64", "core2duo"])
def test_code_outside_the_forms_runs_on_the_first_cpus(cpu):
    assert run_on(cpu, COPY) == "() None True False\n"


def test_an_instruction_that_the_cpu_lacks_would_end_the_process():
    code = """
import ctypes
from fastrack._crypto import native
room = ctypes.create_string_buffer(4096)
start = ctypes.addressof(room)
native.load().expand_key_aesni(128, start + -start % 64, start + 4000)
"""
    with pytest.raises(AssertionError, match=r"^assert \(-4, "):
        run_on("core2duo", code)
