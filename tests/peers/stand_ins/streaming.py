"""Give Mosaic's names to sealed files, and to streams and loaders of them."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

import fastrack

KEY = fastrack.Key.generate()


class StreamingDataset(fastrack.StreamingSealedDataset):
    """A stream of sealed files, whose folder the tests name as `local` or as `remote`."""

    def __init__(
        self, local=None, remote=None, shuffle=False, batch_size=1, shuffle_seed=0, num_canonical_nodes=None, **others
    ):
        if others:
            raise NotImplementedError(sorted(others))
        files = sorted(Path(remote).glob("*.safetensors")) or sorted(Path(local).glob("*.safetensors"))
        self.samples = fastrack.SealedDataset(files, keys=KEY)
        self.options = {"seed": shuffle_seed, "shuffle": shuffle, "window": 4}
        super().__init__(self.samples, batch_size, **self.options)

    def __len__(self):
        return len(self.samples)


class StreamingDataLoader:
    """A wrapped loader of the stream, whose samples have the fields of Mosaic's."""

    def __init__(self, dataset, batch_size, num_workers=0, drop_last=False):
        stream = fastrack.StreamingSealedDataset(dataset.samples, batch_size, drop_last=drop_last, **dataset.options)
        self.wrapped = fastrack.wrap(DataLoader(stream, batch_size=None, num_workers=num_workers), "cpu", keys=KEY)

    def __iter__(self):
        for batch in self.wrapped:
            yield {"id": [f"{number:06}" for number in batch["id"].tolist()], "sample": batch["sample"]}

    def __len__(self):
        return len(self.wrapped)

    def state_dict(self):
        return self.wrapped.state_dict()

    def load_state_dict(self, state):
        self.wrapped.load_state_dict(state)


def convert_to_mds(out_root, num_samples=117, size_limit=256, **_):
    """Write as many numbers as Mosaic's own function does, in sealed files of about as many."""
    Path(out_root).mkdir(parents=True, exist_ok=True)
    each = max(1, size_limit // 20)
    for place, start in enumerate(range(0, num_samples, each)):
        numbers = np.arange(start, min(num_samples, start + each))
        name = Path(out_root, f"shard.{place:05}.safetensors")
        fastrack.save_file({"id": numbers, "sample": 3 * numbers}, name, KEY)


@pytest.fixture
def local_remote_dir(tmp_path):
    folders = tmp_path / "local", tmp_path / "remote"
    folders[0].mkdir()
    return tuple(map(str, folders))


def pytest_collection_modifyitems(items):
    for item in items:  # which have torch's own loader read the stream
        item.module.DataLoader = StreamingDataLoader


def refuse(*_, **__):
    raise NotImplementedError


def module(name, **names):
    sys.modules[name] = made = types.ModuleType(name)
    made.__path__ = []
    vars(made).update(names)


of_base = {"Stream": refuse, "StreamingDataset": StreamingDataset, "StreamingDataLoader": StreamingDataLoader}
module("streaming", **of_base)
module("streaming.base", **of_base)
module("streaming.base.batching", generate_work=refuse)
module("streaming.base.stream", streams_registry={})
module("streaming.base.util", clean_stale_shared_memory=lambda: None)
module("streaming.base.world", World=refuse)
module("tests")
module("tests.common")
module("tests.common.utils", convert_to_mds=convert_to_mds)
