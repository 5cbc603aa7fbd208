"""Quantised values on `cpu`: widened while they are opened, against opening alone and against torch after opening."""

import pytest
import torch
from conftest import MIB, sizes

from fastrack import seal

all_sizes = sizes(16 * MIB, 64 * MIB, 256 * MIB)
COLUMNS = 4096


@pytest.fixture(params=["tensor", "row", "block"])
def sealed(request, size, key, benchmark):
    rows = size // COLUMNS
    benchmark.group = f"widen, {size // MIB} MiB, by {request.param}"
    shape = {"tensor": (1, 1), "row": (rows, 1), "block": (rows // 128, COLUMNS // 128)}[request.param]
    values = torch.randint(126, (rows, COLUMNS), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return seal(values, key, scale=torch.rand(shape))


@pytest.fixture
def size(request):
    return request.param


@pytest.fixture
def values(sealed):
    return torch.empty(sealed.shape, dtype=torch.float8_e4m3fn)


@pytest.fixture
def widened(sealed):
    return torch.empty(sealed.shape, dtype=torch.bfloat16)


@all_sizes
def test_widen(rate, size, channel, sealed, widened):
    rate(size, channel.to_device, sealed, out=widened, dtype="BF16")


@all_sizes
def test_open_alone(rate, size, channel, sealed, values):
    rate(size, channel.to_device, sealed, out=values)


@all_sizes
def test_open_and_widen_apart(rate, size, channel, sealed, values, widened):
    """Open, and widen with torch, all into memory that is there. By parts that fit a cache it was no faster."""
    tall, wide = sealed.context.scale.block
    blocks = size // COLUMNS // tall, tall, COLUMNS // wide, wide
    product = torch.empty(sealed.shape)

    def apart():
        channel.to_device(sealed, out=values)
        scales = channel.to_device(sealed.scale).reshape(blocks[0], 1, blocks[2], 1)
        product.copy_(values).view(blocks).mul_(scales)
        widened.copy_(product)

    rate(size, apart)
