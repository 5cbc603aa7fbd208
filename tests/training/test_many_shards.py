"""Datasets of more files than a process may open, and than the kernel maps for it."""

import gc
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import room_for

from fastrack import Key, SealedDataset, save_file, seal, to_device, unseal
from fastrack._sealed import storage
from fastrack.errors import FormatError

KEY = Key.from_bytes(bytes(range(32)))
ROWS = 3


def make_shards(folder, count):
    """Write files of some rows of their number, without a wait for the disk."""
    paths = [folder / f"{number:06}.safetensors" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(seal(np.full((ROWS, 8), number, np.int32), KEY, name="x").to_bytes())
    return paths


def read_shuffled(paths, step):
    """Open a dataset and read all samples in another order."""
    data = SealedDataset(paths, keys=KEY)
    order = list(range(len(data)))
    random.Random(1).shuffle(order)
    for start in range(0, len(order), step):
        rows = order[start : start + step]
        batch = to_device(data.__getitems__(rows).stack()["x"], keys=KEY, framework="numpy")
        assert (batch == np.array(rows)[:, None] // ROWS).all()
    return data


def maps_of(folder):
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_more_shards_than_descriptors_and_maps_are_read_shuffled(tmp_path, limited):
    paths = make_shards(tmp_path, 300)
    limited(mapped_files=100)
    with room_for(3):
        data = read_shuffled(paths, 64)
    assert len(data) == 300 * ROWS
    assert 0 < maps_of(tmp_path) <= 100


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("count", [10_000, 100_000])
def test_very_many_shards_are_read_shuffled(tmp_path, count):
    paths = make_shards(tmp_path, count)
    with room_for(3):
        data = read_shuffled(paths, 1024)
    assert len(pickle.dumps(data)) < 40 * count
    assert 0 < maps_of(tmp_path) <= storage.MAP_LIMIT


def test_a_batch_of_more_shards_than_maps_is_opened_in_one_call(tmp_path, limited):
    paths = make_shards(tmp_path, 50)
    limited(mapped_files=10)
    data = SealedDataset(paths)
    assert to_device(data[::ROWS]["x"], keys=KEY, framework="numpy")[:, 0].tolist() == list(range(50))


def test_a_data_set_of_many_files_pickles_in_few_bytes_and_is_opened_when_it_is_used(tmp_path):
    paths = make_shards(tmp_path, 300)
    data = SealedDataset(paths)
    pickled = pickle.dumps(data)
    assert len(pickled) < 1000 + 32 * len(paths)
    del data
    gc.collect()
    again = pickle.loads(pickled)
    assert len(again) == 300 * ROWS
    assert maps_of(tmp_path) == 0
    assert unseal(again[-1]["x"], KEY).tolist() == [299] * 8


@pytest.mark.parametrize("change", ["replaced", "missing"])
def test_a_file_that_changed_before_a_worker_opens_it_is_named(tmp_path, change):
    paths = make_shards(tmp_path, 3)
    data = SealedDataset(paths)
    pickled = pickle.dumps(data)
    del data
    gc.collect()
    if change == "missing":
        paths[1].unlink()
    else:
        save_file({"x": np.zeros((ROWS, 8), np.int32)}, paths[1], KEY)
    again = pickle.loads(pickled)
    with pytest.raises((FormatError, FileNotFoundError), match=str(paths[1])):
        unseal(again[0]["x"], KEY)


def test_contexts_come_back_from_a_pickle_as_they_were(tmp_path):
    first = tmp_path / "first.safetensors"
    moved = seal(np.arange(8), KEY, name="y")  # of another file id
    save_file({"x": np.zeros((8, 2)), "y": moved}, first, KEY)
    save_file({"x": np.ones((5, 2)), "y": np.arange(5)}, tmp_path / "second.safetensors", KEY)
    data = SealedDataset([first, tmp_path / "second.safetensors"])
    contexts = data._ref.layout.shards.contexts
    pickled = pickle.dumps(data)
    del data
    gc.collect()
    again = pickle.loads(pickled)
    assert again._ref.layout.shards.contexts == contexts
    assert unseal(again[12]["y"], KEY).item() == 4
    assert unseal(again[7]["y"], KEY).item() == 7
