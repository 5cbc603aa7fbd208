"""A dataset that was given keys opens its own samples with them: in its process, while it lives, and no others."""

import gc
import multiprocessing
import os
import pickle
import weakref

import numpy as np
import pytest
import torch
from helpers.cases import each
from helpers.forking import in_forked_child
from torch.utils.data import ConcatDataset, DataLoader, Subset

import fastrack
from fastrack import ClosedError, Key, KeyRing, SealedDataset, UnknownKeyError, collate, to_device, unseal, use_keys
from fastrack._training import handles

SECRET, OTHER_SECRET = bytes(range(32)), bytes(range(100, 132))
KEY, OTHER = Key.from_bytes(SECRET), Key.from_bytes(OTHER_SECRET)
X = np.arange(12.0).reshape(4, 3)
TEXT = ["a", "bb", "", "dddd"]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Return a folder of datasets, one of them under another key."""
    path = tmp_path_factory.mktemp("data")
    for name, key in (("a", KEY), ("b", KEY), ("other", OTHER)):
        with fastrack.DatasetWriter(path / name, key) as writer:
            writer.write_batch({"x": X, "text": TEXT})
    return path


@pytest.fixture
def data(folder):
    return SealedDataset(folder / "a", keys=KEY)


def open_first(data):
    return data[0]["x"].to("cpu")


WAYS = {
    "to_device": lambda data: to_device(data[1]["x"]),
    "a sample": lambda data: to_device(data[1])["x"],
    "unseal": lambda data: unseal(data[1]["x"]),
    "to": lambda data: data[1]["x"].to("cpu"),
    "several": lambda data: data[1:2]["x"].to("cpu")[0],
    "a batch": lambda data: collate(data.__getitems__([1]))["x"].to("cpu")[0],
    "stacked": lambda data: collate([data[1], data[2]])["x"].to("cpu")[0],
    "a loader": lambda data: next(iter(DataLoader(data, 2, collate_fn=collate)))["x"].to("cpu")[1],
    "a subset": lambda data: next(iter(DataLoader(Subset(data, [1]), collate_fn=collate)))["x"].to("cpu")[0],
    "windows": lambda data: open_first(data.windows("x", 2))[1],
    "records": lambda data: torch.tensor([3.0, 4, 5]) if bytes(data[1]["text"].to("cpu")) == b"bb" else None,
    "a copy": lambda data: pickle.loads(pickle.dumps(data))[1]["x"].to("cpu"),
    "a handle of a pickle": lambda data: pickle.loads(pickle.dumps(data[1]["x"])).to("cpu"),
    "the whole": lambda data: to_device({"x": data[1]["x"], "y": [data[0]["text"], 7]})["x"],
    "a channel": lambda data: fastrack.Channel().to_device(data[1]["x"]),
    "concatenated": lambda data: next(iter(fastrack.wrap(DataLoader(ConcatDataset([data, data]), 2))))["x"][1],
}


@each("way", WAYS)
def test_a_data_set_opens_its_own_samples(way, data):
    assert WAYS[way](data).tolist() == [3, 4, 5]


def test_a_collator_of_another_library_names_what_to_use(data):
    with pytest.raises(RuntimeError, match=r"data_collator= of a Trainer.*keys= of the dataset or after .*use_keys"):
        torch.tensor([data[1]["x"]])  # as that of a Trainer does


def test_a_data_set_with_an_index_does_so(folder, tmp_path):
    (tmp_path / "c").mkdir()
    for path in (folder / "a").iterdir():
        (tmp_path / "c" / path.name).write_bytes(path.read_bytes())
    fastrack.index_dataset(tmp_path / "c", KEY)
    data = SealedDataset(tmp_path / "c", keys=KEY)
    assert data[3]["x"].to("cpu").tolist() == [9, 10, 11]


def refused(*handles, **options):
    """Return whether all ways refuse handles for want of a key."""
    for each_handle in handles:
        for way in (lambda one: to_device({"x": one}, **options), lambda one: unseal(one, **options)):
            with pytest.raises(UnknownKeyError):
                way(each_handle)
    return True


def test_keys_of_the_call_and_of_a_channel_come_before_and_defaults_after(data, monkeypatch, tmp_path):
    handle = data[1]["x"]
    assert refused(handle, keys=OTHER)
    with fastrack.Channel(keys=OTHER) as channel, pytest.raises(UnknownKeyError):
        channel.to_device(handle)
    OTHER.save(tmp_path / "other.key")
    monkeypatch.setenv("FASTRACK_KEY_FILE", str(tmp_path / "other.key"))
    with use_keys(OTHER):
        assert handle.to("cpu").tolist() == [3, 4, 5]
        assert refused(SealedDataset(data._shards.paths, ["x"])[1]["x"])  # which was given none
    with use_keys(KEY):
        assert SealedDataset(data._shards.paths, ["x"])[1]["x"].to("cpu").tolist() == [3, 4, 5]


def test_a_key_that_was_taken_back_opens_nothing(folder):
    given = {KEY.id: KEY}
    data = SealedDataset(folder / "a", keys=KeyRing(given.get, ttl=0))
    handle = data[1]["x"]
    assert handle.to("cpu").tolist() == [3, 4, 5]
    given.clear()
    with use_keys(KEY):  # no key is looked for elsewhere
        assert refused(handle)
    wiped = Key.from_bytes(SECRET)
    data = SealedDataset(folder / "a", keys=wiped)
    wiped.wipe()
    with pytest.raises(ClosedError, match="wiped"):
        data[1]["x"].to("cpu")


def test_a_handle_of_a_data_set_that_ended_opens_nothing(folder):
    ring = KeyRing(KEY)
    data = SealedDataset(folder / "a", keys=ring)
    handle, watched, windows = data[1]["x"], weakref.ref(data), data.windows("x", 1)
    del data
    gc.collect()
    assert watched() is None
    assert refused(handle)
    assert windows[1]["x"].to("cpu").tolist() == [[3, 4, 5]]  # a dataset of its own
    assert unseal(handle, KEY).tolist() == [3, 4, 5]


def test_no_sample_opens_with_the_keys_of_another_data_set(folder):
    a, b = (SealedDataset(folder / name, ["x"], keys=KEY) for name in "ab")
    other, none = SealedDataset(folder / "other", ["x"], keys=OTHER), SealedDataset(folder / "b", ["x"])
    opened = to_device({"a": a[1]["x"], "other": other[2]["x"], "b": b[0]["x"]})
    assert [each.tolist() for each in opened.values()] == X[[1, 2, 0]].tolist()
    with pytest.raises(UnknownKeyError):
        to_device({"a": a[1]["x"], "none": none[2]["x"]})
    assert refused(collate([a[0], none[0]])["x"], collate([a[0], other[0]])["x"])
    both = SealedDataset(folder / "other", ["x"], keys=[KEY, OTHER])
    assert refused(collate([a[0], both[0]])["x"])
    assert collate([a[1], b[2]])["x"].to("cpu").tolist() == X[[1, 2]].tolist()
    batch = next(iter(fastrack.wrap(DataLoader(ConcatDataset([a, b]), 8, collate_fn=collate))))
    assert batch["x"].tolist() == [*X.tolist(), *X.tolist()]
    for several in ([a, other], [a, none], [a, both]):
        with pytest.raises(UnknownKeyError):
            next(iter(fastrack.wrap(DataLoader(ConcatDataset(several), 8, collate_fn=collate))))


def test_a_pickle_that_claims_the_id_of_a_data_set_gets_none_of_its_keys(folder, data):
    other = SealedDataset(folder / "other", ["x"])
    ref = handles.restore_ref(data._ref.parts[0].dataset_id, other._ref.parts[0].layout)
    assert ref is data._ref.parts[0]  # and none of the other's files
    claimed = handles.DatasetHandle(other._ref.parts[0].layout, data._ref.parts[0].dataset_id)
    assert refused(claimed.sample(1)["x"])


PICKLED = {
    "a sample": lambda data, _: data[1],
    "rows": lambda data, _: data[:2],
    "samples": lambda data, _: data.__getitems__([1]),
    "a batch of two": lambda data, other: collate([data[1], other[1]]),
    "a dataset": lambda data, _: data,
    "windows": lambda data, _: data.windows("x", 2),
}


@each("what", PICKLED)
def test_no_pickle_has_a_key(what, folder, monkeypatch):
    monkeypatch.setattr(KeyRing, "__reduce_ex__", lambda *_: pytest.fail("a ring is pickled"))
    made = pickle.dumps(PICKLED[what](*(SealedDataset(folder / name, ["x"], keys=KEY) for name in "ab")))
    assert not any(secret in made for secret in (SECRET, SECRET.hex().encode(), SECRET[:8]))
    gc.collect()
    try:
        found = pickle.loads(made)  # as in a process of its own
    except ClosedError:  # no dataset is there
        return
    assert refused(found[0]["x"])


def test_a_forked_child_opens_nothing_unasked(data):
    handle, process = data[1]["x"], os.getpid()

    def try_all():
        assert os.getpid() != process
        return refused(handle, data[2]["x"], pickle.loads(pickle.dumps(handle))) and unseal(handle, KEY).tolist()

    assert in_forked_child(try_all) == [3, 4, 5]
    assert handle.to("cpu").tolist() == [3, 4, 5]


def try_to_open(samples):
    batch = collate(samples)
    try:
        batch["x"].to("cpu")
    except UnknownKeyError:
        return {**batch, "opened": torch.zeros(1)}
    return {**batch, "opened": torch.ones(1)}


@pytest.mark.parametrize(
    "method", [pytest.param("fork", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.nightly)]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_worker_opens_nothing_and_its_batches_open_here(method, data):
    context = multiprocessing.get_context(method)
    loader = DataLoader(data, 2, num_workers=1, collate_fn=try_to_open, multiprocessing_context=context)
    batches = list(loader)
    assert not any(batch["opened"] for batch in batches)
    assert [row for batch in batches for row in batch["x"].to("cpu").tolist()] == X.tolist()
