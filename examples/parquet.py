"""Seal the columns of a Parquet file, and train on them; then read the Parquet file itself while it stays sealed.

    python examples/parquet.py
    python examples/parquet.py --epochs 20

The table has the digits that scikit-learn ships. Needs PyArrow: pip install pyarrow. The same training on the plain
table must have the same losses, bit for bit.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import torch
from pyarrow import parquet
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

import fastrack

BATCH = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        source, sealed = Path(folder) / "digits.parquet", Path(folder) / "sealed"
        write_table(source)
        key = fastrack.Key.generate()
        count = fastrack.import_samples(source, sealed, key)
        data = fastrack.SealedDataset(sealed, keys=key)
        print(f"{count} rows sealed, columns: {', '.join(data.columns)}")
        loader = DataLoader(data, BATCH, collate_fn=fastrack.collate)
        losses = train([fastrack.wrap(loader, keys=key)] * options.epochs)

        table = parquet.read_table(source)
        columns = {name: torch.tensor(table[name].to_pylist()) for name in ("pixels", "digit")}
        batches = [
            {name: column[row : row + BATCH] for name, column in columns.items()} for row in range(0, count, BATCH)
        ]
        plain = train([batches] * options.epochs)

        # Sealed as it is, the file is still a Parquet file to PyArrow: reading one column opens its chunks only.
        fastrack.seal_file(source, sealed / "whole", key)
        with fastrack.open_bytes(fastrack.load_file(sealed / "whole")[source.name], key) as file:
            digits = parquet.ParquetFile(file).read(["digit"])
    for epoch, loss in enumerate(losses, 1):
        print(f"epoch {epoch}: loss {loss:.4f}")
    is_same = losses == plain and digits.equals(table.select(["digit"]))
    print(f"the plain table gives {'the same losses' if is_same else 'OTHER losses'}, bit for bit")
    return 0 if is_same else 1


def write_table(path: Path) -> None:
    pixels, digits = load_digits(return_X_y=True)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(pixels.astype("float32").ravel()), pixels.shape[1])
    names = [f"digit {digit}" for digit in digits]
    parquet.write_table(pa.table({"pixels": rows, "digit": digits, "name": names}), path, row_group_size=500)


def train(epochs: Iterable[Iterable[dict[str, torch.Tensor]]]) -> list[float]:
    """Train a linear classifier, and return the mean loss of each epoch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for batches in epochs:
        of_epoch = []
        for batch in batches:
            loss = nn.functional.cross_entropy(model(batch["pixels"]), batch["digit"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            of_epoch.append(loss.item())
        losses.append(sum(of_epoch) / len(of_epoch))
    return losses


if __name__ == "__main__":
    sys.exit(main())
