"""Seal a folder of images by class, and train on it with random crops and flips in worker processes.

    python examples/images.py
    python examples/images.py --epochs 20

The images are tiles of the two photographs that scikit-learn ships. The same training on the plain folder must have the
same losses, bit for bit.
"""

import argparse
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fastrack

TILE, CROP = 64, 48  # pixels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        images, sealed, key_file = Path(folder) / "images", Path(folder) / "sealed", Path(folder) / "owner.key"
        write_images(images)
        key = fastrack.Key.generate()
        key.save(key_file)
        count = fastrack.import_samples(images, sealed, key)
        print(f"{count} images sealed, of {sorted(path.name for path in images.iterdir())}")

        # Workers open the images, so they get the key by the path of its file.
        data = fastrack.SealedDataset(sealed, ["image", "label"], keys=key_file, transform=augment)
        losses = train(data, options.epochs, lambda loader: fastrack.wrap(loader, keys=key))
        plain = train(PlainImages(images), options.epochs, iter)
    for epoch, loss in enumerate(losses, 1):
        print(f"epoch {epoch}: loss {loss:.4f}")
    is_same = losses == plain
    print(f"the plain folder gives {'the same losses' if is_same else 'OTHER losses'}, bit for bit")
    return 0 if is_same else 1


def write_images(folder: Path) -> None:
    """Cut the photographs into tiles, one class for each."""
    for name, picture in zip(("temple", "flower"), load_sample_images().images, strict=True):
        (folder / name).mkdir(parents=True)
        for row in range(0, picture.shape[0] - TILE, TILE):
            for column in range(0, picture.shape[1] - TILE, TILE):
                tile = Image.fromarray(picture[row : row + TILE, column : column + TILE])
                tile.save(folder / name / f"{row:03}-{column:03}.jpg")


def augment(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Decode an image, and take a random crop of it, flipped at random. With torchvision this is a transform of its."""
    pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(sample["image"])))).permute(2, 0, 1) / 255
    top, left, flip = torch.randint(TILE - CROP, (3,)).tolist()
    crop = pixels[:, top : top + CROP, left : left + CROP]
    return crop.flip(2) if flip % 2 else crop, int(sample["label"])


class PlainImages(Dataset[Any]):
    """The same samples from the plain folder, in the order of torchvision's ImageFolder."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(folder.iterdir())
        self.files = [(path, label) for label, each in enumerate(classes) for path in sorted(each.iterdir())]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        return augment({"image": path.read_bytes(), "label": label})


def train(data: Any, epochs: int, batches_of: Callable[[Any], Any]) -> list[float]:
    """Train a small network, and return the mean loss of each epoch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    order = torch.Generator().manual_seed(0)  # of the samples, and of the workers' random numbers
    loader = DataLoader(data, 20, shuffle=True, num_workers=2, collate_fn=fastrack.collate, generator=order)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for images, labels in batches_of(loader):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(loader))
    return losses


if __name__ == "__main__":
    sys.exit(main())
