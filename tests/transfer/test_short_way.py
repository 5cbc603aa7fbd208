"""A call takes few functions of few files, so that a reader can follow it and small tensors arrive soon."""

import gc
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import fastrack
from fastrack import Key, SealedDataset, collate, save_file, seal, to_device, wrap

ROOT = str(Path(fastrack.__file__).parent)
WARMING = 3  # calls that come first: they load modules, and keep what they computed


def way_of(call):
    """Return how many functions of the package a call enters, in how many files, and how often the file changes."""
    for _ in range(WARMING):
        call()
    files = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    gc.disable()  # what it deletes may have methods of the package
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return len(files), len(set(files)), sum(one != other for one, other in pairwise(files))


@pytest.fixture(autouse=True)
def no_file_on_a_server(monkeypatch):
    """A process that has opened one looks for such files in every call."""
    monkeypatch.delitem(sys.modules, "fastrack._remote.remote_file", raising=False)


@pytest.fixture
def key():
    return Key.generate()


def require_short(call, *bounds):
    way = way_of(call)
    assert all(count <= bound for count, bound in zip(way, bounds, strict=True)), way


def test_a_sealed_tensor_takes_a_short_way(key):
    sealed = seal(np.arange(100_000, dtype=np.float32), key)
    require_short(lambda: to_device(sealed, keys=key, framework="numpy"), 52, 15, 36)
    require_short(lambda: to_device(sealed[[3, 1, 2]], keys=key, framework="numpy"), 68, 16, 44)


def test_a_plain_tensor_takes_a_short_way():
    require_short(lambda: to_device(np.arange(1000.0), framework="numpy"), 57, 13, 35)


def test_a_batch_takes_a_short_way(key, tmp_path):
    data = pytest.importorskip("torch.utils.data")
    path = tmp_path / "data.safetensors"
    save_file({"x": np.arange(1000).reshape(100, 10), "y": np.arange(100)}, path, key)
    loader = data.DataLoader(SealedDataset(path), batch_size=8, collate_fn=collate)
    batches = iter(wrap(loader, keys=key, prefetch=0))
    require_short(lambda: next(batches), 96, 21, 56)
