"""Seal lines of text with labels as records, and train a classifier on their bytes.

    python examples/text.py
    python examples/text.py --epochs 20

The lines are those of the descriptions of datasets that scikit-learn ships; the label of a line is the file that it is
from. The same training on the plain lines must have the same losses, bit for bit.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sklearn.datasets
import torch
from torch import nn
from torch.utils.data import DataLoader

import fastrack

BATCH = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    files = list_files()
    lines = [
        {"text": line, "label": label}
        for label, file in enumerate(files)
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(lines), generator=generator) for _ in range(options.epochs)]

    with tempfile.TemporaryDirectory() as folder:
        source, sealed = Path(folder) / "lines.jsonl", Path(folder) / "sealed"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        key = fastrack.Key.generate()
        count = fastrack.import_samples(source, sealed, key)
        print(f"{count} lines of {len(files)} files sealed as records")

        data = fastrack.SealedDataset(sealed, keys=key)
        print(f"columns of a sample: {', '.join(data.columns)}")
        losses = train(
            fastrack.wrap(DataLoader(data, BATCH, sampler=order.tolist(), collate_fn=fastrack.collate), keys=key)
            for order in orders
        )
    plain = train(map(plain_batch, [[lines[row] for row in rows] for rows in order.split(BATCH)]) for order in orders)
    for epoch, loss in enumerate(losses, 1):
        print(f"epoch {epoch}: loss {loss:.4f}")
    is_same = losses == plain
    print(f"the plain lines give {'the same losses' if is_same else 'OTHER losses'}, bit for bit")
    return 0 if is_same else 1


def list_files() -> list[Path]:
    return sorted((Path(sklearn.datasets.__file__).parent / "descr").glob("*.rst"))


def plain_batch(lines: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Make a batch as a sealed dataset does: records padded with zeros, and their lengths."""
    texts = [torch.tensor(list(line["text"].encode()), dtype=torch.uint8) for line in lines]
    lengths = torch.tensor([len(text) for text in texts])
    padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"text": padded, "text.lengths": lengths, "label": torch.tensor([line["label"] for line in lines])}


def train(epochs: Iterable[Iterable[dict[str, torch.Tensor]]]) -> list[float]:
    """Train a classifier on pairs of neighbouring bytes, and return the mean loss of each epoch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.EmbeddingBag(1 << 16, len(list_files()), mode="sum")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for batches in epochs:
        of_epoch = []
        for batch in batches:
            text = batch["text"].long()
            pairs = (text[:, :-1] << 8) + text[:, 1:]
            is_inside = torch.arange(1, text.shape[1]) < batch["text.lengths"][:, None]
            guesses = model(pairs, per_sample_weights=is_inside.float())
            loss = nn.functional.cross_entropy(guesses, batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            of_epoch.append(loss.item())
        losses.append(sum(of_epoch) / len(of_epoch))
    return losses


if __name__ == "__main__":
    sys.exit(main())
