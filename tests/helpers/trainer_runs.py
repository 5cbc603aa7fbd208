"""Program that trains a small model with a trainer, saves, and resumes: ``trainer_runs.py TRAINER FOLDER MODE``.

The mode is plain, sealed, or untried: sealed, with a torch that is no more among the versions that were tried.
Each trainer takes four steps and saves after the second and the fourth; a new one resumes from the second. The program
writes what the test compares as JSON: digests of the states, and needles in hexadecimal, which no search for bytes
finds.
"""

import hashlib
import json
import os
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import fastrack
from fastrack._protect import versions

KEY = bytes(range(32))
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
RANK = int(os.environ.get("RANK", "0"))
WARNED = []


def begin():
    """Set up this program."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[-1] == "untried":
        first, _ = versions.COVERED["torch"]
        versions.COVERED["torch"] = first, versions.minor_of(torch.__version__)
    with warnings.catch_warnings(record=True) as warned:
        if is_sealed():
            warnings.simplefilter("always")
            fastrack.protect_checkpoints(fastrack.Key.from_bytes(KEY))
    WARNED.extend(text for text in (str(each.message) for each in warned) if "protect_checkpoints" in text)


def is_sealed():
    return sys.argv[-1] in {"sealed", "untried"}


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(96, 32))


def batches(number=8):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(4, 64, generator=draw) for _ in range(number)]


def local(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().cpu().contiguous()


def state_of(module, optimizer, rng=()):
    """Return tensors of this process: weights, moments, and random states where the trainer saves these."""
    tensors = {f"weight {name}": local(value) for name, value in module.named_parameters()}
    for number, values in enumerate(optimizer.state.values()):
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer {number} {name}"] = local(value)
    return tensors | {f"rng {number}": value for number, value in enumerate(rng)}


def rng():
    return [torch.get_rng_state()]


# --- trainers: train(folder, resume) -> tensors ---


def llama(width):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1)
    )  # fmt: skip


def hf_trainer(folder, steps=4, callbacks=(), width=32, **options):
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(16)]
    arguments = TrainingArguments(
        str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False, logging_steps=1, **options,
    )  # fmt: skip
    return Trainer(llama(width), arguments, train_dataset=data, callbacks=list(callbacks))


def transformers(folder, resume, **options):
    trainer = hf_trainer(folder, **options)
    trainer.train(resume_from_checkpoint=str(resume / "checkpoint-2") if resume else None)
    return state_of(trainer.model_wrapped, trainer.optimizer.optimizer, rng())


def let_accelerate_shard_on_cpus():
    """Have Accelerate take processes on CPUs for such as have a GPU each: it knows FSDP of only those."""
    from accelerate.state import DistributedType, PartialState

    init = PartialState.__init__

    def set_up(state, *arguments, **options):
        init(state, *arguments, **options)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_XPU

    PartialState.__init__ = set_up


def transformers_fsdp2(folder, resume):
    let_accelerate_shard_on_cpus()
    config = {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    return transformers(folder, resume, fsdp=True, fsdp_config=config)


def lightning(folder, resume, strategy="auto", wrap=None, name="step=2.ckpt"):
    import lightning as L  # noqa: N812 - as its users do

    class Module(L.LightningModule):
        def configure_model(self):
            if not hasattr(self, "net"):
                self.net = net()
                if wrap:
                    wrap(self)

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Keep(L.Callback):
        def on_train_end(self, trainer, module):
            self.state = state_of(module, trainer.optimizers[0])

    keep = Keep()
    saving = L.pytorch.callbacks.ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=2)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=4, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[saving, keep], strategy=strategy, devices=int(os.environ.get("WORLD_SIZE", "1")),
        default_root_dir=folder,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.cat(batches(16)), batch_size=4)
    trainer.fit(Module(), loader, ckpt_path=str(resume / name) if resume else None)
    return keep.state


def lightning_ddp(folder, resume):
    return lightning(folder, resume, "ddp")


def model_parallel(folder, resume, sharded):
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def wrap(module):
        mesh = module.device_mesh["data_parallel"]
        for part in (module.net[0], module.net[3], module.net):
            fully_shard(part, mesh=mesh)

    strategy = ModelParallelStrategy(save_distributed_checkpoint=sharded, process_group_backend="gloo")
    return lightning(folder, resume, strategy, wrap)


def lightning_sharded(folder, resume):
    return model_parallel(folder, resume, True)


def lightning_whole(folder, resume):
    return model_parallel(folder, resume, False)


def accelerate(folder, resume):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    module = net()
    module, optimizer, loader = accelerator.prepare(
        module, torch.optim.AdamW(module.parameters(), lr=0.01), torch.utils.data.DataLoader(torch.cat(batches()), 4)
    )
    if is_sealed():
        fastrack.rehearse_save(accelerator.save_state)
    first = 0
    if resume:
        accelerator.load_state(str(resume / "2"))
        first = 2
    for step, batch in enumerate(loader):
        if step < first or step >= 4:
            continue
        accelerator.backward(module(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            accelerator.save_state(str(folder / str(step + 1)))
            accelerator.save_model(module, str(folder / f"model-{step + 1}"))
    return state_of(module, optimizer.optimizer, rng())


def deepspeed(folder, resume):
    import deepspeed

    module = net()
    engine, optimizer, _, _ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), dist_init_required=not dist.is_initialized(),
        config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2},
                "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}},
    )  # fmt: skip
    if is_sealed():
        fastrack.rehearse_save(lambda place: engine.save_checkpoint(place, "0"))
    first = 0
    if resume:
        engine.load_checkpoint(str(resume), "2")
        first = 2
    for step, batch in enumerate(batches()[:4]):
        if step < first:
            continue
        engine.backward(engine(batch + RANK).square().mean())
        engine.step()
        if step % 2:
            engine.save_checkpoint(str(folder), str(step + 1))
    inner = optimizer.optimizer
    return state_of(module, inner)


def digest(tensors):
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def needles(tensors):
    """Return 16 bytes of places that are hardly found by chance, by kind."""
    draw, found = random.Random(2), {}
    for name, tensor in tensors.items():
        data = tensor.flatten().view(torch.uint8).numpy().tobytes()
        for _ in range(8 if len(data) >= 64 else 0):
            start = draw.randrange(0, len(data) - 16, 8)
            piece = data[start : start + 16]
            if len(set(piece)) >= 8:
                found.setdefault(name.split()[0], []).append(piece.hex())
    return found


def main():
    begin()
    train, folder = globals()[sys.argv[1]], Path(sys.argv[2])
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - the state that trainers save
    first = train(folder / "first", None)
    result = {"warned": WARNED, "needles": needles(first), "first": digest(first)}
    result["resumed"] = digest(train(folder / "second", folder / "first"))
    (folder / f"result-{RANK}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
