"""Tours: a visit's own work, and the bytes of a holder into its buffer beside `to_device` with the same ``out=``.

The visit has a model and data of a few bytes, so what is measured is fastrack's own work: both challenges, evidence of
a made-up machine, which owner and holder verify, grants, three durable writes at the desks, the
new folder, its manifest and receipt. Connections are left out: the desks are in the process.
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import fastrack
from fastrack import tour

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from helpers import tour_rig
from helpers.foundry.machine import Machine, policy

VISITS = 9  # a tour: its chain is verified as a whole at each visit
ROUNDS = 100


@pytest.mark.benchmark(group="a visit of a tour")
@pytest.mark.parametrize(("cpu", "gpus"), [("snp", 0), ("tdx", 1)], ids=["SEV-SNP", "TDX and a GPU"])
def test_visit(benchmark, tmp_path, monkeypatch, cpu, gpus):
    machine = Machine(cpu, gpus)
    monkeypatch.setattr(tour_rig, "machine", lambda: machine)
    monkeypatch.setattr(tour_rig, "policy", lambda _: policy(gpus))
    rigs = []

    def next_visit():
        number = len(rigs) and rigs[-1].done
        if not rigs or number == VISITS:
            folder = tmp_path / str(len(rigs))
            folder.mkdir()
            rigs.append(tour_rig.Rig(folder, order=tour_rig.NAMES * (VISITS // 3)))
            rigs[-1].done = number = 0
        rigs[-1].done += 1
        return (number,), {}

    def visit(number):
        return rigs[-1].visit(number)

    benchmark.pedantic(visit, setup=next_visit, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["visits of a tour"] = VISITS


SIZE = 64 << 20


@pytest.fixture(scope="module")
def shard(key):
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        fastrack.save_file({"x": np.ones(SIZE, np.uint8)}, Path(folder) / "shard.safetensors", key)
        with fastrack.load_file(Path(folder) / "shard.safetensors") as file:
            yield file


@pytest.mark.benchmark(group=f"{SIZE >> 20} MiB of a holder into a buffer")
def test_buffer(benchmark, shard, key):
    buffer, ring = tour.DataBuffer(SIZE), fastrack.KeyRing(key)
    benchmark(buffer.open, shard, ring)
    benchmark.extra_info["bytes"] = SIZE


@pytest.mark.benchmark(group=f"{SIZE >> 20} MiB of a holder into a buffer")
def test_to_device(benchmark, shard, key):
    import torch

    ring, out = fastrack.KeyRing(key), torch.zeros(SIZE, dtype=torch.uint8)
    benchmark(fastrack.to_device, shard["x"], "cpu", keys=ring, out=out)
    benchmark.extra_info["bytes"] = SIZE
