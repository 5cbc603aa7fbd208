"""Profiles of machines that do not exist, whose times are known."""

import random

import pytest

pytest.importorskip("fastrack_bench")

from fastrack_bench.prediction.profiles import Machine, Point, Profile, Stage

MIB = 1 << 20
CACHES = (32 << 10, 1 << 20, 32 << 20)
MACHINE = Machine("Synthetic", 2, caches=CACHES)
GRID = tuple(16384 << shift for shift in range(17))


def line(start, rate):
    """A time of `start` seconds and a byte in 1 / rate."""
    return lambda size: start + size / rate


def points(seconds, sizes=GRID, *, runs=9, noise=0.0, seed=0):
    """Points of a function of the size, with log-normal noise on each run."""
    chosen = random.Random(seed)
    return tuple(
        Point(size, tuple(seconds(size) * chosen.lognormvariate(0, noise) for _ in range(runs))) for size in sizes
    )


def profile(stages, *, source="one.json", machine=MACHINE, **options):
    """A profile of functions of the size, by stage."""
    return Profile(source, machine, {stage: points(seconds, **options) for stage, seconds in stages.items()})


def document(stages, sizes=GRID, runs=(1.0, 1.1, 1.2), *, cpu="Synthetic", caches=CACHES):
    """The document of `fastrack plan measure` for functions of the size, by stage; `runs` are factors."""
    rows = [
        {
            "name": stage.name,
            "threads": stage.threads,
            "row": stage.row,
            "ranks": stage.ranks,
            "size": size,
            "seconds": [seconds(size) * factor for factor in runs],
        }
        for stage, seconds in stages.items()
        for size in sizes
    ]
    machine = {"cpu": {"model": cpu, "threads": 2}, "caches": None if caches is None else list(caches)}
    return {"machine": machine, "settings": {"device": "cpu", "threads": 2}, "plan": rows}


STAGES = {
    Stage("to_device", 1): line(20e-6, 5e9),
    Stage("to_device", 2): line(20e-6, 10e9),
    Stage("to_device, plain tensor", 2): line(30e-6, 5e9),
    Stage("save", 2): line(1e-3, 1e9),
    Stage("load", 2): line(1e-4, 4e9),
    Stage("load, from disk", 2): line(1e-4, 1e9),
    Stage("random rows", 2, row=1024): line(50e-6, 1e9),
    Stage("random rows", 2, row=4096): line(50e-6, 2e9),
    Stage("random rows, DataLoader", 2, row=1024): line(80e-6, 1e9),
    Stage("contiguous rows, DataLoader", 2, row=1024): line(60e-6, 4e9),
    Stage("contiguous rows", 2, row=1024): line(30e-6, 4e9),
    Stage("all-reduce, sealed", ranks=2): line(1e-3, 1e9),
    Stage("all-reduce, sealed", ranks=4): line(3e-3, 0.5e9),
}
