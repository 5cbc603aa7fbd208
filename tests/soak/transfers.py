"""Transfers of a soak's thread that succeed."""

import faulthandler
import os
from collections import namedtuple

import numpy as np
import torch
from helpers.forking import in_forked_child
from torch.utils.data import DataLoader

import fastrack
from fastrack import SealedDataset
from soak.worker import KEYS, RING

Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - of arrays of any kind


def plain(worker):
    array = worker.array()
    given = torch.from_numpy(array.copy()) if worker.random.random() < 0.5 else array
    with worker.way() as way:
        for _ in range(worker.random.randrange(1, 4)):
            worker.check(worker.give(way, given, non_blocking=worker.random.random() < 0.5), array)


def sealed(worker):
    message, array = worker.sealed()
    with worker.way() as way:
        framework = worker.random.choice([None, "numpy", "torch"])
        worker.check(worker.give(way, message, framework=framework), array)
        worker.check(worker.give(way, message, out=np.ones_like(array)), array, "out=")
    worker.check(fastrack.unseal(message, RING, framework="numpy"), array, "unseal")


def rows(worker):
    message, array = worker.sealed(max(worker.size(), 4096), rows=worker.random.choice([3, 17, 100]))
    chosen = [worker.random.randrange(-len(array), len(array)) for _ in range(worker.random.randrange(40))]
    choice = worker.random.choice([chosen, slice(1, None, 2), 0, np.arange(len(array)) % 2 == 0])
    with worker.way() as way:
        worker.check(worker.give(way, message[choice], framework="numpy"), array[choice], "rows")


def nest(worker):
    (one, first), (two, second) = worker.sealed(), worker.sealed()
    third = worker.array(worker.size() // 8)
    given = {"a": [one, Pair(third, "text")], "b": (two, {"c": third}), "d": None}
    with worker.way() as way:
        moved = worker.give(way, given, framework="numpy")
    found = moved["a"][0], moved["a"][1].left, moved["b"][0], moved["b"][1]["c"]
    for one, array in zip(found, (first, third, second, third), strict=True):
        worker.check(one, array, "a nest")
    assert moved["a"][1].right == "text"
    assert moved["d"] is None


def there_and_back(worker):
    array = worker.array()
    key = worker.key()
    with worker.way() as way:
        back = way.to_host(worker.give(way, array), key=key, name="back")
        worker.check(worker.give(way, back, framework="numpy"), array, "there and back")


def file(worker):
    arrays = {name: worker.array(worker.size() // 4) for name in "abc"}
    path = worker.folder / "a.safetensors"
    fastrack.save_file(arrays, path, worker.key(), plain=["c"])
    with fastrack.load_file(path) as opened:
        if worker.random.random() < 0.5:
            path.unlink()  # what is mapped stays
        with worker.way() as way:
            moved = worker.give(way, opened, framework="numpy")
        worker.check(opened.plain["c"], arrays["c"], "a plain tensor")
    for name in "ab":
        worker.check(moved[name], arrays[name], "a file")
    if path.exists():
        fastrack.verify_file(path, RING)
        path.unlink()


def checkpoint(worker):
    state = {"w": torch.from_numpy(worker.array(worker.size() // 8).copy()), 3: [np.float32(1.5), (None, b"x")]}
    path = worker.folder / "c.safetensors"
    fastrack.save_checkpoint(path, state, key=worker.key())
    loaded = fastrack.load_checkpoint(path, keys=KEYS)
    path.unlink()
    worker.check(loaded["w"], state["w"].numpy(), "a checkpoint")
    assert loaded[3] == state[3]


def loader(worker, workers=0):
    count = worker.random.randrange(1, 60)
    arrays = {"x": worker.array(count * 512, rows=count), "y": np.arange(count)}
    path = worker.folder / "d.safetensors"
    fastrack.save_file(arrays, path, worker.key())
    options = {"num_workers": workers, "multiprocessing_context": "forkserver", "timeout": 60} if workers else {}
    size, seed = worker.random.choice([1, 7, 32]), worker.random.randrange(1000)
    options |= {"shuffle": True, "generator": torch.Generator().manual_seed(seed), "collate_fn": fastrack.collate}
    batches = DataLoader(SealedDataset(path), size, **options)
    wrapped = fastrack.wrap(batches, keys=KEYS, prefetch=worker.random.choice([0, 1, 3]))
    seen = []
    for batch in wrapped:
        order = batch["y"].numpy()
        worker.check(batch["x"], arrays["x"][order], "a batch")
        seen += order.tolist()
        if worker.random.random() < 0.02:
            break
    else:
        assert sorted(seen) == list(range(count))
    path.unlink()


def loader_with_processes(worker):
    loader(worker, workers=worker.random.choice([1, 2]))


def fork(worker):
    """A forked child moves and opens on its own, with the module's channel, while its parent's threads go on."""
    message, array = worker.sealed(worker.size() // 4)

    def in_child():
        faulthandler.dump_traceback_later(30)  # where it hangs, if it does: it is killed after 50 seconds
        there = fastrack.to_device(array)
        opened = fastrack.to_device(message, keys=KEYS, framework="numpy")
        return os.getpid(), there.tobytes() == array.tobytes(), opened.tobytes() == array.tobytes()

    child, *good = in_forked_child(in_child, 50)
    assert child != os.getpid()
    assert all(good), "a forked child got wrong bytes"


LIGHT = {plain: 10, sealed: 10, rows: 10, nest: 5, there_and_back: 8, file: 4, checkpoint: 2, loader: 2, fork: 0.5}
HEAVY = {loader_with_processes: 0.3}
