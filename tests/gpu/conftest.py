"""Tests for a machine with a GPU. Without CuPy each file is skipped; without a GPU each test is.

``--gpu stand-in`` runs them on host memory, to test the tests. The kernels' own tests are in ``tests/kernels``.
"""

from contextlib import nullcontext

import numpy as np
import pytest
from helpers import gpu_suite

import fastrack
from fastrack import Key

device, gpu = gpu_suite.device, gpu_suite.gpu  # fixtures
SLOW = 64 << 20  # bytes of an array that takes the GPU a while


class Unavailable(pytest.Module):
    """A file of tests that is skipped in one line."""

    def collect(self):
        pytest.skip("CuPy is not installed; --gpu stand-in needs neither CuPy nor a GPU", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if not gpu_suite.is_available(parent.config):
        return Unavailable.from_parent(parent, path=module_path)
    return None


@pytest.fixture(scope="session")
def real(gpu, device):
    """The name of the device, for what makes no sense elsewhere."""
    if device == "stand-in":
        pytest.skip("this needs a GPU")
    assert gpu.driver.name == device
    return device


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


class Frame:
    """Arrays of a framework on a device, as far as frameworks agree."""

    def part(self, x, start, stop):
        return x[start:stop]

    def plus_one(self, x):
        return x + 1

    def keep_busy(self):
        """Put some milliseconds of work on the current stream."""
        x = self.make(np.zeros(SLOW, np.uint8))
        for _ in range(100):
            x += 1
        return x


class TorchFrame(Frame):
    name = "torch"

    def __init__(self, device):
        import torch

        self._torch = torch
        self._device = device

    def make(self, array):
        return self._torch.from_numpy(np.array(array)).to(self._device)

    def read(self, x):
        return x.cpu().numpy()

    def side_stream(self):
        return self._torch.cuda.stream(self._torch.cuda.Stream(self._device))


class CupyFrame(Frame):
    name = "cupy"

    def __init__(self, device):
        import cupy

        self._cupy = cupy
        cupy.cuda.runtime.setDevice(int(device.removeprefix("cuda:")))

    def make(self, array):
        return self._cupy.asarray(array)

    def read(self, x):
        return self._cupy.asnumpy(x)

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
