"""Calls under ``torch.compile``, whose graph breaks there."""

import numpy as np
import pytest
import torch
from helpers.cases import each

import fastrack


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns of its own modules
@each(
    "open_it",
    [
        lambda sealed: sealed.to("cpu"),
        fastrack.to_device,
        lambda sealed: sealed[1:].to(),
        lambda sealed: fastrack.to_device({"x": sealed, "y": torch.ones(3)})["x"],
    ],
)
def test_a_compiled_function_opens_what_is_sealed(open_it, tmp_path):
    key = fastrack.Key.generate()
    fastrack.save_file({"x": np.arange(5.0)}, tmp_path / "a.safetensors", key)
    sealed = fastrack.load_file(tmp_path / "a.safetensors")["x"]
    torch._dynamo.reset()
    with fastrack.use_keys(key):
        assert torch.compile(lambda sealed: open_it(sealed).sum() + 1, backend="eager")(sealed).item() == 11
