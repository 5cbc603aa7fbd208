"""Transfers to the `cpu` device: the direct path, the bounce path in both forms, the plain copy that bounds them."""

import numpy as np
import pytest
from conftest import MIB, import_private, size_name, sizes

from fastrack import seal, unseal

BouncePath, ParallelBouncePath = (
    import_private(f"fastrack._bench.paths:{name}", f"fastrack.bounce:{name}")
    for name in ("BouncePath", "ParallelBouncePath")
)
SIZES = [4 << 10, MIB, 16 * MIB, 64 * MIB, 256 * MIB]
SMALL, MIDDLE, LARGE = SIZES[1:4]
all_sizes = sizes(*SIZES)


@pytest.fixture
def size(request, benchmark):
    benchmark.group = f"to_device, {size_name(request.param)}"
    return request.param


@all_sizes
def test_plain_copy(rate, size, plain, out):
    rate(size, np.copyto, out[:size], plain[:size])


@all_sizes
def test_plain_copy_fresh(rate, size, plain):
    rate(size, plain[:size].copy)


@sizes(*SIZES, guards=SIZES[:4])
def test_direct_sealed(rate, size, channel, key, plain, out):
    rate(size, channel.to_device, seal(plain[:size], key), out=out[:size])


@sizes(*SIZES, guards=[SMALL, LARGE])
def test_direct_sealed_fresh(rate, size, channel, key, plain):
    rate(size, channel.to_device, seal(plain[:size], key), framework="numpy")


@sizes(*SIZES, guards=SIZES[1:4])
def test_direct_plain(rate, size, channel, plain, out):
    rate(size, channel.to_device, plain[:size], out=out[:size])


@sizes(*SIZES, guards=[MIDDLE])
def test_to_host(rate, size, channel, plain):
    rate(size, channel.to_host, plain[:size])


@sizes(*SIZES, guards=[MIDDLE])
def test_seal(rate, size, key, plain):
    rate(size, seal, plain[:size], key)


@sizes(*SIZES, guards=[MIDDLE])
def test_unseal(rate, size, key, plain):
    rate(size, unseal, seal(plain[:size], key), key, framework="numpy")


@all_sizes
@pytest.mark.parametrize("path", [BouncePath, ParallelBouncePath])
def test_bounce_sealed(rate, size, path, plain, out):
    bounce = path(size)
    rate(size, bounce.sealed_to_device, bounce.seal(plain[:size]), out[:size])


@all_sizes
@pytest.mark.parametrize("path", [BouncePath, ParallelBouncePath])
def test_bounce_plain(rate, size, path, plain, out):
    rate(size, path(size).plain_to_device, plain[:size], out[:size])


@pytest.mark.guard
@pytest.mark.parametrize("row", [784, 4096, 150_528])
def test_shuffled_rows(rate, benchmark, row, channel, plain, key):
    benchmark.group = f"256 rows of {row} bytes out of 64 MiB, shuffled"
    table = seal(plain[: LARGE // row * row].reshape(-1, row), key)
    rows = np.random.default_rng(0).permutation(len(table))[:256]
    rate(256 * row, lambda: channel.to_device(table[rows], framework="numpy"))
