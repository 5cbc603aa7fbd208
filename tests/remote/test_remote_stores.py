"""Stores that fsspec finds: S3, on several servers, and one in memory."""

import inspect
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

import fastrack
from fastrack import FormatError

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")


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


class _Generations(BaseHTTPRequestHandler):
    """Answers as Google's store does for one object: with a range of the generation that a request names, or 404."""

    def log_message(self, *_):
        """Say nothing."""

    def do_GET(self):
        content, generation, asked = self.server.content, self.server.generation, parse_qs(urlsplit(self.path).query)
        self.server.asked.append(asked)
        if asked.get("alt") == ["media"]:
            named = asked.get("generation", [generation]) == [generation]
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self._answer(206 if named else 404, content[first : last + 1] if named else b"{}")
        else:
            about = {"name": "a.safetensors", "bucket": "box", "size": str(len(content)), "generation": generation}
            self._answer(200, json.dumps({"kind": "storage#object", "etag": "same", **about}).encode())

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_requests_of_google_s_store_name_the_generation_that_was_opened(key, tmp_path, monkeypatch):
    monkeypatch.setenv(
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false"
    )  # or its import asks for the kind of a bucket by gRPC
    gcsfs = pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    images = np.random.default_rng(0).integers(0, 256, (12, 1 << 16), np.uint8)
    fastrack.save_file({"images": images}, tmp_path / "a.safetensors", key)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Generations) as server:
        server.content, server.generation, server.asked = (tmp_path / "a.safetensors").read_bytes(), "17", []
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "project": "test"})
        for url in ("gs://box/a.safetensors", "gs://box/a.safetensors#17"):
            with fastrack.load_file(url) as file:
                assert np.array_equal(fastrack.unseal(file["images"][:2], key, framework="numpy"), images[:2])
        ranges = [asked for asked in server.asked if asked.get("alt") == ["media"]]
        assert ranges
        if "generation" in inspect.signature(gcsfs.GCSFileSystem.url).parameters:  # earlier ones pass over it
            assert all(asked.get("generation") == ["17"] for asked in ranges)
        with fastrack.load_file("gs://box/a.safetensors") as file:
            server.generation = "18"
            with pytest.raises(FormatError, match="was replaced or changed"):
                fastrack.unseal(file["images"], key)
        server.shutdown()
    gcsfs.GCSFileSystem.clear_instance_cache()
