"""Transfers to the `cpu` device: the direct path, the bounce path in both forms, the plain copy that bounds them."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import MIB

from fastrack import seal, unseal
from fastrack.bounce import BouncePath, ParallelBouncePath

SIZES = [4 << 10, MIB, 16 * MIB, 256 * MIB]


@pytest.fixture(params=SIZES, ids=lambda size: f"{size >> 10}KiB")
def size(request, benchmark):
    benchmark.group = f"to_device, {request.param >> 10} KiB"
    return request.param


def test_plain_copy(rate, size, plain, out):
    rate(size, np.copyto, out[:size], plain[:size])


def test_plain_copy_fresh(rate, size, plain):
    rate(size, plain[:size].copy)


def test_direct_sealed(rate, size, channel, key, plain, out):
    rate(size, channel.to_device, seal(plain[:size], key), out=out[:size])


def test_direct_sealed_fresh(rate, size, channel, key, plain):
    rate(size, channel.to_device, seal(plain[:size], key), framework="numpy")


def test_direct_plain(rate, size, channel, plain, out):
    rate(size, channel.to_device, plain[:size], out=out[:size])


def test_to_host(rate, size, channel, plain):
    rate(size, channel.to_host, plain[:size])


def test_unseal(rate, size, key, plain):
    rate(size, unseal, seal(plain[:size], key), key, framework="numpy")


@pytest.mark.parametrize("path", [BouncePath, ParallelBouncePath])
def test_bounce_sealed(rate, size, path, plain, out):
    bounce = path(size)
    rate(size, bounce.sealed_to_device, bounce.seal(plain[:size]), out[:size])


@pytest.mark.parametrize("path", [BouncePath, ParallelBouncePath])
def test_bounce_plain(rate, size, path, plain, out):
    rate(size, path(size).plain_to_device, plain[:size], out[:size])


@pytest.mark.parametrize("row", [784, 4096, 150_528])
def test_shuffled_rows(rate, benchmark, row, channel, plain, key):
    benchmark.group = f"256 rows of {row} bytes, shuffled"
    table = seal(plain[: len(plain) // row * row].reshape(-1, row), key)
    rows = np.random.default_rng(0).permutation(len(table))[:256]
    rate(256 * row, lambda: channel.to_device(table[rows], framework="numpy"))
