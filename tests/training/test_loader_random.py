"""Random numbers beside a wrapped loader without workers: they are those that are drawn beside the loader itself."""

import random
import threading

import numpy as np
import pytest
import torch
from helpers.cases import each
from torch.utils import data

import fastrack

ROWS, SIZE = 36, 4
DRAWS = (random.random, np.random.rand, lambda: torch.rand(()).item())
KEY = fastrack.Key.generate()


def draw_one():
    return sum(draw() for draw in DRAWS)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.safetensors"
    fastrack.save_file({"x": np.arange(ROWS, dtype=np.float64)}, path, KEY)
    return path


class Stream(data.IterableDataset):
    def __iter__(self):
        return (draw_one() for _ in range(ROWS))


class Own(data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return index + draw_one()


class Named(Own):
    generator = np.arange(3)  # no generator of random numbers


class Sampler(data.Sampler):
    def __iter__(self):
        return (int(draw_one() * ROWS / len(DRAWS)) % ROWS for _ in range(ROWS))

    def __len__(self):
        return ROWS


class Subclass(fastrack.SealedDataset):
    def __getitems__(self, indices):
        draw_one()
        return super().__getitems__(indices)


class Loader(data.DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            draw_one()
            yield batch


def collate(samples):
    draw_one()
    return fastrack.collate(samples)


def sealed(path, kind=fastrack.SealedDataset, loader=data.DataLoader, size=SIZE, **options):
    return loader(kind(path, keys=KEY), size, **{"collate_fn": fastrack.collate, **options})


def transformed(path):
    return fastrack.SealedDataset(path, keys=KEY, transform=lambda sample: {"x": sample["x"] + draw_one()})


LOUD = {
    "transform": lambda path: data.DataLoader(transformed(path), SIZE),
    "subset of a transform": lambda path: data.DataLoader(data.Subset(transformed(path), range(30)), SIZE),
    "two datasets with a transform": lambda path: data.DataLoader(data.ConcatDataset([transformed(path)] * 2), SIZE),
    "dataset": lambda _: data.DataLoader(Own(), SIZE),
    "iterable dataset": lambda _: data.DataLoader(Stream(), SIZE),
    "dataset with a generator of another kind": lambda _: data.DataLoader(Named(), SIZE),
    "datasets of an iterator": lambda _: data.DataLoader(data.ChainDataset(Stream() for _ in range(2)), SIZE),
    "sampler": lambda path: sealed(path, sampler=Sampler()),
    "sampler of batches": lambda path: sealed(path, size=1, batch_sampler=data.BatchSampler(Sampler(), SIZE, False)),
    "collation": lambda path: sealed(path, collate_fn=collate),
    "subclass": lambda path: sealed(path, Subclass),
    "subclass of the loader": lambda path: sealed(path, loader=Loader),
    "generator of the caller": lambda path: sealed(path, shuffle=True, generator=torch.default_generator),
}
QUIET = {
    "in order": sealed,
    "shuffled": lambda path: sealed(path, shuffle=True),
    "drawn again": lambda path: sealed(path, sampler=data.RandomSampler(range(ROWS), replacement=True)),
    "weighted": lambda path: sealed(path, sampler=data.WeightedRandomSampler([1.0] * ROWS, ROWS)),
    "subset": lambda path: sealed(path, sampler=data.SubsetRandomSampler(range(20))),
    "collated by torch": lambda path: sealed(path, collate_fn=None, shuffle=True),
}


def run(loader, prefetch=None):
    """Return the batches, what the caller draws meanwhile, and whether a thread fetched."""
    random.seed(5), torch.manual_seed(5), np.random.seed(5)  # noqa: NPY002 - what transforms draw from
    batches = loader if prefetch is None else fastrack.wrap(loader, prefetch=prefetch)
    seen, is_ahead = [], False
    for last in (3, ROWS, ROWS):  # the first epoch ends early
        iterator = iter(batches)
        seen.append(draw_one())
        for number, batch in enumerate(iterator):
            opened = fastrack.to_device(batch, keys=KEY)
            seen += [np.asarray(opened["x"] if isinstance(opened, dict) else opened).tolist(), draw_one()]
            is_ahead |= any(thread.name == "fastrack-loader" for thread in threading.enumerate())
            if number == last:
                break
        del iterator
    return seen, is_ahead


ALL = {**LOUD, **QUIET}


@each("name", ["transform", "sampler", "datasets of an iterator", "shuffled"])
def test_batches_and_draws_are_those_of_the_loader_itself(path, name):
    """A thread that fetched ahead drew between the numbers of the caller: no two runs of a seed were equal."""
    found, is_ahead = run(ALL[name](path), prefetch=2)
    assert found == run(ALL[name](path))[0]
    assert is_ahead == (name in QUIET)  # the overlap is kept where nothing draws


@pytest.mark.slow
@each("name", ALL)
def test_they_are_so_whatever_draws(path, name):
    bare, _ = run(ALL[name](path))
    for prefetch in (0, 1, 3):
        found, is_ahead = run(ALL[name](path), prefetch)
        assert found == bare
        assert is_ahead == (prefetch > 0 and name in QUIET)


def test_a_sampler_draws_when_the_first_batch_is_asked_for(path):
    for prefetch in (0, 2):
        torch.manual_seed(1)
        iterator = iter(fastrack.wrap(sealed(path, shuffle=True), prefetch=prefetch))
        torch.manual_seed(2)
        first = next(iterator)["x"]
        bare = iter(sealed(path, shuffle=True))
        torch.manual_seed(2)
        assert torch.equal(first, fastrack.to_device(next(bare)["x"], keys=KEY))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@each("shuffle", [False, True])
@each("own", [False, True])
def test_a_run_that_is_resumed_in_an_epoch_draws_what_the_whole_run_draws(path, shuffle, own):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        torch.manual_seed(3)
        samples = transformed(path) if own else fastrack.SealedDataset(path, keys=KEY)
        loader = stateful.StatefulDataLoader(samples, SIZE, shuffle=shuffle, collate_fn=fastrack.collate)
        return fastrack.wrap(loader, keys=KEY)

    def rest_of(batches):
        return [(batch["x"].tolist(), draw_one()) for batch in batches]

    batches = make()
    iterator = iter(batches)
    for _ in range(3):
        next(iterator)
        draw_one()
    state = batches.state_dict(), random.getstate(), torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    whole = rest_of(iterator)
    again = make()
    again.load_state_dict(state[0])
    resumed = iter(again)
    random.setstate(state[1]), torch.set_rng_state(state[2]), np.random.set_state(state[3])  # noqa: NPY002
    assert rest_of(resumed) == whole
