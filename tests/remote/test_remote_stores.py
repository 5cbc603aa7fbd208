"""Stores that fsspec finds: S3, on the server of moto or that of FASTRACK_S3_ENDPOINT, and one in memory."""

import os
import uuid

import numpy as np
import pytest

import fastrack

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")


@pytest.fixture(scope="module")
def endpoint():
    """The address of an S3 server: that which the environment names, or moto's."""
    given = os.environ.get("FASTRACK_S3_ENDPOINT")
    if given:
        yield given
        return
    moto = pytest.importorskip("moto.server", reason="moto's server is not installed")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint, monkeypatch):
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for name, value in (
        ("ACCESS_KEY_ID", "test:tester"),
        ("SECRET_ACCESS_KEY", "testing"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", os.environ.get(f"FASTRACK_S3_{name}", value))
    client = boto3.client("s3")
    name = f"fastrack-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    client.name = name
    fsspec.config.conf.clear()
    yield client
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


def contents(client):
    return [one["Key"] for one in client.list_objects_v2(Bucket=client.name).get("Contents", [])]


@pytest.mark.slow
def test_a_file_is_written_to_s3_in_parts_and_read_by_ranges(bucket, key, cache):
    images = np.random.default_rng(0).integers(0, 256, (600, 1 << 16), np.uint8)
    url = f"s3://{bucket.name}/train/a.safetensors"
    fastrack.save_file({"images": images, "labels": np.arange(600)}, url, key)
    etag = bucket.head_object(Bucket=bucket.name, Key="train/a.safetensors")["ETag"]
    assert etag.strip('"').endswith("-3")  # parts
    with fastrack.load_file(url) as file:
        chosen = [5, 400]
        np.testing.assert_array_equal(fastrack.unseal(file["images"][chosen], key, framework="numpy"), images[chosen])
        assert sum(path.stat().st_blocks for path in cache.glob("*.data")) * 512 < images.nbytes / 8
        np.testing.assert_array_equal(fastrack.to_device(file["images"], keys=key, framework="numpy"), images)
    fastrack.verify_file(url, key)
    data = fastrack.SealedDataset([url], keys=key)
    assert len(data) == 600


@pytest.mark.slow
def test_nothing_is_left_of_an_upload_that_fails(bucket, key):
    tensors = {"x": np.zeros((40 << 20,), np.uint8)}
    url = f"s3://{bucket.name}/a"
    fastrack.save_file({"x": np.arange(3)}, url, key)
    for target in (url, f"s3://{bucket.name}/b"):
        done = 0

        def count(size):
            nonlocal done
            done += size
            if done > 36 << 20:  # after parts were sent
                raise RuntimeError("an interrupt")

        with pytest.raises(RuntimeError, match="interrupt"):
            fastrack.save_file(tensors, target, key, progress=count)
    assert contents(bucket) == ["a"]
    assert not bucket.list_multipart_uploads(Bucket=bucket.name).get("Uploads")
    assert fastrack.unseal(fastrack.load_file(url)["x"], key, framework="numpy").tolist() == [0, 1, 2]


@pytest.mark.slow
def test_an_upload_that_cannot_be_removed_is_named_with_what_removes_it(bucket, key, monkeypatch):
    import s3fs

    def fail(*_):
        raise OSError("no connection")

    def interrupt(_size):
        if bucket.list_multipart_uploads(Bucket=bucket.name).get("Uploads"):
            raise KeyboardInterrupt

    monkeypatch.setattr(s3fs.core.S3File, "_abort_mpu", fail)
    with pytest.raises(KeyboardInterrupt) as caught:
        fastrack.save_file({"x": np.zeros(40 << 20, np.uint8)}, f"s3://{bucket.name}/a b", key, progress=interrupt)
    [upload] = bucket.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
    [note] = caught.value.__notes__
    assert f"--key 'a b' --upload-id {upload['UploadId']}" in note
    bucket.abort_multipart_upload(Bucket=bucket.name, Key="a b", UploadId=upload["UploadId"])


def test_an_error_says_what_is_left_of_an_object(key, images, monkeypatch):
    from fsspec.implementations.memory import MemoryFile

    def fail(*_):
        raise OSError("no connection")

    monkeypatch.setattr(MemoryFile, "write", fail)
    with pytest.raises(OSError, match="writing failed") as caught:
        fastrack.save_file({"images": images}, "memory://bucket/failed", key)
    assert not hasattr(caught.value, "__notes__")
    monkeypatch.setattr(MemoryFile, "discard", fail)
    with pytest.raises(OSError, match="writing failed") as caught:
        fastrack.save_file({"images": images}, "memory://bucket/failed", key)
    assert "could not be removed" in caught.value.__notes__[0]


@pytest.mark.slow
def test_an_object_that_was_replaced_is_an_error(bucket, key):
    url = f"s3://{bucket.name}/a"
    fastrack.save_file({"x": np.zeros(1 << 20, np.uint8)}, url, key)
    file = fastrack.load_file(url)
    fastrack.save_file({"x": np.ones(1 << 20, np.uint8)}, url, key)
    with pytest.raises(fastrack.FormatError, match="replaced or changed"):
        fastrack.unseal(file["x"], key)
    assert fastrack.unseal(fastrack.load_file(url)["x"], key, framework="numpy").all()


@pytest.mark.slow
def test_errors_of_s3_name_the_url(bucket, key):
    with pytest.raises(FileNotFoundError, match=rf"s3://{bucket.name}/none"):
        fastrack.load_file(f"s3://{bucket.name}/none")
    with pytest.raises(FileNotFoundError, match="bucket"):
        fastrack.save_file({"x": np.arange(3)}, "s3://fastrack-no-such-bucket/x", key)
    fastrack.save_file({"x": np.arange(3)}, f"s3://{bucket.name}/a", key)
    np.save("x.npy", np.arange(3))
    with pytest.raises(FileExistsError):
        fastrack.seal_file("x.npy", f"s3://{bucket.name}/a", key, overwrite=False)


def test_any_file_system_of_fsspec_is_read_and_written(key, images):
    url = "memory://bucket/a.safetensors"
    fastrack.save_file({"images": images}, url, key)
    with fastrack.load_file(url) as file:
        np.testing.assert_array_equal(fastrack.unseal(file["images"][[3, 30]], key, framework="numpy"), images[[3, 30]])
        np.testing.assert_array_equal(fastrack.to_device(file["images"], keys=key, framework="numpy"), images)
        fastrack.save_file({"images": images + 1}, url, key)
    fastrack.verify_file(url, key)
    np.testing.assert_array_equal(
        fastrack.unseal(fastrack.load_file(url)["images"], key, framework="numpy"), images + 1
    )


def test_a_file_of_fsspec_that_changes_is_an_error(key, images):
    url = "memory://bucket/b.safetensors"
    fastrack.save_file({"images": images}, url, key)
    file = fastrack.load_file(url)
    fastrack.save_file({"images": images + 1}, url, key)
    with pytest.raises(fastrack.FormatError, match="replaced or changed"):
        fastrack.unseal(file["images"], key)


def test_an_unknown_scheme_is_refused():
    with pytest.raises(fastrack.FormatError, match="nonsense"):
        fastrack.load_file("nonsense://a/b")


def test_http_servers_are_read_only(key):
    with pytest.raises(OSError, match="read only"):
        fastrack.save_file({"x": np.arange(3)}, "http://127.0.0.1:1/a", key)
