"""Sealed files, from a warm cache."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import MIB

from fastrack import SealedDataset, load_file, save_file, seal, verify_file


@pytest.fixture(scope="module")
def memory():
    """A folder in memory, if there is one, so that no disk is measured."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.mark.guard
@pytest.mark.benchmark(group="a file of 16 MiB")
def test_save_16mib(rate, memory, key, plain):
    rate(16 * MIB, save_file, {"data": plain[: 16 * MIB]}, memory / "saved.safetensors", key)


@pytest.fixture(scope="module")
def small(memory, key, plain):
    path = memory / "small.safetensors"
    save_file({"data": plain[: 16 * MIB]}, path, key)
    return path


@pytest.mark.guard
@pytest.mark.benchmark(group="a file of 16 MiB")
def test_verify_16mib(rate, small, key):
    rate(16 * MIB, verify_file, small, key)


@pytest.mark.guard
@pytest.mark.benchmark(group="small things in a file")
def test_open_and_close(benchmark, small):
    benchmark(lambda: load_file(small).close())


@pytest.mark.guard
@pytest.mark.benchmark(group="small things in a file")
def test_one_row(benchmark, small, channel):
    with load_file(small) as file:
        tensor = file["data"]
        assert isinstance(benchmark(lambda: channel.to_device(tensor[5 * MIB], framework="numpy")), np.ndarray)


@pytest.fixture(scope="module")
def shards(memory, key):
    paths = [memory / f"shard{number}.safetensors" for number in range(100)]
    for path in paths:
        path.write_bytes(seal(np.zeros((8, 32), np.float32), key, name="x").to_bytes())
    return paths


@pytest.mark.guard
@pytest.mark.benchmark(group="small things in a file")
def test_open_100_shards(benchmark, shards):
    assert len(benchmark(SealedDataset, shards)) == 800
