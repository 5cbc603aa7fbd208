"""A call takes few functions of few files, so that a reader can follow it and small tensors arrive soon."""

import gc
import itertools
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import fastrack
from fastrack import Key, KeyRing, SealedDataset, collate, save_file, seal, seal_folder, to_device, wrap
from fastrack._util.public import explained

ROOT = str(Path(fastrack.__file__).parent)
WARMING = 3  # calls that come first: they load modules, and keep what they computed


def layers():
    """Return the number of the layer of each package and file, the highest first."""
    project = tomllib.loads((Path(ROOT).parent / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (listed,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {name: number for number, names in enumerate(listed) for name in names.split(" | ")}


LAYERS = layers()


def layer_of(file):
    """Return the number of the layer of a file; None for ``fastrack`` itself, which is in none."""
    return LAYERS.get(f"fastrack.{Path(file).relative_to(ROOT).parts[0].removesuffix('.py')}")


def caller_of(frame):
    """Return the nearest frame of the package that has called this one: other code may be between them."""
    frame = frame.f_back
    while frame is not None and not frame.f_code.co_filename.startswith(ROOT):
        frame = frame.f_back
    return frame


def way_of(call):
    """Return how many functions of the package a call enters, in how many files, and how often the file changes.

    The last number is how many of the functions are called from a lower layer.
    """
    for _ in range(WARMING):
        call()
    files, climbs = [], []

    def note(frame, event, _):
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        files.append(frame.f_code.co_filename)
        caller = caller_of(frame)
        if caller is not None:
            lower, higher = layer_of(caller.f_code.co_filename), layer_of(files[-1])
            if None not in (lower, higher) and higher < lower:
                climbs.append(files[-1])

    before = sys.getprofile()
    gc.disable()  # what it deletes may have methods of the package
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return len(files), len(set(files)), sum(one != other for one, other in pairwise(files)), len(climbs)


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
    require_short(lambda: to_device(sealed, keys=key, framework="numpy"), 47, 14, 33, 1)
    require_short(lambda: to_device(sealed[[3, 1, 2]], keys=key, framework="numpy"), 65, 16, 42, 1)


def test_a_plain_tensor_takes_a_short_way():
    require_short(lambda: to_device(np.arange(1000.0), framework="numpy"), 56, 13, 35, 1)


def test_a_batch_takes_a_short_way(key, tmp_path):
    data = pytest.importorskip("torch.utils.data")
    path = tmp_path / "data.safetensors"
    save_file({"x": np.arange(1000).reshape(100, 10), "y": np.arange(100)}, path, key)
    loader = data.DataLoader(SealedDataset(path), batch_size=8, collate_fn=collate)
    batches = iter(wrap(loader, keys=key, prefetch=0))
    require_short(lambda: next(batches), 93, 22, 57, 6)


def test_a_folder_takes_a_short_way(key, tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    (tmp_path / "model").mkdir()
    numpy.save_file({"w": np.ones((3, 4))}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text("{}")
    targets = (tmp_path / f"sealed-{number}" for number in itertools.count())
    require_short(lambda: seal_folder(tmp_path / "model", next(targets), key), 585, 37, 287, 3)


def test_a_call_from_a_lower_layer_is_counted():
    assert way_of(explained(KeyRing.default))[3] == 1
    assert way_of(KeyRing.default)[3] == 0
