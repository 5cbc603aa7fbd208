"""A loop with Hugging Face Accelerate, over batches that fastrack brings to the device. Takes `accelerate`.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

Accelerate prepares the model and the optimizer, but not the loader: the sampler selects the samples of each process,
and `wrap` moves its batches to its device, which is what `prepare` would do.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import fastrack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--gpu", action="store_true", help="train on GPUs, one for each process")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=not options.gpu)
    with tempfile.TemporaryDirectory() as folder:
        if accelerator.is_main_process:
            seal(Path(folder))
        (place,) = broadcast_object_list([folder])  # that of the main process
        score = train(accelerator, Path(place), options.epochs)
    accelerator.print(f"{score:.1%} of the labels were guessed")
    accelerator.end_training()
    return 0


def seal(folder: Path) -> None:
    """Make a key and seal the data, as its owner does beforehand and elsewhere."""
    random = np.random.default_rng(0)
    images = random.standard_normal((2000, 64), np.float32)
    labels = (images @ random.standard_normal((64, 10), np.float32)).argmax(1)
    key = fastrack.Key.generate()
    key.save(folder / "owner.key")
    fastrack.save_file({"images": images, "labels": labels}, folder / "train.safetensors", key=key)


def train(accelerator: Accelerator, folder: Path, epochs: int) -> float:
    data = fastrack.SealedDataset(folder / "train.safetensors")
    sampler = DistributedSampler(data, accelerator.num_processes, accelerator.process_index)
    loader = DataLoader(data, batch_size=50, sampler=sampler, collate_fn=fastrack.collate)
    device = accelerator.device
    batches = fastrack.wrap(loader, device, keys=folder / "owner.key")

    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        total = torch.zeros((), device=accelerator.device)
        for batch in batches:
            loss = nn.functional.cross_entropy(model(batch["images"]), batch["labels"])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(total, 'mean').item() / len(batches):.4f}")
    return guess(accelerator, model, batches)


@torch.no_grad()
def guess(accelerator: Accelerator, model: nn.Module, batches: Iterable[dict[str, torch.Tensor]]) -> float:
    """Return the share of the labels that the model guesses."""
    right = torch.cat([model(batch["images"]).argmax(1) == batch["labels"] for batch in batches])
    return accelerator.gather(right).float().mean().item()


if __name__ == "__main__":
    sys.exit(main())
