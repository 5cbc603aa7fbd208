"""The trainers of other libraries on a plain DataLoader, with keys that a function finds."""

import numpy as np
import pytest

import fastrack

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what these libraries warn of is theirs

SAMPLES, CLASSES = 200, 10


@pytest.fixture
def key():
    return fastrack.Key.generate()


class Asked(list):
    """The ids that a function was asked for; `keys` is that function, if a dataset is to be given it."""

    keys = None


@pytest.fixture(params=["a default", "keys of the dataset"])
def asked(request, key):
    """Set a function as the default source of keys, or give it to datasets."""
    ids = Asked()

    def ask(key_id):
        ids.append(key_id)
        return key if key_id == key.id else None

    if request.param == "a default":
        with fastrack.use_keys(ask):
            yield ids
    else:
        ids.keys = ask
        yield ids


@pytest.fixture
def digits(request, tmp_path, key):
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, 64), np.float32)
    y = (x @ random.standard_normal((64, CLASSES), np.float32)).argmax(1)
    fastrack.save_file({"x": x, "y": y}, tmp_path / "digits.safetensors", key)
    keys = request.getfixturevalue("asked").keys if "asked" in request.fixturenames else None
    sealed = fastrack.SealedDataset(tmp_path / "digits.safetensors", keys=keys)
    return {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, sealed


def loaders(digits):
    """Return a loader of plain tensors and one of sealed ones, with the same batches in the same order."""
    plain, sealed = digits
    samples = [{name: tensor[index] for name, tensor in plain.items()} for index in range(SAMPLES)]
    for data, collate in ((samples, None), (sealed, fastrack.collate)):
        generator = torch.Generator().manual_seed(7)
        yield torch.utils.data.DataLoader(data, batch_size=32, shuffle=True, collate_fn=collate, generator=generator)


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def new_model():
    torch.manual_seed(0)
    return torch.nn.Linear(64, CLASSES)


def test_lightning(digits, asked, key):
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = new_model()
            self.kinds = set()

        def training_step(self, batch):
            self.kinds.add(type(batch["x"]))
            return torch.nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    trained = []
    for loader in loaders(digits):
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, barebones=False,
        )  # fmt: skip
        module = Classifier()
        trainer.fit(module, loader)
        assert module.kinds == {torch.Tensor}
        trained.append(weights(module))
    assert torch.equal(*trained)
    assert set(asked) == {key.id}


def test_accelerate(digits, asked, key):
    accelerate = pytest.importorskip("accelerate")
    trained = []
    for loader in loaders(digits):
        accelerator = accelerate.Accelerator(cpu=True)
        model = new_model()
        model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        seen = 0
        for _ in range(2):
            for batch in prepared:
                loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen += len(accelerator.gather_for_metrics(batch["y"]))
        assert seen == 2 * SAMPLES
        trained.append(weights(model))
    assert torch.equal(*trained)
    assert set(asked) == {key.id}


def test_transformers(tmp_path, asked, key):
    transformers = pytest.importorskip("transformers")
    tokens = np.random.default_rng(0).integers(0, 50, 2000)
    fastrack.save_file({"input_ids": tokens}, tmp_path / "tokens.safetensors", key)
    windows = fastrack.SealedDataset(tmp_path / "tokens.safetensors", keys=asked.keys).windows("input_ids", 16)
    plain = [{"input_ids": torch.from_numpy(window)} for window in tokens.reshape(-1, 16)]
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
    )

    def collate_sealed(samples):
        batch = fastrack.collate(samples)
        return {**batch, "labels": batch["input_ids"]}

    def collate_plain(samples):
        batch = torch.stack([sample["input_ids"] for sample in samples])
        return {"input_ids": batch, "labels": batch}

    trained = []
    for data, collate in ((plain, collate_plain), (windows, collate_sealed)):
        torch.manual_seed(0)
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), per_device_train_batch_size=8, max_steps=12, seed=1, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no", remove_unused_columns=False, logging_steps=100,
        )  # fmt: skip
        trainer = transformers.Trainer(
            transformers.GPT2LMHeadModel(config), arguments, train_dataset=data, data_collator=collate
        )
        trainer.train()
        trained.append(weights(trainer.model))
    assert torch.equal(*trained)
    assert set(asked) == {key.id}


def test_a_trainer_without_a_collator_is_told_of_its_own(tmp_path, digits):
    transformers = pytest.importorskip("transformers")
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "remove_unused_columns": False}
    arguments = transformers.TrainingArguments(str(tmp_path / "out"), **options)
    trainer = transformers.Trainer(new_model(), arguments, train_dataset=digits[1])
    with pytest.raises(RuntimeError, match=r"data_collator= of a Trainer.*keys= of the dataset or after .*use_keys"):
        trainer.train()


def test_a_trainer_without_the_key_stops(digits, key):
    accelerate = pytest.importorskip("accelerate")
    _, sealed = loaders(digits)
    loader = accelerate.Accelerator(cpu=True).prepare(sealed)
    other = fastrack.Key.generate()
    with fastrack.use_keys({other.id: other}.get), pytest.raises(fastrack.UnknownKeyError, match=key.id):
        next(iter(loader))
