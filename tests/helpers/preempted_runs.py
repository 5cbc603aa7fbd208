"""Program that trains until a signal comes, or resumes: ``preempted_runs.py TRAINER FOLDER whole|cut|resume``.

In a run that is cut, SIGTERM reaches only the last rank, in the middle of the third of six steps. Each rank writes a
digest of its weights, moments and random state, needles of them in hexadecimal, and the status with which it ended.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import fastrack
from helpers.trainer_runs import RANK, batches, digest, hf_trainer, needles, net, state_of

KEY = bytes(range(32))
STEPS, CUT = 6, 3
SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def cut(step):
    """Send the signal if this is the step and the rank."""
    if sys.argv[3] == "cut" and step == CUT and RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGTERM)


def transformers(folder, notice):
    from transformers import TrainerCallback

    class Cut(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            cut(state.global_step + 1)

    trainer = hf_trainer(
        folder,
        STEPS,
        [Cut(), notice.transformers_callback()],
        save_strategy="no",
        ddp_backend="gloo" if SIZE > 1 else None,
    )
    resumed = str(folder / f"checkpoint-{CUT}") if sys.argv[3] == "resume" else None
    trainer.train(resume_from_checkpoint=resumed)
    return state_of(trainer.model, trainer.optimizer.optimizer, [torch.get_rng_state()]), trainer.state.global_step


def lightning(folder, notice):
    import lightning as L  # noqa: N812 - as its users do
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            cut(self.global_step + 1)
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

        def on_save_checkpoint(self, checkpoint):
            checkpoint["rng"] = torch.get_rng_state()  # which Lightning does not save

        def on_load_checkpoint(self, checkpoint):
            self.rng = checkpoint["rng"]

        def on_train_batch_start(self, batch, index):
            if hasattr(self, "rng"):
                torch.set_rng_state(self.rng)
                del self.rng

    path = folder / "preempted.ckpt"
    module = Module()
    trainer = L.Trainer(
        accelerator="cpu", max_steps=STEPS, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[notice.lightning_callback(path)], default_root_dir=folder,
        devices=SIZE, strategy="ddp" if SIZE > 1 else "auto",
    )  # fmt: skip
    loader = StatefulDataLoader(torch.cat(batches(16)), batch_size=4)
    try:
        trainer.fit(module, loader, ckpt_path=str(path) if sys.argv[3] == "resume" else None)
    finally:
        lightning.last = state_of(module, trainer.optimizers[0], [torch.get_rng_state()]), trainer.global_step
    return lightning.last


def main():
    torch.set_num_threads(1)
    fastrack.protect_checkpoints(fastrack.Key.from_bytes(KEY))
    folder, status = Path(sys.argv[2]), 0
    before = signal.getsignal(signal.SIGTERM)
    with fastrack.PreemptionNotice(deadline=120) as notice:
        try:
            state, steps = globals()[sys.argv[1]](folder, notice)
        except SystemExit as end:
            (state, steps), status = lightning.last, end.code
    assert signal.getsignal(signal.SIGTERM) == before
    result = {"digest": digest(state), "steps": steps, "status": status, "needles": needles(state)}
    (folder / f"result-{sys.argv[3]}-{RANK}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
