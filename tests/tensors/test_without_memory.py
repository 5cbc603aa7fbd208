"""Tensors of torch that have no memory: of FakeTensorMode, of transforms, and of the meta device."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import fastrack
from fastrack import Key

KEY = Key.from_bytes(bytes(range(32)))
SIZES = (1, 3000, 400_000)  # elements: results of torch's own memory, and of memory of fastrack


class OnMeta(TorchFunctionMode):
    """A mode that has every function make its results on the meta device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_opened_into_a_fake_tensor(size, tmp_path):
    values = {"x": torch.arange(size, dtype=torch.float32), "y": torch.ones(size, dtype=torch.bfloat16)}
    fastrack.save_file(values, tmp_path / "a.safetensors", KEY)
    fastrack.save_checkpoint(tmp_path / "run.safetensors", values, KEY)
    sealed = fastrack.load_file(tmp_path / "a.safetensors")
    for open_it in (
        lambda: fastrack.to_device(sealed["x"], keys=KEY),
        lambda: fastrack.to_device({"y": sealed["y"]}, keys=KEY),
        lambda: fastrack.unseal(sealed["y"], KEY),
        lambda: fastrack.to_device(sealed["x"][:], keys=KEY),
        lambda: fastrack.to_device(values["x"]),
        lambda: list(fastrack.wrap([sealed["x"]], keys=KEY, prefetch=0)),
        lambda: fastrack.load_tensors(tmp_path / "a.safetensors", keys=KEY),
        lambda: fastrack.load_checkpoint(tmp_path / "run.safetensors", KEY),
        lambda: fastrack.to_device(sealed["x"], keys=KEY, out=torch.empty(size)),
        lambda: fastrack.seal(torch.empty(size), KEY),
    ):
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(TypeError, match="FakeTensor"):
            open_it()
        with FakeTensorMode(), pytest.raises(TypeError, match="FakeTensor"):
            open_it()
    assert torch.equal(fastrack.to_device(sealed["x"], keys=KEY), values["x"])


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_opened_into_a_functional_tensor(size):
    sealed = fastrack.seal(torch.ones(size), KEY)
    for use in (
        lambda x: x + fastrack.to_device(sealed, keys=KEY),
        lambda x: fastrack.to_device(sealed, keys=KEY, out=x),
        fastrack.to_device,
        lambda x: (fastrack.seal(x, KEY), x)[1],
    ):
        with pytest.raises(TypeError, match=r"functional tensor.*functionalize"):
            torch.func.functionalize(use)(torch.ones(size))


@pytest.mark.parametrize("size", SIZES)
def test_a_mode_of_another_device_does_not_move_a_result(size):
    sealed = fastrack.seal(np.ones(size), KEY)
    with OnMeta():
        opened = fastrack.to_device(sealed, keys=KEY, framework="torch")
    assert (opened.device.type, opened.sum().item()) == ("cpu", size)


@pytest.mark.parametrize("size", SIZES)
def test_a_result_in_a_transform_has_its_values(size):
    sealed = fastrack.seal(torch.ones(size), KEY)
    gradient = torch.func.grad(lambda x: (x * fastrack.to_device(sealed, keys=KEY)).sum())(torch.ones(size))
    assert gradient.sum().item() == size
    with pytest.raises(TypeError, match=r"torch\.func"):
        torch.func.grad(lambda x: fastrack.to_device(x).sum())(torch.ones(size))
