"""Sealed files, from a warm cache."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import MIB

from fastrack import load_file, save_file, to_device, verify_file


@pytest.fixture(scope="module")
def path(tmp_path_factory, key, plain):
    path = tmp_path_factory.mktemp("files") / "data.safetensors"
    save_file({"data": plain, "small": plain[:MIB]}, path, key)
    return path


@pytest.mark.benchmark(group="a file of 257 MiB")
def test_read(rate, path):
    rate(257 * MIB, path.read_bytes)


@pytest.mark.benchmark(group="a file of 257 MiB")
def test_verify(rate, path, key):
    assert all(check.error is None for check in rate(257 * MIB, lambda: list(verify_file(path, key))))


@pytest.mark.benchmark(group="a file of 257 MiB")
def test_to_device(rate, path, key, out):
    with load_file(path) as file:
        rate(256 * MIB, to_device, file["data"], keys=key, out=out)


@pytest.mark.benchmark(group="small things in a file")
def test_open_and_close(benchmark, path):
    benchmark(lambda: load_file(path).close())


@pytest.mark.benchmark(group="small things in a file")
def test_one_row(benchmark, path, channel):
    with load_file(path) as file:
        tensor = file["data"]
        assert isinstance(benchmark(lambda: channel.to_device(tensor[5 * MIB], framework="numpy")), np.ndarray)
