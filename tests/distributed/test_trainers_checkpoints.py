"""Lightning and the Trainer of transformers with sealed checkpoints."""

import os
import shutil
import tempfile
import time
from argparse import Namespace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.tampering import flip_byte

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
    flip_byte(path, -3)
    with pytest.raises(fastrack.AuthenticationError):
        train(tmp_path / "sealed", 4, path, plugins=[checkpoint_io(KEY)])


@pytest.fixture
def fit(tmp_path):
    """Function that trains a module for an epoch, with sealed checkpoints, and returns how many steps it took."""
    lightning = pytest.importorskip("lightning")
    steps = []

    class Counted(lightning.LightningModule):
        def __init__(self, **options):
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(8, 4)

        def training_step(self, batch):
            steps.append(batch)
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    def fit(hparams=(), plugin=None, datamodule=None, **options):
        steps.clear()
        saving = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / "run", filename="last")
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, callbacks=[saving],
            plugins=[plugin or checkpoint_io(KEY)], **options,
        )  # fmt: skip
        loader = None if datamodule else torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4)
        trainer.fit(Counted(**dict(hparams)), loader, datamodule=datamodule)

    fit.steps = steps
    return fit


class Colour(Enum):
    RED = 1


def test_hyperparameters_that_no_sealed_checkpoint_holds_are_refused_before_the_first_step(fit, tmp_path):
    import lightning

    refused = [Path("4711"), torch.float32, Path, Colour.RED, {4711}, range(4711), Namespace(secret=4711)]
    for value in [*refused, [1, {"deep": (Path("4711"),)}]]:
        with pytest.raises(TypeError, match=r"hparams\['place'\].*ignore=.* in Counted") as info:
            fit({"width": 3, "place": value})
        assert "4711" not in str(info.value), value
        assert fit.steps == []

    class Data(lightning.LightningDataModule):
        def __init__(self, folder):
            super().__init__()
            self.save_hyperparameters()

    with pytest.raises(TypeError, match=r"hparams\['folder'\].* in Data"):
        fit(datamodule=Data(Path("4711")))
    assert not (tmp_path / "run").exists()
    fit({"width": 3, "names": ["a", (1.5, None)], "mean": torch.ones(2)})
    assert fastrack.load_checkpoint(tmp_path / "run/last.ckpt", KEY)["hyper_parameters"]["names"] == ["a", (1.5, None)]


def test_strategies_of_lightning_that_write_past_their_plugin_are_refused(fit, tmp_path):
    from lightning import fabric
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

    class Own(SingleDeviceStrategy):
        def save_checkpoint(self, checkpoint, filepath, storage_options=None):
            torch.save(checkpoint, filepath)

    class OwnOfFabric(fabric.strategies.SingleDeviceStrategy):
        def save_checkpoint(self, path, state, **options):
            torch.save(state, path)

    for strategy in (ModelParallelStrategy(), FSDPStrategy(state_dict_type="sharded"), Own("cpu"), OwnOfFabric()):
        for plugin in (checkpoint_io(KEY), AsyncCheckpointIO(checkpoint_io(KEY))):
            with pytest.raises(ValueError, match=f"got {type(strategy).__name__}.*CheckpointWriter"):
                strategy.checkpoint_io = plugin
        plain = TorchCheckpointIO()
        strategy.checkpoint_io = plain  # which is no plugin of ours
        assert strategy.checkpoint_io is plain
    with pytest.raises(ValueError, match="ModelParallelStrategy"):
        fit(strategy=ModelParallelStrategy())
    assert (fit.steps, list(tmp_path.iterdir())) == ([], [])
    whole = [ModelParallelStrategy(save_distributed_checkpoint=False), FSDPStrategy(state_dict_type="full")]
    for strategy in [*whole, SingleDeviceStrategy(), fabric.strategies.SingleDeviceStrategy()]:
        strategy.checkpoint_io = checkpoint_io(KEY)
        assert isinstance(strategy.checkpoint_io, fabric.plugins.CheckpointIO)


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


def make_trainer(output, steps, sealed, key=KEY, **options):
    import transformers

    draw = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(8, generator=draw), "labels": torch.ones(4)} for _ in range(32)]
    arguments = transformers.TrainingArguments(
        str(output), max_steps=steps, save_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False, **options,
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


def steps_in(folder):
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


def test_sealed_checkpoints_are_removed_as_the_trainer_removes_its_own(tmp_path, memory):
    """Those of this run and of the one that it resumes; a folder of another stays, whatever its name."""
    pytest.importorskip("transformers")
    sealed, first, second = tmp_path / "sealed", memory / "first", memory / "second"
    make_trainer(first, 12, sealed, save_total_limit=2).train()
    assert steps_in(first) == steps_in(sealed) == [8, 12]
    (tmp_path / "kept").mkdir()
    (sealed / "checkpoint-5").symlink_to(tmp_path / "kept")
    (memory / "foreign").mkdir()
    (memory / "foreign" / "weights.bin").write_bytes(b"1")
    fastrack.seal_folder(memory / "foreign", sealed / "checkpoint-6", KEY)
    (sealed / "checkpoint-7").mkdir()
    fastrack.unseal_folder(sealed / "checkpoint-12", second / "checkpoint-12", KEY)  # as on another machine
    again = make_trainer(second, 24, sealed, save_total_limit=2)
    again.train(resume_from_checkpoint=str(second / "checkpoint-12"))
    assert steps_in(second) == [20, 24]
    assert steps_in(sealed) == [5, 6, 7, 20, 24]
    assert (tmp_path / "kept").is_dir()
    fastrack.load_folder(sealed / "checkpoint-24", KEY).verify(KEY)


def begin(callback, staging, step):
    arguments = SimpleNamespace(output_dir=staging, process_index=0, local_process_index=0)
    callback.on_train_begin(arguments, SimpleNamespace(global_step=step))


def save(callback, staging, step, held, best=None, limit=2):
    """Save a step as the Trainer does, which has in memory only the steps held, and this one."""
    for path in staging.glob("checkpoint-*"):
        if int(path.name.removeprefix("checkpoint-")) not in held:
            shutil.rmtree(path)
    folder = staging / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"%d" % step)
    path = staging / f"checkpoint-{best}"
    state = SimpleNamespace(
        global_step=step, is_world_process_zero=True, best_global_step=best,
        best_model_checkpoint=str(path) if path.is_dir() else None,
    )  # fmt: skip
    callback.on_save(SimpleNamespace(output_dir=staging, save_total_limit=limit), state)


def test_the_best_checkpoint_stays_also_where_a_run_is_resumed_without_it(tmp_path, memory):
    pytest.importorskip("transformers")
    sealed, first, second = tmp_path / "sealed", memory / "first", memory / "second"
    callback = checkpoint_callback(sealed, KEY)
    begin(callback, first, 0)
    for step, held in ((1, []), (2, [1]), (3, [1]), (4, [1])):
        save(callback, first, step, held, best=1)
    assert steps_in(sealed) == [1, 4]
    fastrack.unseal_folder(sealed / "checkpoint-4", second / "checkpoint-4", KEY)
    callback = checkpoint_callback(sealed, KEY)
    begin(callback, second, 4)
    for step in (5, 6):
        save(callback, second, step, [step - 1], best=1)
    assert steps_in(sealed) == [1, 5, 6]
    for step in (7, 8):
        save(callback, second, step, [], best=7, limit=None)
    assert steps_in(sealed) == [1, 5, 6, 7, 8]
    begin(callback, memory / "third", 8)  # another run, which does not resume this one
    save(callback, memory / "third", 9, [], limit=1)
    assert steps_in(sealed) == [1, 5, 6, 7, 8, 9]


def test_a_checkpoint_whose_removal_fails_is_not_there_in_part(tmp_path, memory, monkeypatch):
    pytest.importorskip("transformers")
    sealed, staging = tmp_path / "sealed", memory / "run"
    callback = checkpoint_callback(sealed, KEY)
    begin(callback, staging, 0)
    save(callback, staging, 1, [])
    save(callback, staging, 2, [1])
    remove, removed = shutil.rmtree, []

    def fail(path, **options):
        if Path(path).is_relative_to(sealed):
            removed.append(path)
            (path / "weights.bin").unlink()
            raise OSError(39, "Directory not empty", str(path))
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.warns(RuntimeWarning, match="checkpoint-1"):
        save(callback, staging, 3, [2])
    assert (len(removed), steps_in(sealed)) == (1, [2, 3])


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
