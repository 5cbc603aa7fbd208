import numpy as np
import pytest

import fastrack


@pytest.fixture
def file(key, tmp_path):
    tensors = {"x": np.arange(10), "data": np.arange(5), "offsets": np.array([0, 2, 5])}
    fastrack.save_file(tensors, tmp_path / "sealed.safetensors", key)
    with fastrack.load_file(tmp_path / "sealed.safetensors") as opened:
        yield opened


@pytest.fixture
def no_default_keys_afterwards():
    yield
    fastrack.use_keys(None)
