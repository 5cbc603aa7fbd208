"""The recipes of docs/data.md for torchvision and timm, where these are installed."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pages import blocks_of
from torch.utils.data import DataLoader

import fastrack

PAGE = Path(__file__).parents[2] / "docs" / "data.md"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PAGE.exists(), reason="the tests run without the documentation"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_a_recipe_trains_on_augmented_samples(tmp_path, key, package):
    pytest.importorskip(package, exc_type=(ImportError, RuntimeError))  # RuntimeError: built for another torch
    image = pytest.importorskip("PIL.Image")
    blocks = blocks_of(PAGE.read_text(encoding="utf-8"))
    (recipe,) = [text for _, text, *_ in blocks if text.startswith((f"from {package}", f"import {package}"))]
    space = {"torch": torch, "io": io, "Image": image}
    exec(recipe, space)

    with fastrack.DatasetWriter(tmp_path, key) as writer:
        for number in range(6):
            memory = io.BytesIO()
            image.fromarray(np.full((260, 300, 3), 40 * number, np.uint8)).save(memory, "PNG")
            writer.write({"image": memory.getvalue(), "label": number})
    data = fastrack.SealedDataset(tmp_path, keys=key, transform=space["augment"])
    (batch,) = fastrack.wrap(DataLoader(data, 6, collate_fn=fastrack.collate))
    pixels, labels = batch
    assert (tuple(pixels.shape), pixels.dtype) == ((6, 3, 224, 224), torch.float32)
    assert labels.tolist() == list(range(6))
    levels = pixels.mean((1, 2, 3))  # whose order timm changes, as it changes the brightness
    assert levels[:2].max() < levels[-2:].min()
