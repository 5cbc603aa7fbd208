import os
import sys
from pathlib import Path

import pytest

# LMCache's storage, where `make test-all` put it apart: behind all others, so that packages of .venv come first.
APART = Path(__file__).parents[2] / ".lmcache"
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # it would tell its makers, by the network
if APART.is_dir() and str(APART) not in sys.path:
    sys.path.append(str(APART))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    yield
    torch.set_num_threads(threads)
