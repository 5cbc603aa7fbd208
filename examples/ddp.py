"""Train on two processes from one sealed file, with sealed gradients, and check that both end with the same weights.

    python examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py

FASTRACK_KEY_FILE names the key file; if it is not set, the example makes a key. Runs on CPUs.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import fastrack
from fastrack.distributed import init_process_group


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2, help="how many to start, if torchrun did not")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return start(options.processes)

    dist.init_process_group("gloo")  # only for the path below
    with tempfile.TemporaryDirectory() as folder:
        place: list[str | None] = [prepare(Path(folder)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(place)  # each process reads the key from its file
        init_process_group(key_file(str(place[0])))  # destroys the plain one: what is sent from here on is sealed
        model = train(str(place[0]), options.epochs)
        same = is_same_everywhere(model)
    if dist.get_rank() == 0:
        print("the weights are the same on all processes" if same else "the weights differ")
    dist.destroy_process_group()
    return 0 if same else 1


def start(processes: int) -> int:
    """Run this file under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run([*torchrun, *sys.argv], check=False).returncode


def prepare(folder: Path) -> str:
    """Seal the data, as its owner does beforehand and elsewhere."""
    random = np.random.default_rng(0)
    images = random.standard_normal((2000, 64), np.float32)
    labels = (images @ random.standard_normal((64, 10), np.float32)).argmax(1)
    if "FASTRACK_KEY_FILE" not in os.environ:
        fastrack.Key.generate().save(key_file(folder))
    fastrack.save_file({"images": images, "labels": labels}, folder / "train.safetensors", key=key_file(folder))
    return str(folder)


def key_file(folder: str | Path) -> Path:
    return Path(os.environ.get("FASTRACK_KEY_FILE", Path(folder, "owner.key")))


def train(folder: str, epochs: int) -> nn.Module:
    data = fastrack.SealedDataset(f"{folder}/train.safetensors")
    sampler = DistributedSampler(data, seed=0)  # each process has its share of the samples
    loader = DataLoader(data, batch_size=50, sampler=sampler, collate_fn=fastrack.collate)
    batches = fastrack.wrap(loader, keys=key_file(folder))

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(epochs):
        batches.set_epoch(epoch)  # reaches the sampler, which shuffles anew
        total = torch.zeros(1)
        for batch in batches:
            loss = nn.functional.cross_entropy(model(batch["images"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / len(batches) / dist.get_world_size():.4f}", flush=True)
    return model.module


def is_same_everywhere(model: nn.Module) -> bool:
    """Check that all processes have the same weights, to the last bit."""
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    mine = torch.tensor(list(hashlib.sha256(weights).digest()), dtype=torch.uint8)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(mine, other) for other in all_of_them)


if __name__ == "__main__":
    sys.exit(main())
