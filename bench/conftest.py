"""Shared data for the suites. Every suite is grouped so that a thing and its measure stand side by side."""

from __future__ import annotations

import numpy as np
import pytest

from fastrack import Channel, Key, seal

MIB = 1 << 20


@pytest.fixture(scope="session")
def key():
    return Key.generate()


@pytest.fixture(scope="session")
def channel(key):
    with Channel("cpu", keys=key) as channel:
        yield channel


@pytest.fixture(scope="session")
def plain():
    return np.random.default_rng(0).integers(0, 256, 256 * MIB, dtype=np.uint8)


@pytest.fixture(scope="session")
def out(plain):
    return np.ones_like(plain)


@pytest.fixture(scope="session")
def sealed(plain, key):
    return seal(plain, key)


@pytest.fixture
def rate(benchmark):
    """Run and note 1e9 bytes a second, of the median, beside the times."""

    def run(size, action, *arguments, **options):
        rounds = max(5, min(200, (1 << 31) // max(size, 1 << 20)))
        result = benchmark.pedantic(action, arguments, options, rounds=rounds, warmup_rounds=1)
        benchmark.extra_info["GB/s"] = round(size / benchmark.stats.stats.median / 1e9, 2)
        return result

    return run
