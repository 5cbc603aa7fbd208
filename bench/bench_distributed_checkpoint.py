"""Checkpoints of torch.distributed.checkpoint: 512 MiB of float32 in 32 tensors, sealed and plain, in turns.

They lie on a file system in memory, if there is one, so that no disk is measured. Tensors are loaded into memory that
has been used before.
"""

import os
import shutil
import tempfile
import warnings
from pathlib import Path
from random import Random
from statistics import median

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fastrack._bench.measure import timed_rounds

try:
    from fastrack.distributed import CheckpointReader, CheckpointWriter
except ImportError:  # in an earlier revision, which `make bench-compare` measures
    from fastrack.distributed import SealedReader as CheckpointReader
    from fastrack.distributed import SealedWriter as CheckpointWriter

MIB = 1 << 20
TENSORS, SIZE = 32, 512 * MIB
ROUNDS = 8


@pytest.fixture(scope="module")
def folder():
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


def state(fill, size):
    return {f"w{number}": fill(size // TENSORS // 4) for number in range(TENSORS)}


def measure(folder, key, *, size=SIZE, rounds=ROUNDS):
    """Return the median seconds of saving and loading, by step and way."""
    saved, loaded = state(torch.randn, size), state(torch.zeros, size)
    ways = {
        "save, plain": lambda: dcp.save(saved, storage_writer=dcp.FileSystemWriter(folder / "plain"), no_dist=True),
        "save, sealed": lambda: dcp.save(saved, storage_writer=CheckpointWriter(folder / "sealed", key), no_dist=True),
        "load, plain": lambda: dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder / "plain"), no_dist=True),
        "load, sealed": lambda: dcp.load(loaded, storage_reader=CheckpointReader(folder / "sealed", key), no_dist=True),
    }
    order, seconds = Random(0), {name: [] for name in ways}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(rounds + 1):  # the first round warms up
            for path in folder.iterdir():
                shutil.rmtree(path)
            for step in ("save", "load"):
                runs = {name: way for name, way in ways.items() if name.startswith(step)}
                for name, times in timed_rounds(runs, 1, order=order).items():
                    seconds[name] += times.seconds
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    return {name: median(runs[1:]) for name, runs in seconds.items()}


@pytest.mark.benchmark(group=f"a distributed checkpoint of {SIZE // MIB} MiB")
def test_ratio(benchmark, folder, key):
    """Compare the sealed way with the plain one by the medians of runs in turns: see extra_info of the JSON report."""
    seconds = benchmark.pedantic(measure, (folder, key), rounds=1)
    ratios = {step: seconds[f"{step}, plain"] / seconds[f"{step}, sealed"] for step in ("save", "load")}
    benchmark.extra_info["gbps"] = {name: round(SIZE / value / 1e9, 2) for name, value in seconds.items()}
    benchmark.extra_info["times as fast as plain"] = {name: round(value, 2) for name, value in ratios.items()}
    print(benchmark.extra_info)
