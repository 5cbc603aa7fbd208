"""Datasets on real servers: S3 of moto and of OpenStack Swift, Azurite, an emulator of Google's store, nginx."""

import logging
import os
import shutil
import time

import numpy as np
import pytest
from helpers import store_servers
from helpers.forking import in_forked_child
from stores import list_below, upload

import fastrack
from fastrack import FormatError, RollbackError, SealedDataset

pytest.importorskip("fsspec", reason="fsspec is not installed")


def write(folder, key, count):
    with fastrack.DatasetWriter(folder, key, shard_size=1) as writer:
        writer.write_batch({"x": np.arange(count), "text": [f"sample {number}" for number in range(count)]})
    return folder


def values(data, key):
    return fastrack.unseal(data[:]["x"], key, framework="numpy").tolist()


def test_a_data_set_is_found_by_a_prefix_a_pattern_and_an_index(bucket, key, tmp_path):
    upload(bucket, write(tmp_path / "data", key, 12), "train")
    url = f"s3://{bucket.name}/train"
    assert values(SealedDataset(f"{url}/", keys=key), key) == list(range(12))
    assert values(SealedDataset(f"{url}/shard-00000[3-5].safetensors", keys=key), key) == [3, 4, 5]
    file_id = fastrack.index_dataset(url, key)
    for path in (url, f"{url}/fastrack.index"):
        data = SealedDataset(path, keys=key, file_ids=[file_id], transform=lambda sample: sample["text"])
        assert data[[11, 0]] == [b"sample 11", b"sample 0"]
    with pytest.raises(FileNotFoundError, match=r"expected \.safetensors files"):
        SealedDataset(f"s3://{bucket.name}/none/")


@pytest.mark.parametrize("endpoint", ["moto"], indirect=True)
def test_more_objects_than_a_page_are_listed_in_order_in_a_forked_child_too(bucket):
    names = [f"{number:04}" for number in range(1003)]
    for name in names:
        bucket.put_object(Bucket=bucket.name, Key=f"many/{name}", Body=b"x" * (int(name) % 3))
    url = f"s3://{bucket.name}/many/"
    listed = list_below(url)
    assert [(name, size) for name, size, _ in listed] == [(name, int(name) % 3) for name in names]
    assert all(validator for *_, validator in listed)
    assert in_forked_child(lambda: list_below(url)) == listed
    assert [name for name, *_ in list_below(f"s3://{bucket.name}/many/10*")] == ["1000", "1001", "1002"]


def test_wrong_missing_additional_and_older_shards_of_swift_are_refused(swift_bucket, key, tmp_path):
    bucket = swift_bucket
    upload(bucket, write(tmp_path / "old", key, 4), "train")
    write(tmp_path / "other", key, 4)
    url = f"s3://{bucket.name}/train/"
    fastrack.index_dataset(url, key)

    def put(number, content):
        bucket.put_object(Bucket=bucket.name, Key=f"train/shard-{number:06}.safetensors", Body=content)

    def read(number, folder="old"):
        return (tmp_path / folder / f"shard-{number:06}.safetensors").read_bytes()

    for content in (read(1, "other"), read(2)):  # of another run, as an older one is; another shard of this one
        put(1, content)
        with pytest.raises(RollbackError, match=r"shard-000001\.safetensors: expected the file id"):
            values(SealedDataset(url, keys=key), key)
    put(1, read(1) + b" ")
    with pytest.raises(RollbackError, match=r"shard-000001\.safetensors: expected \d+ bytes"):
        SealedDataset(url, keys=key)
    put(1, read(1))
    put(4, read(3, "other"))
    with pytest.raises(RollbackError, match=r"shard-000004\.safetensors: expected no such shard"):
        SealedDataset(url, keys=key)
    for number in (4, 3):
        bucket.delete_object(Bucket=bucket.name, Key=f"train/shard-{number:06}.safetensors")
    with pytest.raises(RollbackError, match=r"shard-000003\.safetensors: expected \d+ bytes by .*, got none"):
        SealedDataset(url, keys=key)
    put(3, read(3))
    assert values(SealedDataset(url, keys=key), key) == [0, 1, 2, 3]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [20, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_many_shards_on_swift_are_opened_with_few_requests(
    swift_server, swift_bucket, key, tmp_path, count, monkeypatch
):
    write(tmp_path / "data", key, count)
    fastrack.index_dataset(tmp_path / "data", key)
    upload(swift_bucket, tmp_path / "data", "train")
    url = f"s3://{swift_bucket.name}/train/"
    for path, most in ((f"{url}fastrack.index", 3), (url, 2 + count // 1000)):
        monkeypatch.setenv("FASTRACK_CACHE_DIR", str(tmp_path / f"cache-{most}"))
        before = len(swift_server.requests())
        start = time.perf_counter()
        data = SealedDataset(path, keys=key)
        seconds = time.perf_counter() - start
        time.sleep(0.5)  # until the server has written its log
        requests = len(swift_server.requests()) - before
        logging.getLogger(__name__).info("%s shards by %s: %s requests, %.2f s", count, path, requests, seconds)
        assert len(data) == count
        assert requests <= most
    assert fastrack.unseal(data[count - 1]["x"], key, framework="numpy") == count - 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", ["az", "gs"])
def test_a_data_set_in_another_store_is_found_too(scheme, key, tmp_path):
    with store_servers.bucket(scheme, tmp_path) as url:
        write(f"{url}/train", key, 12)
        assert values(SealedDataset(f"{url}/train/", keys=key), key) == list(range(12))
        assert values(SealedDataset(f"{url}/train/shard-00000[3-5].safetensors", keys=key), key) == [3, 4, 5]
        fastrack.index_dataset(f"{url}/train", key)
        for path in (f"{url}/train", f"{url}/train/fastrack.index"):
            assert values(SealedDataset(path, keys=key), key) == list(range(12))
        shard = f"{url}/train/shard-000003.safetensors"
        fastrack.rekey_file(f"{url}/train/shard-000004.safetensors", shard, key, key=key)
        with pytest.raises(RollbackError, match=r"shard-000003\.safetensors: expected"):
            values(SealedDataset(f"{url}/train", keys=key), key)


def test_nginx_serves_ranges_and_an_index(nginx, key, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (64, 1 << 16), np.uint8)
    fastrack.save_file({"images": images}, nginx.folder / "a.safetensors", key)
    with fastrack.load_file(f"{nginx.url}/a.safetensors") as file:
        rows = fastrack.unseal(file["images"][[3, 40]], key, framework="numpy")
    assert np.array_equal(rows, images[[3, 40]])
    assert sum(int(line.split()[9]) for line in nginx.requests()) < images.nbytes // 2
    assert all(" 206 " in line for line in nginx.requests())
    write(nginx.folder / "train", key, 5)
    fastrack.index_dataset(nginx.folder / "train", key)
    data = SealedDataset(f"{nginx.url}/train/fastrack.index", keys=key)
    assert values(data, key) == list(range(5))
    with pytest.raises(ValueError, match="expected a store that lists its objects"):
        SealedDataset(f"{nginx.url}/train/")
    with fastrack.load_file(f"{nginx.url}/a.safetensors") as file:
        fastrack.save_file({"images": images[:60]}, tmp_path / "b.safetensors", key)
        shutil.move(tmp_path / "b.safetensors", nginx.folder / "a.safetensors")
        os.utime(nginx.folder / "a.safetensors", (1, 1))
        with pytest.raises(FormatError, match="was replaced or changed"):
            fastrack.unseal(file["images"][10:50], key)
