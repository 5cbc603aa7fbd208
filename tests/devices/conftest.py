import pytest
from helpers import fake_cuda
from helpers.cuda_rig import Opened


@pytest.fixture(autouse=True)
def _cupy(request, monkeypatch):
    """Have arrays of the fake device taken for CuPy's in tests of the CUDA device."""
    if request.module.__name__.startswith("test_cuda"):
        fake_cuda.install(monkeypatch)


@pytest.fixture(params=fake_cuda.MODES)
def opened(request):
    opened = Opened(request.param)
    yield opened
    opened.close()
