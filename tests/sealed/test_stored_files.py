"""Files and checkpoints that an earlier revision wrote: the same bytes are written today, and they open."""

import hashlib
import os

import numpy as np

from fastrack import Key, load_checkpoint, load_file, save_checkpoint, save_file, to_device, verify_file
from fastrack._sealed.file_header import _GUARD_TEXT, GUARD

KEY = Key.from_bytes(bytes(range(32)))
TENSORS = {"a": np.arange(6, dtype="<u2").reshape(2, 3), "b": np.zeros(0, np.float32), "p": np.ones(2, np.int8)}
STATE = {"epoch": 3, "w": np.arange(3)}
# SHA-256 of what revision 581bb38 wrote with random bytes from `random`. Stored files themselves are in tests/golden.
FILE = "073ffae72b5d6b14751aa8e5583e462f8f4436e304175b04476a99d46cc5cd0c"
CHECKPOINT = "c40ad19259917996cd736779271c3832fb75438f2a63d7628326eebcf1e5b22b"


def random(count):
    """Return the same bytes for each count, so that files are reproducible."""
    return hashlib.shake_128(b"%d" % count).digest(count)


def without_guard(path):
    """Return the bytes of a file as they were written before each had the guard."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    head = data[8:start].replace(f',"{GUARD}":{_GUARD_TEXT}'.encode(), b"").rstrip(b" ")
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + data[start:]


def test_the_same_bytes_are_written_and_open(tmp_path, monkeypatch):
    file, checkpoint = tmp_path / "file.safetensors", tmp_path / "checkpoint.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(os, "urandom", random)
        save_file(TENSORS, file, KEY, plain=["p"], metadata={"note": "ü"})
        save_checkpoint(checkpoint, STATE, key=KEY)
    assert hashlib.sha256(without_guard(file)).hexdigest() == FILE
    assert hashlib.sha256(without_guard(checkpoint)).hexdigest() == CHECKPOINT
    verify_file(file, KEY)
    with load_file(file) as opened:
        assert dict(opened.metadata) == {"note": "ü"}
        for name in ("a", "b"):
            array = to_device(opened[name], keys=KEY, framework="numpy")
            assert np.array_equal(array, TENSORS[name])
            assert array.dtype == TENSORS[name].dtype
        assert np.array_equal(opened.plain["p"], TENSORS["p"])
    state = load_checkpoint(checkpoint, keys=KEY)
    assert state["epoch"] == 3
    assert np.array_equal(state["w"], STATE["w"])
