"""Many small tensors in one call, against deriving the keys of their messages; a small model against a plain one."""

import os

import numpy as np
import pytest
import safetensors.torch
import torch
from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from fastrack import KeyRing, load_model, save_model, seal
from fastrack._crypto.message_keys import MessageKeys

try:
    from fastrack._sealed.message_headers import open_headers
except ImportError:  # in an earlier revision, which `make bench-compare` measures
    from fastrack._sealed.headers import open_headers

NESTS = {"1024-of-8KiB": (1024, 8 << 10), "8-of-4KiB": (8, 4 << 10)}
INFO = os.urandom(186)  # as long as for a tensor with a name of a few words
LAYERS = 25  # of 12 parameters each


@pytest.fixture(scope="module", params=NESTS.values(), ids=NESTS)
def nest(request):
    return request.param


def derive(count):
    secret, output, sha512 = bytes(range(32)), bytearray(76), SHA512()
    for _ in range(count):
        HKDFExpand(sha512, len(output), INFO).derive_into(secret, output)


def run(benchmark, nest, action, *arguments, **options):
    count, size = nest
    benchmark.group = f"a nest of {count} tensors of {size >> 10} KiB"
    benchmark.pedantic(action, arguments, options, rounds=max(15, 4000 // count), warmup_rounds=3)


def test_keys_by_openssl(benchmark, nest):
    run(benchmark, nest, derive, nest[0])


@pytest.mark.guard
def test_keys_alone(benchmark, nest, key, plain):
    sealed = [seal(plain[:1], key, f"layers.{number}.weight") for number in range(nest[0])]
    run(benchmark, nest, open_headers, sealed, KeyRing(key), MessageKeys(nest[0]))


@pytest.mark.guard
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_sealed_nest(benchmark, nest, channel, key, plain, framework):
    count, size = nest
    sealed = {f"layers.{number}.weight": seal(plain[:size], key, f"layers.{number}.weight") for number in range(count)}
    run(benchmark, nest, channel.to_device, sealed, framework=framework)


@pytest.mark.guard
def test_sealed_nest_into_its_memory(benchmark, nest, channel, key, plain):
    count, size = nest
    sealed = [seal(plain[:size], key, f"layers.{number}.weight") for number in range(count)]
    run(benchmark, nest, channel.to_device, sealed, out=[np.ones(size, np.uint8) for _ in sealed])


@pytest.mark.guard
def test_plain_nest(benchmark, nest, channel, plain):
    count, size = nest
    run(benchmark, nest, channel.to_device, [plain[:size].copy() for _ in range(count)])


def transformer():
    """300 parameters."""
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def load_plain(module, path):
    module.load_state_dict(safetensors.torch.load_file(path))


@pytest.mark.guard
@pytest.mark.benchmark(group="a transformer of 300 parameters")
def test_load_model(benchmark, tmp_path, key):
    module, path = transformer(), tmp_path / "model.safetensors"
    save_model(module, path, key=key)
    benchmark.pedantic(load_model, (module, path), {"keys": key}, rounds=30, warmup_rounds=2)


@pytest.mark.benchmark(group="a transformer of 300 parameters")
def test_load_plain(benchmark, tmp_path):
    module, path = transformer(), tmp_path / "model.safetensors"
    safetensors.torch.save_file(module.state_dict(), path)
    benchmark.pedantic(load_plain, (module, path), rounds=30, warmup_rounds=2)
