"""Train a sharded model on two processes, kill one of them, and go on from the last sealed checkpoint.

Weights, gradients and the plans of checkpoints go from process to process sealed.

    python examples/fsdp_checkpoint.py
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node 2 --max-restarts 1 examples/fsdp_checkpoint.py --folder run --crash-at 7

FASTRACK_KEY_FILE names the key file; if it is not set, the example makes a key. Runs on CPUs. On GPUs, use a mesh of
"cuda".
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastrack
from fastrack.distributed import CheckpointReader, CheckpointWriter, init_process_group


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, for all processes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--crash-at", type=int, default=7, help="the step in which one process dies, at the first try")
    parser.add_argument("--processes", type=int, default=2, help="how many to start, if torchrun did not")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return start(options.processes)

    init_process_group()  # of another session after each start
    model = train(options.folder, options.steps, options.crash_at)
    weights = torch.cat([tensor.full_tensor().flatten() for tensor in model.state_dict().values()])
    if dist.get_rank() == 0:
        expected = train_alone(options.steps)
        print("the weights are those of a run without a crash, to", (weights - expected).abs().max().item())
    dist.barrier()
    dist.destroy_process_group()
    return 0


def start(processes: int) -> int:
    """Run this file under torchrun, which starts all processes again when one has died."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    with tempfile.TemporaryDirectory() as folder:
        if "FASTRACK_KEY_FILE" not in os.environ:
            fastrack.Key.generate().save(Path(folder, "owner.key"))
        # Without the second one torch keeps the store of the first try, and processes then connect to those that died.
        variables = {
            "FASTRACK_KEY_FILE": str(Path(folder, "owner.key")),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **os.environ,
        }
        command = [*torchrun, "--max-restarts=1", *sys.argv, "--folder", f"{folder}/checkpoint"]
        return subprocess.run(command, env=variables, check=False).returncode


def train(folder: Path, steps: int, crash_at: int) -> nn.Module:
    model = new_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = load(folder, model, optimizer) if (folder / "checkpoint.safetensors").exists() else 0
    for step in range(first, steps):
        if step == crash_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2:
            save(folder, model, optimizer, step + 1)
    return model


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": step}
    dcp.save(state, storage_writer=CheckpointWriter(folder))


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, storage_reader=CheckpointReader(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if dist.get_rank() == 0:
        print(f"resumed at step {state['step']}", flush=True)
    return int(state["step"])


def train_alone(steps: int) -> torch.Tensor:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 33), nn.ReLU(), nn.Linear(33, 10))


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(step))


if __name__ == "__main__":
    sys.exit(main())
