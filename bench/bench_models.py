"""Weights into a module, from a warm cache: 1 GiB of bfloat16 in 32 tensors, sealed and unencrypted.

`safetensors.torch.load_file` alone maps the file and reads nothing, except with `backend="pread"`. So the time until
the weights are in the module is compared. Fresh memory costs more than everything else, and more the longer ago memory
was given back to the system, so the runs take turns, in another order each time.
"""

from random import Random

import pytest
import safetensors.torch
import torch
from conftest import MIB

from fastrack import load_model, save_model
from fastrack._bench.measure import medians

TENSORS, SIDE = 32, 4096
SIZE = TENSORS * SIDE * SIDE * 2
ROUNDS = 12
GROUP = f"a model of {SIZE // MIB} MiB in {TENSORS} tensors"


def model(device=None, tensors=TENSORS, side=SIDE):
    shape = (side, side)
    return torch.nn.ParameterList(
        torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=device), requires_grad=False)
        for _ in range(tensors)
    )


@pytest.fixture(scope="module")
def paths(tmp_path_factory, key):
    made, folder = model(), tmp_path_factory.mktemp("models")
    for weight in made:
        weight.view(torch.int16).random_(-30_000, 30_000)
    safetensors.torch.save_file(made.state_dict(), folder / "plain.safetensors")
    save_model(made, folder / "sealed.safetensors", key=key)
    return folder / "plain.safetensors", folder / "sealed.safetensors"


@pytest.fixture(scope="module")
def filled():
    return model()


def plain_in_place(module, path):
    module.load_state_dict(safetensors.torch.load_file(path))


def plain_fresh(path, **options):
    model("meta").load_state_dict(safetensors.torch.load_file(path, **options), assign=True)


def plain_fresh_in_memory(path):
    copied = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    model("meta").load_state_dict(copied, assign=True)


@pytest.mark.benchmark(group=GROUP + ", in turns")
def test_ratio(benchmark, paths, key, filled):
    """Compare the sealed way with the plain one by the medians of runs in turns: see extra_info of the JSON report."""
    ways = {
        "sealed": lambda: load_model(filled, paths[1], keys=key),
        "plain": lambda: plain_in_place(filled, paths[0]),
        "sealed, fresh": lambda: load_model(model("meta"), paths[1], keys=key),
        "plain, fresh, read": lambda: plain_fresh(paths[0], backend="pread"),
        "plain, fresh, copied": lambda: plain_fresh_in_memory(paths[0]),
        "plain, mapped": lambda: plain_fresh(paths[0]),
    }
    seconds = medians(ways, ROUNDS, order=Random(0))
    ratios = {
        "sealed to plain": seconds["sealed"] / seconds["plain"],
        "fresh, to read": seconds["sealed, fresh"] / seconds["plain, fresh, read"],
        "fresh, to copied": seconds["sealed, fresh"] / seconds["plain, fresh, copied"],
    }
    benchmark.extra_info["milliseconds"] = {name: round(1e3 * value, 1) for name, value in seconds.items()}
    benchmark.extra_info["ratios"] = {name: round(value, 2) for name, value in ratios.items()}
    print(benchmark.extra_info)
    benchmark.pedantic(ways["sealed"], rounds=1)


@pytest.mark.benchmark(group="many tensors of 8 KiB")
@pytest.mark.parametrize("tensors", [pytest.param(128, marks=pytest.mark.guard), 1024])
def test_many_small_sealed(rate, tensors, tmp_path, key):
    small, path = model(tensors=tensors, side=64), tmp_path / "small.safetensors"
    save_model(small, path, key=key)
    rate(tensors * 8 << 10, load_model, small, path, keys=key)


@pytest.mark.benchmark(group="many tensors of 8 KiB")
@pytest.mark.parametrize("tensors", [128, 1024])
def test_many_small_plain(rate, tensors, tmp_path):
    small, path = model(tensors=tensors, side=64), tmp_path / "small.safetensors"
    safetensors.torch.save_file(small.state_dict(), path)
    rate(tensors * 8 << 10, plain_in_place, small, path)
