"""126 faults of a checkpoint: refused in a store as they are on the disk, with the same errors."""

import random
import shutil

import pytest
from helpers.store_servers import SERVERS, bucket

from fastrack import Key

pytest.importorskip("fsspec", reason="fsspec is not installed")
pytest.importorskip("torch", reason="torch is not installed")
import fsspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from fastrack.distributed import CheckpointReader, CheckpointWriter

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def state(seed):
    return {"weight": torch.full((300, 70), seed + 1.0), "bias": torch.arange(1, 10) * (seed + 1), "epoch": seed}


def save(seed, key, place):
    dcp.save(state(seed), storage_writer=CheckpointWriter(place, key=key), no_dist=True)


def outcome(place, keys):
    """Return the class of the error of a load. No tensor has then any other value than before, or zeros."""
    target = state(7)
    try:
        dcp.load(target, storage_reader=CheckpointReader(place, keys=keys), no_dist=True)
    except CheckpointException as error:
        for name in ("weight", "bias"):
            assert torch.equal(target[name], state(7)[name]) or not target[name].any()
        return {type(each).__name__ for each, _ in error.failures.values()}
    return "loaded"


def faults(content, older, foreign, beside, chooser):
    """Return 63 contents in the place of a file, with what each is; None for no file."""
    wrong = {"missing": None, "empty": b"", "older": older, "of another key": foreign, "the other file": beside}
    wrong["longer"] = content + b"\0"
    wrong |= {f"cut at {size}": content[:size] for size in chooser.sample(range(1, len(content)), 12)}
    for place in chooser.sample(range(len(content)), 45):
        flipped = bytes([content[place] ^ 1 << chooser.randrange(8)])
        wrong[f"flipped at {place}"] = content[:place] + flipped + content[place + 1 :]
    return wrong


@pytest.mark.parametrize("scheme", SERVERS)
def test_a_fault_of_a_checkpoint_in_a_store_is_refused_as_on_the_disk(scheme, tmp_path):
    key, other, chooser = Key.generate(), Key.generate(), random.Random(1)
    for place, seed, own in (("old", 1, key), ("foreign", 2, other), ("c", 3, key)):
        save(seed, own, tmp_path / place)
    files = sorted((tmp_path / "c").iterdir())
    count = 0
    with bucket(scheme, tmp_path) as url:
        store, path = fsspec.core.url_to_fs(f"{url}/c")
        for at, file in enumerate(files):
            older, foreign = (sorted((tmp_path / name).iterdir())[at].read_bytes() for name in ("old", "foreign"))
            content = file.read_bytes()
            for fault, wrong in faults(content, older, foreign, files[1 - at].read_bytes(), chooser).items():
                for each in files:
                    store.pipe_file(f"{path}/{each.name}", each.read_bytes())
                if wrong is None:
                    file.unlink()
                    store.rm_file(f"{path}/{file.name}")
                else:
                    file.write_bytes(wrong)
                    store.pipe_file(f"{path}/{file.name}", wrong)
                on_disk, in_store = outcome(tmp_path / "c", [key, other]), outcome(f"{url}/c", [key, other])
                assert on_disk == in_store != "loaded", fault
                file.write_bytes(content)
                count += 1
        assert count == 126
        shutil.copytree(tmp_path / "c", tmp_path / "sound")
        for each in files:
            store.pipe_file(f"{path}/{each.name}", each.read_bytes())
        assert outcome(tmp_path / "sound", key) == outcome(f"{url}/c", key) == "loaded"
