import sys

import numpy as np
import pytest
from helpers.range_server import RangeServer
from stores import bucket, endpoint, nginx, swift_bucket, swift_server  # noqa: F401 - fixtures

import fastrack
from fastrack._net import connections


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, limited):
    """A cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.delenv("FASTRACK_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))  # compiled code stays where it is
    monkeypatch.delenv("FASTRACK_CACHE_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    limited(first_delay=0.001)
    yield folder / "fastrack" / "remote"
    connections.pool.clear()


@pytest.fixture(autouse=True)
def _empty_store():
    yield
    module = sys.modules.get("helpers.object_store")  # which needs fsspec
    if module is not None:
        module.ObjectStore.clear()


@pytest.fixture
def served(tmp_path):
    """A server of an empty folder."""
    (tmp_path / "served").mkdir()
    with RangeServer(tmp_path / "served") as server:
        yield server


@pytest.fixture
def key():
    return fastrack.Key.generate()


@pytest.fixture
def images():
    return np.random.default_rng(1).integers(0, 256, (40, 1 << 16), np.uint8)


@pytest.fixture
def url(served, key, images):
    """The URL of a sealed file of two tensors, the first of 40 rows of 64 KiB."""
    fastrack.save_file({"images": images, "labels": np.arange(40)}, served.folder / "a.safetensors", key)
    return served.url("a.safetensors")
