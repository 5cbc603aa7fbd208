"""Checkpoints of torch.distributed.checkpoint: 512 MiB of float32 in 32 tensors, sealed and plain, in turns.

They lie on a file system in memory, where there is one: a disk is another thing to measure. Tensors are loaded into
memory that has been used before.
"""

import os
import random
import shutil
import tempfile
import warnings
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import MIB

from fastrack._bench.measure import timed_rounds
from fastrack.distributed import SealedReader, SealedWriter

TENSORS, SIZE = 32, 512 * MIB
ROUNDS = 8


@pytest.fixture(scope="module")
def folder():
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=place if os.access(place, os.W_OK) else None) as folder:
        yield Path(folder)


def state(fill):
    return {f"w{number}": fill(SIZE // TENSORS // 4) for number in range(TENSORS)}


@pytest.mark.benchmark(group=f"a distributed checkpoint of {SIZE // MIB} MiB")
@pytest.mark.filterwarnings("ignore")
def test_ratio(benchmark, folder, key):
    """Compare the sealed way with the plain one by the medians of runs in turns: see extra_info of the JSON report."""
    saved, loaded = state(torch.randn), state(torch.zeros)
    ways = {
        "save, plain": lambda: dcp.save(saved, storage_writer=dcp.FileSystemWriter(folder / "plain"), no_dist=True),
        "save, sealed": lambda: dcp.save(saved, storage_writer=SealedWriter(folder / "sealed", key), no_dist=True),
        "load, plain": lambda: dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder / "plain"), no_dist=True),
        "load, sealed": lambda: dcp.load(loaded, storage_reader=SealedReader(folder / "sealed", key), no_dist=True),
    }
    seconds = {name: [] for name in ways}
    order = random.Random(0)
    warnings.simplefilter("ignore")
    for _ in range(ROUNDS):
        for path in folder.iterdir():
            shutil.rmtree(path)
        names = list(ways)
        for name in [*order.sample(names[:2], 2), *order.sample(names[2:], 2)]:
            seconds[name] += timed_rounds({name: ways[name]}, 1)[name].seconds
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    medians = {name: median(runs[1:]) for name, runs in seconds.items()}
    ratios = {step: medians[f"{step}, plain"] / medians[f"{step}, sealed"] for step in ("save", "load")}
    benchmark.extra_info["gbps"] = {name: round(SIZE / value / 1e9, 2) for name, value in medians.items()}
    benchmark.extra_info["times as fast as plain"] = {name: round(value, 2) for name, value in ratios.items()}
    print(benchmark.extra_info)
    benchmark.pedantic(ways["load, sealed"], rounds=1)
