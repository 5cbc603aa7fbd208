"""Datasets in worker processes, forked and spawned: they send numbers, which become handles here."""

import gc
import io
import multiprocessing
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.loading import look_often, wait_until
from torch.utils.data import DataLoader, RandomSampler

import fastrack
from fastrack import Channel, Key, SealedDataset, collate

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # this machine may be small
]

SECRET = bytes(range(100, 132))
COUNTS = [90, 38]


@pytest.fixture(autouse=True)
def _leave_no_worker(monkeypatch):
    look_often(monkeypatch)
    yield
    wait_until(lambda: not multiprocessing.active_children())


@pytest.fixture(scope="module")
def key():
    return Key.from_bytes(SECRET)


@pytest.fixture(scope="module")
def channel(key):
    with Channel(keys=key) as channel:
        yield channel


@pytest.fixture(scope="module")
def plain():
    random = np.random.default_rng(0)
    return {
        "images": random.integers(0, 256, (sum(COUNTS), 30, 30), dtype=np.uint8),
        "labels": np.arange(sum(COUNTS)) * 7,
    }


@pytest.fixture(scope="module")
def paths(plain, key, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    start, paths = 0, []
    for count in COUNTS:
        paths.append(folder / f"{start}.safetensors")
        fastrack.save_file({name: array[start : start + count] for name, array in plain.items()}, paths[-1], key=key)
        start += count
    return paths


@pytest.fixture(scope="module")
def records(key, tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / "x.safetensors"
    offsets = np.array([0, 3, 3, 1000, 20_000])
    fastrack.save_file({"data": np.arange(20_000, dtype=np.int32), "offsets": offsets}, path, key=key)
    return SealedDataset.records(path, keys=key)


def with_maps(sample):
    """Give a sample, and what sealed files its worker has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sample, [line for line in lines if line.rstrip().endswith(".safetensors")]


def loaded(loader, channel):
    return [channel.to_device(batch) for batch in loader]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_batches_are_those_of_plain_indexing(channel, paths, plain, method):
    dataset = SealedDataset(paths)
    order = RandomSampler(dataset, generator=torch.Generator().manual_seed(3))
    options = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": True}
    loader = DataLoader(dataset, batch_size=16, sampler=order, collate_fn=collate, **options)
    for seed in (3, 4):
        order.generator.manual_seed(seed)
        moved = loaded(loader, channel)
        order.generator.manual_seed(seed)
        rows = np.concatenate([batch["labels"].rows for batch in loader])
        assert sorted(rows.tolist()) == list(range(128))
        for name, array in plain.items():
            assert np.array_equal(torch.cat([batch[name] for batch in moved]), array[rows])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_windows_and_records_come_back(channel, paths, plain, records, method):
    options = {"batch_size": 4, "collate_fn": collate, "num_workers": 1, "multiprocessing_context": method}
    windows = SealedDataset(paths[0]).windows("labels", 10, 5)
    moved = loaded(DataLoader(windows, **options), channel)
    expected = np.lib.stride_tricks.sliding_window_view(plain["labels"][: COUNTS[0]], 10)[::5]
    assert np.array_equal(torch.cat([batch["labels"] for batch in moved]), expected)

    (batch,) = loaded(DataLoader(records, **options), channel)
    assert batch["lengths"].tolist() == [3, 0, 997, 19_000]
    assert batch["data"].shape == (4, 19_000)
    for row, (start, stop) in enumerate([(0, 3), (3, 3), (3, 1000), (1000, 20_000)]):
        assert batch["data"][row, : stop - start].tolist() == list(range(start, stop))
        assert not batch["data"][row, stop - start :].any()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_samples_come_back_one_by_one(channel, paths, plain, records, method):
    options = {"batch_size": None, "num_workers": 1, "multiprocessing_context": method}
    for row, sample in enumerate(DataLoader(SealedDataset(paths), **options)):
        assert sample["images"].shape == (30, 30)
        if row % 40 == 0:
            assert np.array_equal(channel.to_device(sample)["images"], plain["images"][row])
    assert [sample["lengths"] for sample in DataLoader(records, **options)] == [3, 0, 997, 19_000]


@pytest.mark.slow
def test_a_spawned_worker_opens_no_file(paths):
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "sampler": [0, 127]}
    loader = DataLoader(SealedDataset(paths), batch_size=None, collate_fn=with_maps, **options)
    for sample, mapped in loader:
        assert sample["labels"].shape == ()
        assert not mapped


def test_a_row_out_of_range_is_refused_there(paths):
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = DataLoader(SealedDataset(paths), batch_size=2, sampler=[0, 128], collate_fn=collate, **options)
    with pytest.raises(IndexError, match="row 128"):
        list(loader)
    gc.collect()  # the frames of the error hold the worker


@pytest.mark.slow
def test_no_key_and_no_plaintext_reaches_a_worker(paths, plain, records):
    dataset = SealedDataset(paths)
    samples = dataset.__getitems__([5, 100])
    sent = [dataset, dataset.windows("labels", 3), records, collate, [5, 100], samples, *samples, collate(samples)]
    for thing in (*sent, records[3], collate(records.__getitems__([2, 3]))):
        buffer = io.BytesIO()
        ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(thing)
        data = buffer.getvalue()
        assert len(data) < 2000
        for secret in (SECRET, SECRET[:8], plain["images"][5].tobytes()[:8], plain["labels"][100:101].tobytes()):
            assert secret not in data
            assert secret.hex().encode() not in data
