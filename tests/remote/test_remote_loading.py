"""Test the public functions with URLs."""

import pickle
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.staged import staged_channel

import fastrack
from fastrack._util.locations import Url, locate

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def shards(served, key):
    """URLs of four sealed files with 32 rows of 64 KiB each, and the rows."""
    rows = np.random.default_rng(3).integers(0, 256, (128, 1 << 16), np.uint8)
    for shard in range(4):
        some = slice(32 * shard, 32 * shard + 32)
        tensors = {"images": rows[some], "labels": np.arange(128)[some]}
        fastrack.save_file(tensors, served.folder / f"{shard}.safetensors", key)
    return [served.url(f"{shard}.safetensors") for shard in range(4)], rows


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_shuffled_epoch_has_the_right_rows(workers, shards, key):
    urls, rows = shards
    data = fastrack.SealedDataset(urls, keys=key)
    loader = torch.utils.data.DataLoader(
        data, batch_size=10, shuffle=True, collate_fn=fastrack.collate, num_workers=workers
    )
    for _ in range(2):
        seen = []
        for batch in fastrack.wrap(loader, keys=key):
            np.testing.assert_array_equal(batch["images"].numpy(), rows[batch["labels"].numpy()])
            seen += batch["labels"].tolist()
        assert sorted(seen) == list(range(128))


def test_batches_are_downloaded_before_they_are_opened(served, shards, key):
    urls, _ = shards
    data = fastrack.SealedDataset(urls, keys=key)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, collate_fn=fastrack.collate)
    served.latency = 0.05
    before = len(served.requests)

    def asked():
        """Return the bytes that were asked for."""
        ranges = [requested.removeprefix("bytes=").split("-") for _, requested in served.requests[before:]]
        return sum(int(last) + 1 - int(first) for first, last in ranges)

    iterator = iter(fastrack.wrap(loader, keys=key, prefetch=1))
    next(iterator)
    deadline = time.monotonic() + 20
    while asked() <= 20 << 18 and time.monotonic() < deadline:  # of all that the epoch needs, in one round
        time.sleep(0.01)
    assert asked() > 20 << 18
    assert len(list(iterator)) == 15


def test_a_stream_reads_the_files_of_a_window_in_few_requests(served, shards, key, limited):
    limited(batches_ahead=1)  # batch, which would hide what comes of the files' rest
    urls, rows = shards
    data = fastrack.SealedDataset(urls, keys=key)
    stream = fastrack.StreamingSealedDataset(data, 1, shuffle=False)
    before = len(served.requests)
    seen = []
    for batch in fastrack.wrap(torch.utils.data.DataLoader(stream, batch_size=None), prefetch=1):
        np.testing.assert_array_equal(batch["images"].numpy(), rows[batch["labels"].numpy()])
        seen += batch["labels"].tolist()
    assert seen == list(range(128))
    assert len(served.requests) - before <= 16  # of the 36 blocks of these files


def test_an_error_of_a_batch_is_raised_at_its_place(served, shards, key):
    urls, _ = shards
    data = fastrack.SealedDataset(urls, keys=key)
    (served.folder / "3.safetensors").unlink()
    loader = torch.utils.data.DataLoader(data, batch_size=16, collate_fn=fastrack.collate)
    iterator = iter(fastrack.wrap(loader, keys=key))
    for _ in range(6):
        next(iterator)
    with pytest.raises(FileNotFoundError, match=r"3\.safetensors"):
        list(iterator)


def test_a_data_set_and_a_file_are_pickled_by_their_urls(shards, key):
    urls, rows = shards
    data = pickle.loads(pickle.dumps(fastrack.SealedDataset(urls, keys=key)))
    np.testing.assert_array_equal(fastrack.unseal(data[40]["images"], key, framework="numpy"), rows[40])
    file = pickle.loads(pickle.dumps(fastrack.load_file(urls[1])))
    np.testing.assert_array_equal(fastrack.unseal(file["images"][3], key, framework="numpy"), rows[35])
    tensor = pickle.loads(pickle.dumps(file["images"]))
    np.testing.assert_array_equal(fastrack.unseal(tensor[3], key, framework="numpy"), rows[35])


def test_a_model_is_loaded_from_a_url(served, key):
    model = torch.nn.Linear(300, 400)
    fastrack.save_model(model, served.folder / "model.safetensors", key=key)
    loaded = torch.nn.Linear(300, 400)
    fastrack.load_model(loaded, served.url("model.safetensors"), keys=key)
    assert torch.equal(loaded.weight, model.weight)


def test_a_checkpoint_is_loaded_from_a_url(served, key):
    fastrack.save_checkpoint(served.folder / "c.safetensors", {"step": 3, "x": torch.arange(4)}, key)
    assert fastrack.load_checkpoint(served.url("c.safetensors"), keys=key)["step"] == 3


def test_plain_tensors_are_read(served, key):
    fastrack.save_file({"x": np.arange(3), "y": np.arange(9)}, served.folder / "p.safetensors", key, plain=["y"])
    with fastrack.load_file(served.url("p.safetensors")) as file:
        assert file.plain["y"].tolist() == list(range(9))
        assert fastrack.SealedTensor.from_bytes(file["x"].to_bytes()).shape == (3,)


def test_other_readers_of_files_take_urls(url, key, images):
    np.testing.assert_array_equal(fastrack.load_tensors(url, keys=key)["images"], images)
    with fastrack.safe_open(url, framework="numpy", keys=key) as file:
        np.testing.assert_array_equal(file.get_slice("images")[3:5], images[3:5])


def test_a_file_is_read_into_memory_whole(served, url, key, images):
    file = fastrack.load_file(url, mapped=False)
    (served.folder / "a.safetensors").unlink()
    np.testing.assert_array_equal(fastrack.unseal(file["images"], key, framework="numpy"), images)


def test_a_remote_file_is_unsealed_and_sealed_anew(url, key, images):
    fastrack.unseal_file(url, "images.npy", key, names=["images"])
    np.testing.assert_array_equal(np.load("images.npy"), images)
    other = fastrack.Key.generate()
    fastrack.rekey_file(url, "rekeyed.safetensors", key, key=other)
    np.testing.assert_array_equal(
        fastrack.unseal(fastrack.load_file("rekeyed.safetensors")["images"], other, framework="numpy"), images
    )


def test_a_file_url_is_a_path(served, key):
    fastrack.save_file({"x": np.arange(3)}, served.folder / "a.safetensors", key)
    path = served.folder / "a.safetensors"
    assert locate(path.as_uri()) == path
    assert fastrack.load_file(path.as_uri()).path == path
    assert isinstance(locate("s3://bucket/name"), Url)
    assert locate("a:/b") == Path("a:/b")
    with pytest.raises(ValueError, match="this machine"):
        locate("file://server/a")


def test_a_device_with_staging_buffers_reads_remote_files(url, key, images):
    with staged_channel(keys=key) as channel, fastrack.load_file(url) as file:
        np.testing.assert_array_equal(channel.to_device(file["images"], framework="numpy"), images)
        chosen = [7, 3, 39]
        np.testing.assert_array_equal(channel.to_device(file["images"][chosen], framework="numpy"), images[chosen])
