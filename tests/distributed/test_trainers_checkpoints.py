"""Lightning and the Trainer of transformers with sealed checkpoints."""

import os
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks

import fastrack
from fastrack import Key
from fastrack.distributed import checkpoint_callback, checkpoint_io

KEY = Key.from_bytes(bytes(range(32)))

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what these libraries warn of is theirs


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_lightning_resumes_from_a_sealed_checkpoint(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):
        def __init__(self, width=4):
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(8, width)

        def training_step(self, batch):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    loader = torch.utils.data.DataLoader(torch.randn(40, 8), batch_size=4)

    def train(folder, epochs, resume=None, **options):
        model = Model()
        saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False, callbacks=[saving], **options
        )
        trainer.fit(model, loader, ckpt_path=resume)
        return weights(model)

    expected = train(tmp_path / "plain", 4)
    train(tmp_path / "sealed", 2, plugins=[checkpoint_io(KEY)])
    path = tmp_path / "sealed" / "epoch=1.ckpt"
    for made in path.parent.iterdir():
        with fastrack.load_file(made) as file:
            assert file.kind == "checkpoint"
            assert not file.plain
    assert torch.equal(train(tmp_path / "sealed", 4, path, plugins=[checkpoint_io(KEY)]), expected)
    plugin, url = checkpoint_io(KEY), "memory://checkpoints/deep/a.ckpt"
    plugin.save_checkpoint({"epoch": 3}, url)
    assert plugin.load_checkpoint(url) == {"epoch": 3}
    plugin.remove_checkpoint(url)
    plugin.remove_checkpoint(url)
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(url)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(fastrack.AuthenticationError):
        train(tmp_path / "sealed", 4, path, plugins=[checkpoint_io(KEY)])


@pytest.fixture
def memory():
    if not Path("/dev/shm").is_dir():
        pytest.skip("takes a file system in memory")
    folder = tempfile.mkdtemp(dir="/dev/shm")
    yield Path(folder)
    shutil.rmtree(folder)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}


def make_trainer(output, steps, sealed, key=KEY):
    import transformers

    draw = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(8, generator=draw), "labels": torch.ones(4)} for _ in range(32)]
    arguments = transformers.TrainingArguments(
        str(output), max_steps=steps, save_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    return transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[checkpoint_callback(sealed, key)])


def test_the_trainer_of_transformers_resumes_from_a_sealed_checkpoint(tmp_path, memory):
    pytest.importorskip("transformers")
    sealed = tmp_path / "sealed"
    whole = make_trainer(memory / "run", 12, sealed)
    whole.train()
    assert {path.name for path in sealed.iterdir()} == {"checkpoint-4", "checkpoint-8", "checkpoint-12"}
    for path in (sealed / "checkpoint-8").iterdir():
        assert path.suffix == ".json" or path.name == "fastrack.folder" or fastrack.load_file(path).key_id == KEY.id
    shutil.rmtree(memory / "run")
    (memory / "run").mkdir()
    resumed = memory / "run" / "checkpoint-8"
    fastrack.unseal_folder(sealed / "checkpoint-8", resumed, KEY)
    shutil.rmtree(sealed / "checkpoint-12")
    again = make_trainer(memory / "run", 12, sealed)
    again.train(resume_from_checkpoint=str(resumed))
    assert torch.equal(weights(again.model), weights(whole.model))
    assert (sealed / "checkpoint-12" / "fastrack.folder").is_file()


def test_a_run_that_would_meet_later_checkpoints_of_another_is_refused(tmp_path, memory):
    """It ends before the first step, and what is there stays as it was."""
    pytest.importorskip("transformers")
    sealed = tmp_path / "sealed"
    make_trainer(memory / "run", 8, sealed).train()
    before = {path: path.read_bytes() for path in sealed.rglob("*") if path.is_file()}
    for resume in (None, str(memory / "run" / "checkpoint-4")):
        with pytest.raises(FileExistsError, match="step 8") as info:
            make_trainer(memory / "run", 12, sealed).train(resume_from_checkpoint=resume)
        assert info.value.filename == str(sealed)
    assert {path: path.read_bytes() for path in sealed.rglob("*") if path.is_file()} == before
    (sealed / "checkpoint-notes").mkdir()
    make_trainer(memory / "run", 12, sealed).train(resume_from_checkpoint=str(memory / "run" / "checkpoint-8"))
    assert (sealed / "checkpoint-12").is_dir()


def test_a_checkpoint_that_cannot_be_sealed_as_a_whole_is_refused(tmp_path, memory, monkeypatch):
    pytest.importorskip("transformers")
    from fastrack.distributed import _transformers as callbacks

    assert callbacks.file_system(memory / "new") == "tmpfs"
    assert callbacks.file_system(Path("/proc/self")) == "proc"
    elsewhere = SimpleNamespace(output_dir=memory, process_index=2, local_process_index=0)  # on a second machine
    with pytest.raises(ValueError, match="one machine"):
        checkpoint_callback(tmp_path, KEY).on_train_begin(elsewhere, SimpleNamespace(global_step=0))
    with pytest.raises(ValueError, match="got a URL"):
        checkpoint_callback("s3://bucket/run", KEY)
    monkeypatch.setattr(callbacks, "file_system", lambda _: "ext4")
    with pytest.raises(ValueError, match="output_dir"):
        make_trainer(memory / "disk", 4, tmp_path).train()


def train_in_two(output, sealed):
    """The process of rank 1 is late to save its random state."""
    rank = dist.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    trainer = make_trainer(output, 8, sealed)
    assert (trainer.args.world_size, trainer.args.process_index) == (2, rank)
    save = trainer._save_rng_state
    trainer._save_rng_state = lambda folder: (time.sleep(rank), save(folder))
    trainer.train()
    expected = weights(trainer.model)
    if rank == 0:
        for path in Path(output).iterdir():
            shutil.rmtree(path)
            fastrack.unseal_folder(Path(sealed, path.name), path, KEY)
            assert {"rng_state_0.pth", "rng_state_1.pth"} <= {each.name for each in path.iterdir()}
        shutil.rmtree(Path(sealed, "checkpoint-8"))
    dist.barrier()
    again = make_trainer(output, 8, sealed)
    again.train(resume_from_checkpoint=f"{output}/checkpoint-4")
    assert torch.equal(weights(again.model), expected)


def test_a_checkpoint_has_the_files_of_all_processes(tmp_path, memory):
    pytest.importorskip("transformers")
    run_ranks((2, train_in_two, memory / "run", tmp_path / "sealed"))
