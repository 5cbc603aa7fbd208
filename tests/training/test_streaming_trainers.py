"""A stream of sealed batches in the loaders and trainers of other libraries."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.ranks import run_ranks

import fastrack

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what these libraries warn of is theirs

KEY = fastrack.Key.from_bytes(bytes(range(32)))
COUNT, BATCH = 150, 16


@pytest.fixture
def folder(tmp_path):
    for shard, numbers in enumerate(np.array_split(np.arange(COUNT), 6)):
        x = np.repeat(numbers[:, None], 4, 1).astype(np.float32)
        fastrack.save_file({"x": x, "y": numbers}, tmp_path / f"{shard}.safetensors", KEY)
    return tmp_path


def stream_of(folder, size=BATCH, **options):
    data = fastrack.SealedDataset(sorted(Path(folder).glob("*.safetensors")), keys=KEY)
    return fastrack.StreamingSealedDataset(data, size, seed=3, window=2, **options)


def batches_of(loader, count=None):
    return [batch["y"].tolist() for batch in itertools.islice(loader, count)]


def expected(folder, epoch=0):
    stream = stream_of(folder)
    stream.set_epoch(epoch)
    return batches_of(fastrack.wrap(torch.utils.data.DataLoader(stream, batch_size=None)))


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("used", [1, 7, 10])
def test_torchdata_continues_after_the_last_used_batch(folder, workers, persistent, used):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        loader = stateful.StatefulDataLoader(
            stream_of(folder), batch_size=None, num_workers=workers, persistent_workers=persistent
        )
        return fastrack.wrap(loader)

    first = make()
    batches_of(first)
    first.set_epoch(1)
    iterator = iter(first)
    before = batches_of(iterator, used)
    state = first.state_dict()
    iterator.close()
    second = make()
    second.set_epoch(1)
    second.load_state_dict(state)
    assert before + batches_of(second) == expected(folder, 1)
    second.set_epoch(2)
    assert batches_of(second) == expected(folder, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_goes_on_with_the_epoch_that_was_set_after_one_that_is_finished(folder, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    first, second = (
        fastrack.wrap(stateful.StatefulDataLoader(stream_of(folder), batch_size=None, num_workers=workers))
        for _ in range(2)
    )
    batches_of(first)
    second.load_state_dict(first.state_dict())
    second.set_epoch(1)
    assert batches_of(second) == expected(folder, 1)


def accelerator_of(**options):
    """Return Accelerate's object in a process that `run_ranks` began."""
    from accelerate import Accelerator, DataLoaderConfiguration

    rank, world = map(str, (torch.distributed.get_rank(), torch.distributed.get_world_size()))
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def gathered(parts):
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, parts)
    return [list(itertools.chain(*batch)) for batch in zip(*every, strict=True)]


def loader_of(stream, size, workers=0):
    return torch.utils.data.DataLoader(
        stream, batch_size=size, num_workers=workers, collate_fn=None if size is None else fastrack.collate
    )


def accelerate_prepared(folder, split, workers):
    split = split == "True"
    accelerator = accelerator_of(dispatch_batches=False, split_batches=split)
    stream = stream_of(folder, batched=False, drop_last=True)
    with fastrack.use_keys(KEY):
        loader = accelerator.prepare(loader_of(stream, BATCH if split else BATCH // 2, int(workers)))
        for epoch in range(2):
            assert gathered(batches_of(loader)) == expected_here(folder, epoch)[: COUNT // BATCH]


def accelerate_unprepared(folder, workers):
    accelerator = accelerator_of()
    loader = fastrack.wrap(loader_of(stream_of(folder), None, int(workers)), accelerator.device)
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert gathered(batches_of(loader)) == expected_here(folder, epoch)


def accelerate_refused(folder):
    with fastrack.use_keys(KEY):
        for stream, options, message in (
            (stream_of(folder, batched=False), {"dispatch_batches": None}, "got dispatch_batches=True of Accelerate"),
            (stream_of(folder), {"dispatch_batches": None}, "got dispatch_batches=True of Accelerate"),
            (stream_of(folder), {"dispatch_batches": False}, "got batches that are divided already"),
        ):
            size = 8 if not stream.batched else None
            loader = accelerator_of(**options).prepare(loader_of(stream, size))
            with pytest.raises(ValueError, match=message):
                next(iter(loader))
        with pytest.raises(ValueError, match="with which each gets all samples"):
            next(iter(loader_of(stream_of(folder, batched=False), 8)))


def expected_here(folder, epoch):
    """Return the global batches, as one rank without a process group has them."""
    stream = stream_of(folder, rank=0, world_size=1)
    stream.set_epoch(epoch)
    return batches_of(fastrack.wrap(loader_of(stream, None)))


def test_accelerate_divides_a_stream_of_samples(folder):
    pytest.importorskip("accelerate")
    run_ranks(*((2, accelerate_prepared, folder, split, workers) for split in (False, True) for workers in (0, 2)))


@pytest.mark.nightly
def test_accelerate_leaves_a_stream_of_batches_alone(folder):
    pytest.importorskip("accelerate")
    run_ranks(*((2, accelerate_unprepared, folder, workers) for workers in (0, 2)))


def test_accelerate_may_not_divide_batches_twice_nor_send_opened_ones(folder):
    pytest.importorskip("accelerate")
    run_ranks((2, accelerate_refused, folder))


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_trains_on_a_stream_and_resumes_at_the_epoch_of_its_checkpoint(folder, workers):
    lightning = pytest.importorskip("lightning")
    seen = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(4, 1)

        def train_dataloader(self):
            self.stream = stream_of(folder)
            self.stream.set_epoch(self.current_epoch)
            return loader_of(self.stream, None, workers)

        def on_train_epoch_start(self):
            self.stream.set_epoch(self.current_epoch)

        def training_step(self, batch):
            seen.append(batch["y"].tolist())
            return self.model(batch["x"]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(epochs, checkpoint=None):
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), ckpt_path=checkpoint)
        return trainer

    with fastrack.use_keys(KEY):
        fit(2).save_checkpoint(folder / "last.ckpt")
        assert seen == [*expected(folder), *expected(folder, 1)]
        seen.clear()
        fit(4, folder / "last.ckpt")
    assert seen == [*expected(folder, 2), *expected(folder, 3)]


def test_transformers_trains_on_a_stream_of_samples_and_resumes(folder):
    transformers = pytest.importorskip("transformers")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = torch.nn.Linear(4, 1), []

        def forward(self, x, y):
            self.seen.append(y.tolist())
            return {"loss": self.linear(x).mean()}

    def train(steps, resume=None):
        arguments = transformers.TrainingArguments(
            str(folder / "out"), per_device_train_batch_size=BATCH, max_steps=steps, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="steps", save_steps=4, remove_unused_columns=False, logging_steps=100,
        )  # fmt: skip
        trainer = transformers.Trainer(
            Model(), arguments, train_dataset=stream_of(folder, batched=False), data_collator=fastrack.collate
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.seen

    with fastrack.use_keys(KEY):
        seen = train(14)
        resumed = train(14, str(folder / "out" / "checkpoint-12"))
    assert seen == [*expected(folder), *expected(folder, 1)][:14]
    assert resumed == seen[12:]
