"""Files and checkpoints that an earlier revision wrote: they open, and the same bytes are written today."""

import base64
import hashlib
import os

import numpy as np
import pytest

from fastrack import Key, load_checkpoint, load_file, save_checkpoint, save_file, to_device, verify_file

KEY = Key.from_bytes(bytes(range(32)))
TENSORS = {"a": np.arange(6, dtype="<u2").reshape(2, 3), "b": np.zeros(0, np.float32), "p": np.ones(2, np.int8)}
STATE = {"epoch": 3, "w": np.arange(3)}

# Written by revision 581bb38 with random bytes from `random`.
FILE = """
sAEAAAAAAAB7Il9fbWV0YWRhdGFfXyI6eyJub3RlIjoiw7wiLCJmYXN0cmFjay52ZXJzaW9uIjoiMSIsImZhc3RyYWNrLmZpbGUiOiJhZDliMzliYWYw
ZTEwY2YzZTgxNjU2NGQ1NTA1NDQ2YiIsImZhc3RyYWNrLmtleSI6IjhmMzIzMzQzNDk5NWMxMDk2NTlkYWY1YTczNDNkYjBiIiwiZmFzdHJhY2sudGVu
c29ycyI6IntcImFcIjp7XCJkdHlwZVwiOlwiVTE2XCIsXCJzaGFwZVwiOlsyLDNdfSxcImJcIjp7XCJkdHlwZVwiOlwiRjMyXCIsXCJzaGFwZVwiOlsw
XX19In0sImEiOnsiZHR5cGUiOiJVOCIsInNoYXBlIjpbODRdLCJkYXRhX29mZnNldHMiOlswLDg0XX0sImIiOnsiZHR5cGUiOiJVOCIsInNoYXBlIjpb
NzJdLCJkYXRhX29mZnNldHMiOls4NCwxNTZdfSwicCI6eyJkdHlwZSI6Ikk4Iiwic2hhcGUiOlsyXSwiZGF0YV9vZmZzZXRzIjpbMTU2LDE1OF19fSAg
ICAgICBkv/VxrLAhrnSXFbCoTdLcf8E/wW0yCbiad5LPlX7ckHO3zBhVq2q+YfRExHw5vyW7bqd5LQAGunOUzQd88GLmazGBg1xTH78Lve9bnhrGLLvt
3L1kv/VxrLAhrnSXFbCoTdLcf8E/wW0yCbixQcNbnqJ2F0KQd/NTW419KwfwCm8k0cvkNRY1CTqOa/4+IWxdMRhdnX19JhIfueABAQ==
"""
CHECKPOINT = """
kAEAAAAAAAB7Il9fbWV0YWRhdGFfXyI6eyJmYXN0cmFjay52ZXJzaW9uIjoiMSIsImZhc3RyYWNrLmZpbGUiOiJhZDliMzliYWYwZTEwY2YzZTgxNjU2
NGQ1NTA1NDQ2YiIsImZhc3RyYWNrLmtleSI6IjhmMzIzMzQzNDk5NWMxMDk2NTlkYWY1YTczNDNkYjBiIiwiZmFzdHJhY2sudGVuc29ycyI6IntcInNr
ZWxldG9uXCI6e1wiZHR5cGVcIjpcIlU4XCIsXCJzaGFwZVwiOls2NV19LFwiMFwiOntcImR0eXBlXCI6XCJJNjRcIixcInNoYXBlXCI6WzNdfX0iLCJm
YXN0cmFjay5raW5kIjoiY2hlY2twb2ludCJ9LCIwIjp7ImR0eXBlIjoiVTgiLCJzaGFwZSI6Wzk2XSwiZGF0YV9vZmZzZXRzIjpbMCw5Nl19LCJza2Vs
ZXRvbiI6eyJkdHlwZSI6IlU4Iiwic2hhcGUiOlsxMzddLCJkYXRhX29mZnNldHMiOls5NiwyMzNdfX0gZL/1caywIa50lxWwqE3S3H/BP8FtMgm4cGQX
ikEcTGVv0fhmx/uVmUMQsrelCW7Sn6x8KrxrV4k5uTfOOVXrr98i8scaRrEaWbJoqLUkT6lGNWofFBHjW69D/286MkQtZL/1caywIa50lxWwqE3S3H/B
P8FtMgm4/HURwv+bhjpJQJYhmLsI5QmsXNG2+6VwFnhk6DjRyjyjTOGwFX27NgI6GyyCUU/U/3YP9qHSCuU4FuN2XjEp5mPNwmqCRSSVpHfiEsfN3SX+
BVRB6PlFRSbL2TJVltCJlIFNz0+g4bC7rJ0XjCBCsNA=
"""


def random(count):
    """Return the same bytes for each count, so that files are reproducible."""
    return hashlib.shake_128(b"%d" % count).digest(count)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "stored.safetensors"


def test_a_stored_file_opens(path):
    path.write_bytes(base64.b64decode(FILE))
    verify_file(path, KEY)
    with load_file(path) as file:
        assert dict(file.metadata) == {"note": "ü"}
        for name in ("a", "b"):
            array = to_device(file[name], keys=KEY, framework="numpy")
            assert np.array_equal(array, TENSORS[name])
            assert array.dtype == TENSORS[name].dtype
        assert np.array_equal(file.plain["p"], TENSORS["p"])


def test_a_stored_checkpoint_opens(path):
    path.write_bytes(base64.b64decode(CHECKPOINT))
    state = load_checkpoint(path, keys=KEY)
    assert state["epoch"] == 3
    assert np.array_equal(state["w"], STATE["w"])


def test_the_same_bytes_are_written(path, monkeypatch):
    monkeypatch.setattr(os, "urandom", random)
    save_file(TENSORS, path, KEY, plain=["p"], metadata={"note": "ü"})
    assert path.read_bytes() == base64.b64decode(FILE)
    save_checkpoint(path, STATE, key=KEY)
    assert path.read_bytes() == base64.b64decode(CHECKPOINT)
