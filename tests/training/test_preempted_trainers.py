"""Trainers of Transformers and Lightning that get SIGTERM in the middle: a sealed checkpoint, and no step is lost."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import preempted_runs, trainer_runs

import fastrack

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

KEY = fastrack.Key.from_bytes(preempted_runs.KEY)


def run(trainer, folder, mode, processes):
    """Train, and return what each rank tells."""
    folder.mkdir(exist_ok=True)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, "-W", "ignore", *ranks, preempted_runs.__file__, trainer, str(folder), mode]
    path = os.pathsep.join([str(Path(preempted_runs.__file__).parents[1]), *sys.path])
    environment = {**os.environ, **trainer_runs.ENVIRONMENT, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads((folder / f"result-{mode}-{rank}.json").read_text()) for rank in range(processes)]


def saved_in(folder):
    """Return the files of a checkpoint with tensors."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in {".json", ".jinja", ".txt"}]
    return [path for path in files if path.stat().st_size > 1000]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_a_run_that_was_preempted_ends_with_the_bits_of_one_that_was_not(trainer, processes, tmp_path):
    pytest.importorskip(trainer)
    whole = run(trainer, tmp_path / "whole", "whole", processes)
    cut = run(trainer, tmp_path / "cut", "cut", processes)
    expected_status = 143 if trainer == "lightning" else 0  # `train` of transformers returns
    assert [(rank["steps"], rank["status"]) for rank in cut] == [(preempted_runs.CUT, expected_status)] * processes
    files = saved_in(tmp_path / "cut")
    assert files
    for path in files:
        fastrack.verify_file(path, KEY)
    everything = b"".join(
        path.read_bytes() for path in (tmp_path / "cut").rglob("*") if "result-" not in path.name and path.is_file()
    )
    needles = [bytes.fromhex(each) for rank in cut for kind in rank["needles"].values() for each in kind]
    assert len(needles) > 50
    assert not [needle for needle in needles if needle in everything]
    resumed = run(trainer, tmp_path / "cut", "resume", processes)
    assert [rank["steps"] for rank in resumed] == [preempted_runs.STEPS] * processes
    assert [rank["digest"] for rank in resumed] == [rank["digest"] for rank in whole]
    assert [rank["digest"] for rank in cut] != [rank["digest"] for rank in whole]


def lightning_run(path, *, cut=None, resume=False, accumulate=1, sanity=False):
    """Train for two epochs of 16 batches, and return the weights, the steps and the status of the end.

    SIGTERM comes in the batch `cut` of the first epoch, or in the check of sanity before it.
    """
    L = pytest.importorskip("lightning")  # noqa: N806 - as its users do
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(64, 4)  # without dropout, as Lightning saves no random states

        def training_step(self, batch, index):
            if (self.current_epoch, index) == (0, cut):
                os.kill(os.getpid(), signal.SIGTERM)
            return self.net(batch).square().mean()

        def validation_step(self, batch, index):
            if sanity and self.trainer.sanity_checking:
                os.kill(os.getpid(), signal.SIGTERM)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    module, data, status = Module(), torch.cat(trainer_runs.batches(16)), None
    with fastrack.PreemptionNotice(deadline=120) as notice:
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, callbacks=[notice.lightning_callback(path)], default_root_dir=path.parent,
            accumulate_grad_batches=accumulate,
        )  # fmt: skip
        loader = StatefulDataLoader(data, batch_size=len(data) // 16)
        checked = torch.utils.data.DataLoader(data[:4]) if sanity else None
        try:
            trainer.fit(module, loader, checked, ckpt_path=str(path) if resume else None)
        except SystemExit as end:
            status = end.code
    return [each.clone() for each in module.parameters()], trainer.global_step, status


@pytest.mark.parametrize(("cut", "accumulate"), [(0, 1), (7, 1), (15, 1), (5, 4), (15, 4)])
@pytest.mark.filterwarnings("ignore")
def test_lightning_loses_no_step_wherever_in_an_epoch_it_is_cut(cut, accumulate, tmp_path):
    whole, steps, _ = lightning_run(tmp_path / "whole.ckpt", accumulate=accumulate)
    path = tmp_path / "cut.ckpt"
    _, at, status = lightning_run(path, cut=cut, accumulate=accumulate)
    assert (status, path.exists()) == (143, True)
    assert 0 < at < steps
    resumed, again, _ = lightning_run(path, resume=True, accumulate=accumulate)
    assert again == steps
    assert all(map(torch.equal, resumed, whole))


@pytest.mark.filterwarnings("ignore")
def test_lightning_saves_after_a_signal_that_came_before_the_first_step(tmp_path):
    _, at, status = lightning_run(tmp_path / "cut.ckpt", sanity=True)
    assert (at, status, (tmp_path / "cut.ckpt").exists()) == (1, 143, True)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_transformers_saves_once_after_a_notice(tmp_path):
    transformers = pytest.importorskip("transformers")
    events = []

    class Seen(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_save(self, *_, **__):
            events.append("save")

        def on_evaluate(self, *_, **__):
            events.append("evaluate")

    with fastrack.PreemptionNotice(deadline=120) as notice:
        callbacks = [Seen(), notice.transformers_callback()]
        options = {"save_strategy": "epoch"}  # at the end of which the default callback asks for another save
        trainer_runs.hf_trainer(tmp_path, 6, callbacks, **options).train()
    assert events == ["save"]
