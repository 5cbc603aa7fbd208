"""Batches of sealed rows through a `DataLoader` and `wrap`."""

from itertools import cycle

import numpy as np
import pytest
from conftest import MIB
from torch.utils.data import DataLoader

from fastrack import Channel, SealedDataset, collate, save_file, wrap

ROWS, SIDE, BATCH = 1024, 64, 64
SIZE = ROWS * SIDE * SIDE
WINDOW, WINDOWS = 2048, 32


@pytest.fixture(scope="module")
def data(tmp_path_factory, key, plain):
    path = tmp_path_factory.mktemp("loader") / "data.safetensors"
    save_file({"images": plain[:SIZE].reshape(ROWS, SIDE, SIDE), "labels": np.arange(ROWS)}, path, key)
    return SealedDataset(path)


def epoch(loader):
    return sum(len(batch["labels"]) for batch in loader)


@pytest.mark.guard
@pytest.mark.benchmark(group=f"an epoch of {SIZE // MIB} MiB in batches of {BATCH}")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_wrapped_epoch(rate, data, key, prefetch):
    loader = DataLoader(data, BATCH, shuffle=True, collate_fn=collate)
    assert rate(SIZE, epoch, wrap(loader, keys=key, prefetch=prefetch)) == ROWS


@pytest.mark.guard
@pytest.mark.benchmark(group=f"a batch of {WINDOWS} windows of {WINDOW} bytes out of 64 MiB")
@pytest.mark.parametrize("files", [1, 16])
def test_batch_of_windows(rate, tmp_path, key, plain, files):
    """Another batch each time: from its numbers to the tensor."""
    paths = [tmp_path / f"{number}.safetensors" for number in range(files)]
    for path in paths:
        save_file({"bytes": plain[: 64 * MIB // files]}, path, key)
    data = SealedDataset(paths).windows("bytes", WINDOW)
    batches = cycle(np.random.default_rng(0).integers(0, len(data), (500, WINDOWS)).tolist())
    with Channel("cpu", keys=key) as channel:
        rate(WINDOWS * WINDOW, lambda: channel.to_device(collate(data.__getitems__(next(batches)))))
