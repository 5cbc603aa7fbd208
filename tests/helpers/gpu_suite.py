"""Fixtures for tests on a GPU, or on a stand-in for one."""

from importlib.util import find_spec

import pytest


def is_available(config):
    """Return whether a GPU was asked for, or CuPy could use one."""
    return config.getoption("--gpu") is not None or find_spec("cupy") is not None


@pytest.fixture(scope="session")
def device(pytestconfig):
    return pytestconfig.getoption("--gpu") or "cuda:0"


@pytest.fixture(scope="session")
def gpu(device):
    """Open the GPU once. If that fails, the exception is cached, and all other tests are skipped at once."""
    if device == "stand-in":
        from helpers.stand_in_gpu import StandIn

        return StandIn("lazy")
    try:
        from bench.gpu.gpu import Gpu

        return Gpu(device)
    except Exception as error:  # noqa: BLE001 - after any error there is nothing to test
        pytest.skip(f"no usable CUDA device: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
