"""Tests for a machine with a GPU. Where none can be used, all of them are skipped, and one of them says why.

``--gpu stand-in`` runs them on host memory, to test the tests.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from helpers.kernel_suite import key, nonce, state  # noqa: F401 - fixtures

import fastrack
from fastrack import Key

sys.path.append(str(Path(__file__).parents[1] / "kernels"))  # whose tests are run here as well

SLOW = 64 << 20  # bytes of an array that takes the GPU a while


def pytest_collection_modifyitems(config, items):
    """Where there is no CuPy, keep one test of each file to say so."""
    if config.getoption("--gpu") == "stand-in" or find_spec("cupy") is not None:
        return
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    kept = {item.path: item for item in reversed(here)}.values()
    left_out = [item for item in here if item not in kept]
    items[:] = [item for item in items if item not in set(left_out)]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def device(pytestconfig):
    return pytestconfig.getoption("--gpu")


@pytest.fixture(scope="session")
def gpu(device):
    """The GPU, opened once. What is raised here is kept, so that every other test is skipped at once."""
    if device == "stand-in":
        from helpers.stand_in_gpu import StandIn

        return StandIn("lazy")
    try:
        from bench.gpu.gpu import Gpu

        return Gpu(device)
    except Exception as error:  # noqa: BLE001 - whatever it is, there is nothing to test
        pytest.skip(f"no usable CUDA device: {str(error).splitlines()[0] if str(error) else type(error).__name__}")


@pytest.fixture(scope="session")
def real(gpu, device):
    """The name of the device, for what makes no sense elsewhere."""
    if device == "stand-in":
        pytest.skip("this needs a GPU")
    assert gpu.driver.name == device
    return device


# The kernels by hand: the fixtures of tests/kernels, on the device.


@pytest.fixture(scope="session")
def host(gpu):
    from bench.gpu.launches import ByteRuns

    return ByteRuns(gpu)


# Transfers.


@pytest.fixture(scope="session")
def owner():
    return Key.generate()


@pytest.fixture(scope="session", params=["torch", "cupy"])
def frame(request, gpu, device):
    """A framework with arrays on the device."""
    if device == "stand-in":
        if request.param == "torch":
            pytest.skip("the stand-in has no torch")
        return _install_stand_in(request, gpu)
    if request.param == "cupy":
        return CupyFrame(device)
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch cannot use a GPU")
    return TorchFrame(device)


def _install_stand_in(request, gpu):
    from helpers import fake_cuda

    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    fake_cuda.install(patch)
    patch.setattr(fastrack._tensors.arrays, "installed", lambda framework: False)
    return StandInFrame(gpu)


class TorchFrame:
    name = "torch"

    def __init__(self, device):
        import torch

        self._torch = torch
        self._device = device

    def make(self, array):
        return self._torch.from_numpy(np.array(array)).to(self._device)

    def read(self, x):
        return x.cpu().numpy()

    def part(self, x, start, stop):
        return x[start:stop]

    def plus_one(self, x):
        return x + 1

    def keep_busy(self):
        """Put some milliseconds of work on the current stream."""
        x = self._torch.zeros(SLOW, dtype=self._torch.uint8, device=self._device)
        for _ in range(100):
            x.add_(1)
        return x

    def side_stream(self):
        return self._torch.cuda.stream(self._torch.cuda.Stream(self._device))


class CupyFrame:
    name = "cupy"

    def __init__(self, device):
        import cupy

        self._cupy = cupy
        cupy.cuda.runtime.setDevice(int(device.removeprefix("cuda:")))

    def make(self, array):
        return self._cupy.asarray(array)

    def read(self, x):
        return self._cupy.asnumpy(x)

    def part(self, x, start, stop):
        return x[start:stop]

    def plus_one(self, x):
        return x + 1

    def keep_busy(self):
        x = self._cupy.zeros(SLOW, dtype=np.uint8)
        for _ in range(100):
            x += 1
        return x

    def side_stream(self):
        return self._cupy.cuda.Stream(non_blocking=True)


class StandInFrame:
    name = "cupy"

    def __init__(self, gpu):
        self._driver = gpu.driver

    def make(self, array):
        return self._driver.array(np.asarray(array))

    def read(self, x):
        return self._driver.read(x)

    def part(self, x, start, stop):
        pytest.skip("the stand-in has no slices")

    def plus_one(self, x):
        return self.make(self.read(x) + np.ones((), x.dtype))

    def keep_busy(self):
        return None

    def side_stream(self):
        return nullcontext()
