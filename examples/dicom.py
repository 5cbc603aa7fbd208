"""Seal a series of DICOM files as samples, and train on it.

    python examples/dicom.py
    python examples/dicom.py --epochs 10

The series is made of the CT slice that pydicom ships: every other slice is turned upside down, which the network
learns to tell. The same training on the plain files must have the same losses, bit for bit.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import torch
from pydicom.data import get_testdata_file
from pydicom.uid import generate_uid
from torch import nn
from torch.utils.data import DataLoader

import fastrack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        series, sealed = Path(folder) / "series", Path(folder) / "sealed"
        write_series(series, 64)
        key = fastrack.Key.generate()
        count = fastrack.import_samples(read_series(series), sealed, key)
        data = fastrack.SealedDataset(sealed, keys=key)
        print(f"{count} slices sealed, each with {', '.join(data.columns)}")

        losses = train(data, options.epochs, fastrack.collate, lambda loader: fastrack.wrap(loader, keys=key))
        plain = train([*read_series(series)], options.epochs, None, iter)
    for epoch, loss in enumerate(losses, 1):
        print(f"epoch {epoch}: loss {loss:.4f}")
    is_same = losses == plain
    print(f"the plain files give {'the same losses' if is_same else 'OTHER losses'}, bit for bit")
    return 0 if is_same else 1


def write_series(folder: Path, count: int) -> None:
    """Write a series: the slice of pydicom with noise, each in a file of its own, in no order of names."""
    folder.mkdir()
    noise, uid = np.random.default_rng(0), generate_uid()
    for number in range(count):
        image = pydicom.dcmread(str(get_testdata_file("CT_small.dcm")))
        pixels = image.pixel_array + noise.integers(-50, 50, image.pixel_array.shape).astype(np.int16)
        image.PixelData = (pixels[::-1] if number % 2 else pixels).tobytes()
        image.SeriesInstanceUID, image.SOPInstanceUID, image.InstanceNumber = uid, generate_uid(), number + 1
        image.ImagePositionPatient = [0, 0, 2.5 * number]
        image.save_as(folder / f"{image.SOPInstanceUID}.dcm")


def read_series(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the slices of a series by position, in Hounsfield units. Other tags, which name a patient, stay behind."""
    images = [pydicom.dcmread(path) for path in folder.iterdir()]
    for image in sorted(images, key=lambda image: float(image.ImagePositionPatient[2])):
        pixels = image.pixel_array * np.float32(image.RescaleSlope) + np.float32(image.RescaleIntercept)
        yield {
            "pixels": pixels.astype(np.float32),
            "position": np.float32(image.ImagePositionPatient[2]),
            "label": np.int64((image.InstanceNumber - 1) % 2),
        }


def train(data: Any, epochs: int, collate: Any, batches_of: Callable[[Any], Any]) -> list[float]:
    """Train a small network, and return the mean loss of each epoch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(256, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(data, 16, shuffle=True, collate_fn=collate, generator=order)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for batch in batches_of(loader):
            loss = nn.functional.cross_entropy(model(batch["pixels"][:, None] / 1000), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(loader))
    return losses


if __name__ == "__main__":
    sys.exit(main())
