"""Batches of sealed rows through a `DataLoader` and `wrap`."""

import numpy as np
import pytest
from conftest import MIB
from torch.utils.data import DataLoader

from fastrack import SealedDataset, collate, save_file, wrap

ROWS, SIDE, BATCH = 1024, 64, 64
SIZE = ROWS * SIDE * SIDE


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
