"""Test fastrack without numba's compiler, as under NUMBA_DISABLE_JIT=1, which measuring coverage asks for."""

import sys

import pytest
from helpers.processes import run_python
from numba.core import config

from fastrack._crypto import forms


@pytest.fixture
def run(tmp_path):
    """Runs a program without the compiler, in a folder of its own, and gives what it prints."""

    def run(code):
        return run_python(code, cwd=tmp_path, NUMBA_DISABLE_JIT="1", FASTRACK_ENGINE="")

    return run


@pytest.mark.parametrize("value", ["", "0", "no"])
def test_a_value_that_numba_takes_for_no_keeps_the_compiler(monkeypatch, value):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", value)
    monkeypatch.delitem(sys.modules, "numba.core.config", raising=False)
    assert forms.is_compiling()


def test_what_numba_was_told_in_the_program_counts(monkeypatch):
    monkeypatch.setattr(config, "DISABLE_JIT", 1)
    assert not forms.is_compiling()


@pytest.mark.slow
def test_everything_works_on_the_host(run):
    assert run(HOST) == "all is right\n"


HOST = """
import numpy as np
import fastrack
from fastrack import AuthenticationError, Key, SealedDataset

key = Key.generate()
table = np.arange(90_000, dtype=np.int32).reshape(300, 300)
sealed = fastrack.seal(table, key, name="table")
assert (fastrack.unseal(sealed, key, framework="numpy") == table).all()
bad = np.frombuffer(sealed.message, np.uint8).copy()
bad[-1] ^= 1
try:
    fastrack.unseal(fastrack.SealedTensor(sealed.context, bad, key.id), key, framework="numpy")
except AuthenticationError as error:
    assert error.chunk == 21
else:
    raise SystemExit("a forgery was opened")

with fastrack.Channel(keys=key) as channel:
    for rows in (slice(3, 290, 7), [5, 1, 1, 299], np.arange(0, 300, 2)[::-1].copy(), 17, slice(0, 300), []):
        assert (channel.to_device(sealed[rows], framework="numpy") == table[rows]).all()
    assert (fastrack.unseal(channel.to_host(table * 2, key=key), key, framework="numpy") == table * 2).all()

fastrack.save_file({"a": table, "b": table[:, 0].copy()}, "data.sealed", key=key)
fastrack.verify_file("data.sealed", keys=key)
fastrack.unseal_file("data.sealed", "plain.npz", keys=key)
assert (np.load("plain.npz")["a"] == table).all()

data = SealedDataset("data.sealed")
batch = fastrack.collate([data[place] for place in (7, 250, 3)])
assert (fastrack.to_device(batch, keys=key, framework="numpy")["a"] == table[[7, 250, 3]]).all()

fastrack.save_checkpoint("state.sealed", {"w": table, "step": 3}, key=key)
assert (fastrack.load_checkpoint("state.sealed", keys=key)["w"] == table).all()
print("all is right")
"""


def test_ciphertext_is_staged_and_openssl_is_the_engine(run):
    assert (
        run("""
import numpy as np
from fastrack._crypto.engine import available_engines, selected_engine
from fastrack._crypto import memcpy
from fastrack._crypto.cobblestone import SEALED_CHUNK_SIZE

source = np.random.default_rng(0).integers(0, 256, 99 * SEALED_CHUNK_SIZE + 77, np.uint8)
target = np.empty_like(source)
memcpy.copy(target, source, 4)
assert (target == source).all()
print(available_engines(), selected_engine().name)
""")
        == "('openssl',) openssl\n"
    )


def test_a_gpu_is_refused_with_what_to_do(run):
    said = run("""
import fastrack
try:
    fastrack.Channel("cuda")
except fastrack.DeviceError as error:
    print(error)
""")
    assert said == (
        "opening 'cuda:0' failed: expected numba to compile what the device runs, got NUMBA_DISABLE_JIT=1, which "
        "switches its compiler off. Unset it, or use device='cpu'\n"
    )
