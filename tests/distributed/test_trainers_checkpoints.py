"""Lightning and the Trainer of transformers with sealed checkpoints."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch

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


def test_the_trainer_of_transformers_resumes_from_a_sealed_checkpoint(tmp_path, memory, monkeypatch):
    transformers = pytest.importorskip("transformers")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(8, 4)

        def forward(self, x, labels):
            return {"loss": (self.layer(x) - labels).square().mean()}

    data = [{"x": torch.randn(8), "labels": torch.ones(4)} for _ in range(32)]

    def trainer(output, steps, callbacks=()):
        arguments = transformers.TrainingArguments(
            str(output), max_steps=steps, save_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[],
            disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        return transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=list(callbacks))

    sealed = tmp_path / "sealed"
    whole = trainer(memory / "run", 12, [checkpoint_callback(sealed, KEY)])
    whole.train()
    assert {path.name for path in sealed.iterdir()} == {"checkpoint-4", "checkpoint-8", "checkpoint-12"}
    for path in (sealed / "checkpoint-8").iterdir():
        assert path.suffix == ".json" or path.name == "fastrack.folder" or fastrack.load_file(path).key_id == KEY.id
    shutil.rmtree(memory / "run")
    (memory / "run").mkdir()
    fastrack.unseal_folder(sealed / "checkpoint-8", memory / "run" / "checkpoint-8", KEY)
    again = trainer(memory / "run", 12, [checkpoint_callback(sealed, KEY)])
    again.train(resume_from_checkpoint=str(memory / "run" / "checkpoint-8"))
    assert torch.equal(weights(again.model), weights(whole.model))
    from fastrack.distributed import _transformers as callbacks

    assert callbacks.file_system(memory / "new") == "tmpfs"
    assert callbacks.file_system(Path("/proc/self")) == "proc"
    monkeypatch.setattr(callbacks, "file_system", lambda _: "ext4")
    with pytest.raises(ValueError, match="output_dir"):
        trainer(memory / "disk", 4, [checkpoint_callback(sealed, KEY)]).train()
