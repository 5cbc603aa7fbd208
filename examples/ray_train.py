"""Two workers of Ray Train on one sealed file. Ray shuffles and splits numbers of samples. Takes `ray[data,train]`.

    python examples/ray_train.py --epochs 3 --compare

What Ray keeps in its object store, and spills to disk, holds neither samples nor keys. Each worker opens its batches
out of the sealed file, with a key file of its own, and all that the models of workers send each other is sealed.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from torch import nn

import fastrack
import fastrack.ray
from fastrack.distributed import init_process_group

WORKERS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="train on GPUs, one for each worker")
    parser.add_argument("--compare", action="store_true", help="train a model with plain gradients beside it")
    options = parser.parse_args()
    ray.init(num_cpus=WORKERS + 2, include_dashboard=False, log_to_driver=False, logging_level="warning")
    with tempfile.TemporaryDirectory() as folder:
        key_file = seal(Path(folder))
        data = fastrack.SealedDataset(Path(folder, "train.safetensors"))
        given = {**vars(options), "data": data, "key_file": str(key_file), "results": folder}
        trainer = ray.train.torch.TorchTrainer(
            train,
            train_loop_config=given,
            datasets={"train": ray.data.read_datasource(fastrack.ray.SealedDatasource(data)).random_shuffle(seed=0)},
            torch_config=ray.train.torch.TorchConfig("nccl" if options.gpu else "gloo"),
            scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=options.gpu),
            run_config=RunConfig(storage_path=folder),
        )
        trainer.fit()
        results = [torch.load(path) for path in sorted(Path(folder).glob("worker-*.pt"))]
    ray.shutdown()
    for epoch in range(options.epochs):
        print(f"epoch {epoch}: loss {sum(result['losses'][epoch] for result in results) / WORKERS:.4f}")
    seen = sorted(number for result in results for number in result["seen"])
    print(f"{len(seen)} samples an epoch, {len(set(seen))} of them different")
    same = all(torch.equal(weight, results[0]["weights"][0]) for result in results for weight in result["weights"])
    places = "on all workers" + ", and with plain gradients, bit for bit" * options.compare
    print(f"the weights are the same {places}" if same else "the weights differ")
    return 0 if same else 1


def seal(folder: Path) -> Path:
    """Seal samples of ten classes, as their owner would, and return the path of the key file."""
    random = np.random.default_rng(0)
    images = random.standard_normal((2000, 64), np.float32)
    labels = (images @ random.standard_normal((64, 10), np.float32)).argmax(1)
    key = fastrack.Key.generate()
    key.save(folder / "owner.key")
    tensors = {"images": images, "labels": labels, "numbers": np.arange(2000)}
    fastrack.save_file(tensors, folder / "train.safetensors", key)
    return folder / "owner.key"


def train(config: dict[str, Any]) -> None:
    """Train in one worker, on its share of the samples."""
    init_process_group(config["key_file"])  # in the place of Ray's
    models = [prepare({})]
    if config["compare"]:
        models.append(prepare({"process_group": dist.new_group(backend="gloo")}))
    optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in models]
    rows = ray.train.get_dataset_shard("train")
    collate = fastrack.ray.SealedCollateFn(config["data"], keys=config["key_file"])
    losses = []
    for _ in range(config["epochs"]):
        seen, total = [], 0.0
        for batch in rows.iter_torch_batches(batch_size=50, collate_fn=collate):
            for model, optimizer in zip(models, optimizers, strict=True):
                loss = nn.functional.cross_entropy(model(batch["images"]), batch["labels"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total += loss.item() * len(batch["labels"])
            seen += batch["numbers"].tolist()
        losses.append(total / len(seen))
    weights = [next(model.parameters()).detach().cpu() for model in models]
    rank = ray.train.get_context().get_world_rank()
    torch.save({"losses": losses, "seen": seen, "weights": weights}, Path(config["results"], f"worker-{rank}.pt"))


def prepare(options: dict[str, Any]) -> nn.Module:
    """Return a model whose gradients are averaged over the default process group, or over one that is named."""
    torch.manual_seed(0)
    model: nn.Module = ray.train.torch.prepare_model(nn.Linear(64, 10), parallel_strategy_kwargs=options)
    return model


if __name__ == "__main__":
    sys.exit(main())
