"""Test fastrack without its native extension, as where there is no wheel for the system."""

import pytest
from helpers.processes import run_python

WITHOUT = """
import sys
sys.modules["fastrack._crypto._native"] = None
"""


@pytest.fixture
def run(tmp_path):
    """Runs a program without the native extension, in a folder of its own, and gives what it prints."""

    def run(code, engine="openssl"):
        return run_python(WITHOUT + code, cwd=tmp_path, FASTRACK_ENGINE=engine)

    return run


def test_openssl_takes_its_place_with_one_warning_that_says_what_to_do(run):
    said = run(
        """
import warnings
import numpy as np
import fastrack
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    key = fastrack.Key.generate()
    for _ in range(3):
        assert (fastrack.unseal(fastrack.seal(np.arange(5), key), key, framework="numpy") == np.arange(5)).all()
print(*(f"{warning.category.__name__}: {warning.message}" for warning in told), sep="\\n")
""",
        engine="",
    )
    (warning,) = said.splitlines()
    assert warning.startswith(
        "RuntimeWarning: fastrack runs without its native extension, on OpenSSL, which is slower: "
    )
    for advice in ("Install a wheel", "`make native`", "FASTRACK_ENGINE=openssl"):
        assert advice in warning


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
from fastrack._crypto import engine, memcpy
from fastrack.format import SEALED_CHUNK_SIZE

source = np.random.default_rng(0).integers(0, 256, 99 * SEALED_CHUNK_SIZE + 77, np.uint8)
target = np.empty_like(source)
memcpy.copy(target, source, 4)
assert (target == source).all()
print(engine.available_engines(), engine.selected_engine().name)
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
    expected = "opening 'cuda:0' failed: expected fastrack's native extension, which issues its commands, got none: "
    assert said.startswith(expected)
    assert said.endswith("Until then use device='cpu'\n")
