"""Trainers of Transformers, Lightning, Accelerate and DeepSpeed with protected checkpoints."""

import contextlib
import importlib
import io
import json
import os
import pickle
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import traced_writes, trainer_runs, trainer_strains
from helpers.foreign import take_back

import fastrack
from fastrack._protect import rehearsal, trainers

KEY = fastrack.Key.from_bytes(trainer_runs.KEY)
PROCESSES = {
    "transformers": 1,
    "transformers_fsdp2": 2,
    "lightning": 1,
    "lightning_ddp": 2,
    "lightning_sharded": 2,
    "lightning_whole": 2,
    "accelerate": 1,
    "deepspeed": 2,
}
WITH_RANDOM_STATES = {"transformers", "transformers_fsdp2", "accelerate"}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what these libraries warn of is theirs


def program(module, *arguments, processes=1):
    """Return the command line and the environment of a program of helpers."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *ranks, module.__file__, *map(str, arguments)]
    path = os.pathsep.join([str(Path(module.__file__).parent), *sys.path])
    return command, {**os.environ, **trainer_runs.ENVIRONMENT, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def run_traced(trainer, folder, mode):
    """Train with a trainer. Return the digests of its processes, needles by kind, and what was written."""
    folder.mkdir()
    processes = PROCESSES[trainer]
    command, environment = program(trainer_runs, trainer, folder, mode, processes=processes)
    status, output, writes = traced_writes.trace(command, env=environment, folder=folder / "trace")
    assert status == 0, output[-5000:]
    results = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(processes)]
    needles = {}
    for result in results:
        for kind, found in result.pop("needles").items():
            needles.setdefault(kind, []).extend(map(bytes.fromhex, found))
    return results, needles, writes


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trainer", PROCESSES)
def test_no_byte_of_a_state_is_written_in_plain_and_runs_resume_as_plain_ones_do(trainer, tmp_path):
    for warned in compare_with_plain_run(trainer, tmp_path, "sealed"):
        assert warned == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trainer", ["transformers", "lightning", "accelerate"])
def test_a_torch_that_was_not_tried_and_writes_as_a_tried_one_seals_too_with_one_warning(trainer, tmp_path):
    (warned,) = compare_with_plain_run(trainer, tmp_path, "untried")
    version = torch.__version__.partition("+")[0]
    assert [version in each for each in warned] == [True]


def compare_with_plain_run(trainer, folder, mode):
    """Assert that a run is sealed, and equal to a plain one. Return what `protect_checkpoints` warned of."""
    if find_spec(trainer.partition("_")[0]) is None:
        pytest.skip(f"needs {trainer.partition('_')[0]}")
    plain, needles, writes = run_traced(trainer, folder / "plain", "plain")
    kinds = {"weight", "optimizer"} | ({"rng"} if trainer in WITH_RANDOM_STATES else set())
    for kind in kinds:  # a search that misses them where they are unencrypted shows nothing
        assert len(writes.found(needles[kind])) >= 0.95 * len(set(needles[kind])) > 0, kind
    sealed, needles, writes = run_traced(trainer, folder / mode, mode)
    warned = [result.pop("warned") for result in sealed]
    assert sealed == [{name: value for name, value in result.items() if name != "warned"} for result in plain]
    for kind in kinds:
        assert writes.found(needles[kind]) == {}, kind
    in_memory = {path for path in writes.mapped if path.startswith("/dev/shm/")}
    assert writes.mapped == in_memory
    return warned


@pytest.mark.nightly
def test_the_search_sees_files_without_names_removed_ones_and_maps(tmp_path):
    needles = [bytes([number]) * 3 + bytes(range(13)) for number in range(4)]
    code = f"""
import mmap, os
a, b, c, d = {needles!r}
open("removed", "wb").write(b"-" + a); os.remove("removed")
fd = os.open(".", os.O_TMPFILE | os.O_RDWR); os.writev(fd, [b[:5], b[5:]])
with open("mapped", "w+b") as file:
    file.truncate(4096)
    mmap.mmap(file.fileno(), 4096)[100:116] = c
read, write = os.pipe(); os.write(write, d)
"""
    command = [sys.executable, "-c", code]
    status, output, writes = traced_writes.trace(command, env=dict(os.environ), folder=tmp_path / "trace")
    assert status == 0, output
    assert set(writes.found(needles)) == set(needles[:3])
    assert any("#" in path for path in writes.opened)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_fifty_killed_runs_resume_from_their_last_whole_checkpoint(tmp_path):
    pytest.importorskip("transformers")
    command, environment = program(trainer_strains, "kills", tmp_path, "sealed")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["resumed"] == 50


@pytest.mark.nightly
def test_a_save_takes_two_slabs_of_memory_beside_the_state(tmp_path):
    pytest.importorskip("transformers")
    command, environment = program(trainer_strains, "memory", tmp_path, "sealed")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["size"] > 2 << 30
    assert max(said["over"]) < 32 << 20  # two slabs of 8 MiB, and what the allocator keeps
    assert said["over"][0] < 4 << 20  # the rehearsal


@pytest.fixture(scope="module")
def _protected():
    for name in ("transformers.trainer", "lightning.pytorch.loops.fit_loop"):  # or the end of a test that is the first
        with contextlib.suppress(ImportError):  # to import one would take back what is replaced in it
            importlib.import_module(name)
    fastrack.protect_checkpoints(KEY)
    yield
    take_back()


class Steps:
    """Callback of transformers that counts steps and saves, and writes as it is told at each save."""

    def __new__(cls, write=lambda path: None):
        from transformers import TrainerCallback

        class Callback(TrainerCallback):
            steps, saved = 0, 0

            def on_train_begin(self, args, state, control, **kwargs):
                self.ready = True

            def on_step_begin(self, args, state, control, **kwargs):
                self.steps += 1

            def on_save(self, args, state, control, **kwargs):
                assert self.ready
                self.saved += 1
                write(Path(args.output_dir, f"checkpoint-{state.global_step}"))

        return Callback()


def write_pickle(path):
    (path / "best.pkl").write_bytes(pickle.dumps(np.ones(3)))


def write_archive(path):
    np.savez(path / "rng.npz", state=np.arange(624))


@pytest.mark.usefixtures("_protected")
def test_a_numpy_writer_in_a_callback_is_refused_before_the_first_step(tmp_path):
    pytest.importorskip("transformers")
    elsewhere = tmp_path / "elsewhere.dat"
    for write in (write_pickle, write_archive, lambda path: np.ones(3).tofile(elsewhere)):
        callback = Steps(write)
        trainer = trainer_runs.hf_trainer(tmp_path / "run", callbacks=[callback])
        with pytest.raises(fastrack.errors.FastrackError, match=r"best\.pkl|savez|elsewhere\.dat"):
            trainer.train()
        assert callback.steps == 0
        assert not elsewhere.exists()
        assert list(tmp_path.glob("run/checkpoint-*")) == []


@pytest.mark.usefixtures("_protected")
def test_a_rehearsal_leaves_callbacks_and_the_trainer_as_they_were(tmp_path):
    pytest.importorskip("transformers")
    callback = Steps()
    trainer = trainer_runs.hf_trainer(tmp_path / "run", callbacks=[callback])
    names = [type(each).__name__ for each in trainer.callback_handler.callbacks]
    trainer.train()
    assert (callback.steps, callback.saved) == (4, 2)
    assert [type(each).__name__ for each in trainer.callback_handler.callbacks] == names
    assert (trainer.args.output_dir, trainer.args.save_total_limit) == (str(tmp_path / "run"), None)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint-2", "checkpoint-4"}


@pytest.mark.usefixtures("_protected")
def test_the_trainer_prunes_sealed_checkpoints_itself(tmp_path):
    pytest.importorskip("transformers")
    trainer_runs.hf_trainer(tmp_path, steps=8, save_total_limit=2).train()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-6", "checkpoint-8"}
    kept = [path for path in (tmp_path / "checkpoint-8").iterdir() if path.suffix != ".json"]
    assert len(kept) >= 5
    for path in kept:
        fastrack.verify_file(path, KEY)


@pytest.mark.usefixtures("_protected")
def test_a_trainer_that_never_saves_or_saves_elsewhere_is_not_refused(tmp_path, recwarn):
    pytest.importorskip("transformers")
    callback = Steps(write_pickle)  # of which no save is asked for
    trainer_runs.hf_trainer(tmp_path / "never", callbacks=[callback], save_strategy="no").train()
    assert (callback.steps, callback.saved) == (4, 0)
    trainer = trainer_runs.hf_trainer(tmp_path / "elsewhere", callbacks=[callback := Steps()])
    kept = []

    def save(model, *_, **__):
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        kept.append(buffer.getvalue())

    trainer._save_checkpoint = save
    trainer.train()
    assert (callback.steps, callback.saved, len(kept)) == (4, 2, 3)
    for content in kept:
        torch.load(io.BytesIO(content))
        assert b"fastrack.version" in content
    assert not [each for each in recwarn if "could not be looked at" in str(each.message)]
    trainer = trainer_runs.hf_trainer(tmp_path / "memory")
    trainer._save_checkpoint = lambda model, *_, **__: kept.append(dict(model.state_dict()))
    with pytest.warns(UserWarning, match="could not be looked at"):
        trainer.train()
    assert list(tmp_path.rglob("checkpoint-*")) == []


@pytest.mark.usefixtures("_protected")
@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_evaluate"])
def test_a_save_that_only_a_callback_asks_for_is_rehearsed_first(event, tmp_path):
    pytest.importorskip("transformers")

    def ask(_callback, _args, _state, control, **_):
        control.should_save = True

    def evaluate(_callback, _args, _state, control, **_):
        control.should_evaluate = True

    for write, saved in ((lambda path: None, True), (write_pickle, False)):
        callback, folder = Steps(write), tmp_path / str(saved)
        setattr(type(callback), event, ask)
        trainer = trainer_runs.hf_trainer(folder, callbacks=[callback], save_strategy="no")
        if event == "on_evaluate":
            trainer.eval_dataset, type(callback).on_step_end = trainer.train_dataset, evaluate
        if saved:
            trainer.train()
            for path in folder.glob("checkpoint-*/*.safetensors"):
                fastrack.verify_file(path, KEY)
        else:
            with pytest.raises(fastrack.errors.FastrackError, match=r"best\.pkl"):
                trainer.train()
        assert (len(list(folder.glob("checkpoint-*"))) == callback.saved > 0) is saved


def test_of_several_processes_one_that_alone_is_asked_for_a_save_waits_for_no_other(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(trainers, "_are_several", lambda: True)

    def ask(_callback, _args, _state, control, **_):
        control.should_save = True

    def refuse(*_):
        raise AssertionError("a collective of one process")

    def begun(_callback, *_, **__):  # after the rehearsal, which all processes reach
        monkeypatch.setattr(rehearsal, "_together", refuse)

    never, asked = Steps(write_pickle), Steps(write_pickle)
    type(asked).on_step_begin, type(asked).on_step_end = begun, ask
    trainer_runs.hf_trainer(tmp_path / "never", callbacks=[never], save_strategy="no").train()
    trainer = trainer_runs.hf_trainer(tmp_path / "asked", callbacks=[asked], save_strategy="no")
    with pytest.raises(fastrack.errors.FastrackError, match=r"best\.pkl"):
        trainer.train()
    assert not list(tmp_path.glob("*/checkpoint-*"))


def fit(folder, saving=(), plugins=(), callbacks=None, more=None, **hparams):
    """Train a module of Lightning for four steps. Return their number."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, **options):
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(8, 4)
            self.saved = []

        def on_save_checkpoint(self, checkpoint):
            self.saved.append(checkpoint["global_step"])
            for each in saving:
                each(checkpoint, folder)

        def training_step(self, batch):
            fit.steps += 1
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    fit.steps = 0
    module = Module(**hparams)
    callback = lightning.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=4, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback] if callbacks is None else callbacks, plugins=list(plugins), default_root_dir=folder,
        **(more or {}),
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(40, 8), batch_size=4))
    return module


@pytest.mark.usefixtures("_protected")
def test_what_lightning_would_write_in_plain_is_refused_before_the_first_step(tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    class NumpyIO(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            arrays = {name: value.numpy() for name, value in checkpoint["state_dict"].items()}
            Path(path).write_bytes(pickle.dumps(arrays))

    def fail(checkpoint, _):
        checkpoint["function"] = lambda: 0

    def write_beside(_, folder):
        Path(folder, "beside.pkl").write_bytes(b"weights")

    refusals = [
        ({"plugins": [NumpyIO()]}, "rehearsal.ckpt"),
        ({"plugins": [AsyncCheckpointIO(NumpyIO())]}, "rehearsal.ckpt"),
        ({"saving": [write_beside]}, "beside.pkl"),
        ({"saving": [fail]}, "lambda"),
    ]
    for options, message in refusals:
        with pytest.raises((fastrack.errors.FastrackError, AttributeError, pickle.PicklingError), match=message):
            fit(tmp_path / "run", **options)
        assert fit.steps == 0
        assert list(tmp_path.rglob("*.*")) == []


@pytest.mark.usefixtures("_protected")
def test_a_plug_in_that_stores_elsewhere_is_not_refused_and_keeps_no_rehearsal(tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    class InMemory(TorchCheckpointIO):
        def __init__(self, turn_to_bytes):
            self.kept, self.turn_to_bytes = {}, turn_to_bytes

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            self.kept[Path(path).name] = self.turn_to_bytes(checkpoint)

        def remove_checkpoint(self, path):
            del self.kept[Path(path).name]

    def seal(checkpoint):
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        return buffer.getvalue()

    for plain, wrap in ((InMemory(seal), lambda plain: plain), (InMemory(seal), AsyncCheckpointIO)):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*could not be looked at")
            fit(tmp_path / "run", plugins=[wrap(plain)])
        assert fit.steps == 4
        assert sorted(plain.kept) == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]
        assert all(b"fastrack.version" in content for content in plain.kept.values())
    plain = InMemory(dict)
    with pytest.warns(UserWarning, match="could not be looked at"):
        fit(tmp_path / "run", plugins=[plain])
    assert (fit.steps, len(plain.kept)) == (4, 2)
    assert list(tmp_path.rglob("*.ckpt")) == []


@pytest.mark.usefixtures("_protected")
def test_a_run_of_lightning_that_never_saves_is_not_rehearsed(tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    def fail(checkpoint, _):
        checkpoint["function"] = lambda: 0

    for options, steps in (
        ({"callbacks": [], "more": {"enable_checkpointing": False}}, 4),
        ({"more": {"fast_dev_run": True}}, 1),
        ({"callbacks": [ModelCheckpoint(tmp_path, save_top_k=0)]}, 4),
        ({"callbacks": [], "more": {"barebones": True}}, 4),
    ):
        module = fit(tmp_path / "run", saving=[fail], **options)
        assert (fit.steps, module.saved) == (steps, [])
    for callbacks in ([ModelCheckpoint(tmp_path, save_top_k=0, save_last=True)], None):
        with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
            fit(tmp_path / "run", saving=[fail], callbacks=callbacks)
        assert fit.steps == 0


@pytest.mark.usefixtures("_protected")
@pytest.mark.parametrize("event", ["on_train_batch_end", "on_train_epoch_end", "on_train_end"])
def test_a_save_that_only_a_callback_of_lightning_begins_is_rehearsed_first(event, tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import Callback

    callback = type("Saving", (Callback,), {event: lambda _, trainer, *__: trainer.save_checkpoint(path)})()
    path, plain = tmp_path / "own.ckpt", tmp_path / "beside.pkl"
    options = {"callbacks": [callback], "more": {"enable_checkpointing": False}}
    with pytest.raises(fastrack.errors.FastrackError, match=r"beside\.pkl"):
        fit(tmp_path, saving=[lambda *_: plain.write_bytes(b"weights")], **options)
    assert not plain.exists()
    assert not path.exists()
    module = fit(tmp_path, **options)
    assert fit.steps == 4
    loaded = torch.load(path, weights_only=False)["state_dict"]
    assert torch.equal(loaded["layer.weight"], module.layer.weight)
    fastrack.verify_file(path, KEY)


@pytest.mark.usefixtures("_protected")
def test_a_whole_checkpoint_is_loaded_lazily_as_strategies_of_lightning_do(tmp_path):
    pytest.importorskip("lightning")
    from lightning.fabric.utilities.load import _lazy_load, _materialize_tensors

    module = fit(tmp_path / "run")
    path = max((tmp_path / "run").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    fastrack.verify_file(path, KEY)
    weights = _materialize_tensors(_lazy_load(path)["state_dict"])
    assert torch.equal(weights["layer.weight"], module.layer.weight)


@pytest.mark.usefixtures("_protected")
def test_lightning_saves_and_hooks_see_no_rehearsal(tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    for plugins in ([], [AsyncCheckpointIO()]):
        folder = tmp_path / str(len(plugins))
        module = fit(folder, plugins=plugins, place=Path("here"), width=3)
        assert (fit.steps, module.saved) == (4, [2, 4])
        files = list(folder.glob("*.ckpt"))
        assert len(files) == 2
        for path in files:
            fastrack.verify_file(path, KEY)
        with torch.serialization.safe_globals([type(Path())]):
            loaded = type(module).load_from_checkpoint(max(files, key=lambda path: path.stat().st_mtime_ns))
        assert torch.equal(loaded.layer.weight, module.layer.weight)
        assert loaded.hparams == module.hparams


def test_trainers_that_are_imported_later_rehearse_too():
    """Whatever the order of the one line and the imports."""
    if find_spec("transformers") is None:
        pytest.skip("needs transformers")
    code = (
        "import fastrack, sys; fastrack.protect_checkpoints(fastrack.Key.generate()); "
        "assert 'transformers' not in sys.modules; import transformers.trainer; "
        "print(transformers.Trainer.train.__wrapped__.__qualname__)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("Trainer.train"), done.stderr
