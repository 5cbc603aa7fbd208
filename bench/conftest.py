"""Shared data for the suites. Every suite is grouped so that a thing and its measure stand side by side.

`make bench-compare` measures the benchmarks that are marked as guards. A renamed guard is a new benchmark.
"""

from pkgutil import resolve_name

import numpy as np
import pytest

from fastrack import Channel, Key, seal

MIB = 1 << 20

collect_ignore = [
    "bench_kv.py",
    "bench_revocations.py",
    "bench_strangers.py",
    "bench_vllm.py",
]  # scripts, which take more than the others


def import_private(*names):
    """Import a private name by its present path or, in an earlier revision, by its earlier path.

    Names are as of `pkgutil.resolve_name`, the present one first. `make bench-compare` runs these suites on both sides.
    """
    for name in names:
        try:
            return resolve_name(name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"fastrack has none of {', '.join(names)}")


def sizes(*sizes, guards=()):
    """Give the fixture `size` these numbers of bytes, and mark `guards` among them."""
    marks = {size: pytest.mark.guard if size in guards else () for size in sizes}
    cases = [pytest.param(size, id=size_name(size), marks=marks[size]) for size in sizes]
    return pytest.mark.parametrize("size", cases, indirect=True)


def size_name(size):
    return f"{size // MIB}MiB" if size >= MIB else f"{size >> 10}KiB"


@pytest.fixture(scope="session")
def key():
    return Key.generate()


@pytest.fixture(scope="session")
def channel(key):
    with Channel("cpu", keys=key) as channel:
        yield channel


@pytest.fixture(scope="session")
def plain():
    return np.tile(np.random.default_rng(0).integers(0, 256, 16 * MIB, dtype=np.uint8), 16)  # 256 MiB, soon made


@pytest.fixture(scope="session")
def out(plain):
    return np.ones_like(plain)


@pytest.fixture(scope="session")
def sealed(plain, key):
    return seal(plain, key)


@pytest.fixture
def rate(benchmark):
    """Run and note 1e9 bytes a second, of the median, along with the times."""

    def run(size, action, *arguments, **options):
        rounds = max(5, min(200, (1 << 31) // max(size, 1 << 20)))
        result = benchmark.pedantic(action, arguments, options, rounds=rounds, warmup_rounds=1)
        if benchmark.stats:  # absent with --benchmark-disable
            benchmark.extra_info["GB/s"] = round(size / benchmark.stats.stats.median / 1e9, 2)
        return result

    return run
