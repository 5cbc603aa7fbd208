"""Stores of three kinds, written by their own packages: whole or absent, and safe after a fork."""

import contextlib
import os
import random
import signal

import numpy as np
import pytest
from helpers.forking import in_forked_child
from helpers.ranks import run_ranks
from helpers.store_servers import AZURITE_KEY, SERVERS, bucket
from stores import names_below

import fastrack
from fastrack._remote import upload

pytest.importorskip("fsspec", reason="fsspec is not installed")
pytest.importorskip("torch", reason="torch is not installed")
import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fastrack.distributed import CheckpointReader, CheckpointWriter

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
KEY = fastrack.Key.from_bytes(bytes(range(32)))
KILLS = int(os.environ.get("FASTRACK_KILLS", "8"))


@pytest.fixture(scope="module", params=SERVERS)
def served(request, tmp_path_factory):
    with bucket(request.param, tmp_path_factory.mktemp(request.param)) as url:
        yield url


@pytest.fixture
def url(served, request):
    return f"{served}/{request.node.originalname}"


def names(url):
    return names_below(url)


def parts(url):
    """Return the uploads that have not ended, which only S3 keeps."""
    store, path = fsspec.core.url_to_fs(url)
    name, _, prefix = path.partition("/")
    found = store.call_s3("list_multipart_uploads", Bucket=name, Prefix=prefix) if url.startswith("s3:") else {}
    return found.get("Uploads", [])


def state(seed, rows=300):
    return {"weight": torch.full((rows, 70), float(seed)), "bias": torch.arange(9) + seed, "epoch": seed}


def save(seed, key, url, rows=300):
    save_state(state(seed, rows), key, url)


def save_state(value, key, url):
    dcp.save(value, storage_writer=CheckpointWriter(url, key=key), no_dist=True)


def load(key, url, rows=300):
    found = state(-1, rows)
    dcp.load(found, storage_reader=CheckpointReader(url, keys=key), no_dist=True)
    assert torch.equal(found["weight"], state(found["epoch"], rows)["weight"])
    return found["epoch"]


def test_what_is_written_to_a_store_is_read_from_it(url, key, tmp_path):
    large = np.random.default_rng(0).integers(0, 256, 40 << 20, np.uint8)  # three parts
    fastrack.save_file({"large": large}, f"{url}/file", key)
    np.testing.assert_array_equal(
        fastrack.unseal(fastrack.load_file(f"{url}/file")["large"], key, framework="numpy"), large
    )
    for seed in (1, 2):
        save(seed, key, f"{url}/checkpoint")
        assert load(key, f"{url}/checkpoint") == seed
        assert len(names(f"{url}/checkpoint")) == 2
    (tmp_path / "folder" / "below").mkdir(parents=True)
    (tmp_path / "folder" / "below" / "a b%.bin").write_bytes(large[:70_000].tobytes())
    (tmp_path / "folder" / "empty.txt").touch()
    fastrack.seal_folder(tmp_path / "folder", f"{url}/folder", key, plain=["empty.txt"])
    fastrack.unseal_folder(f"{url}/folder", tmp_path / "back", key)
    assert (tmp_path / "back" / "below" / "a b%.bin").read_bytes() == large[:70_000].tobytes()
    for start in (0, 5):
        with fastrack.DatasetWriter(f"{url}/data", key, shard_size=20) as writer:
            for value in range(start, start + 5):
                writer.write({"value": value})
    assert writer.stored == 10
    data = fastrack.SealedDataset([f"{url}/data/{name}" for name in names(f"{url}/data")], keys=key)
    loader = fastrack.wrap(torch.utils.data.DataLoader(data, batch_size=5, num_workers=2))  # which are forked
    assert torch.cat([batch["value"] for batch in loader]).tolist() == list(range(10))


def test_a_version_of_an_object_is_read_by_its_url(url, key):
    if not url.startswith("s3:"):
        pytest.skip("only S3 has versions")
    store, path = fsspec.core.url_to_fs(f"{url}/x")
    name, _, object_key = path.partition("/")
    store.call_s3("put_bucket_versioning", Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    versions = []
    for value in (1, 2):
        fastrack.save_file({"x": np.full(3, value)}, f"{url}/x", key)
        versions.append(store.call_s3("head_object", Bucket=name, Key=object_key)["VersionId"])
    for value, version in zip((1, 2), versions, strict=True):
        found = fastrack.load_file(f"{url}/x?versionId={version}")["x"]
        assert fastrack.unseal(found, key, framework="numpy").tolist() == [value] * 3


def test_an_object_that_exists_is_not_replaced_unasked(url, key, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(3))
    target = f"{url}/x.safetensors"
    fastrack.seal_file(tmp_path / "x.npy", target, key, overwrite=False)
    first = fastrack.load_file(target).file_id
    with pytest.raises(FileExistsError):
        fastrack.seal_file(tmp_path / "x.npy", target, key, overwrite=False)
    assert fastrack.load_file(target).file_id == first


def test_an_object_that_appears_meanwhile_is_not_replaced(url, key, tmp_path):
    if url.startswith("gs:"):
        pytest.skip("the emulator compares no generations")
    np.save(tmp_path / "x.npy", np.arange(3))
    store, path = fsspec.core.url_to_fs(f"{url}/x")
    with pytest.raises(FileExistsError):
        fastrack.seal_file(
            tmp_path / "x.npy", f"{url}/x", key, overwrite=False, progress=lambda _: store.pipe_file(path, b"mine")
        )
    assert store.cat_file(path) == b"mine"


def test_a_request_that_is_repeated_after_its_answer_was_lost_does_not_fail(url, key, monkeypatch, tmp_path):
    """Of one part, and of three, which S3 completes in a request of their own."""
    if not url.startswith("s3:"):
        pytest.skip("only requests of s3fs are repeated here")
    store, _ = fsspec.core.url_to_fs(url)
    ask, repeated = type(store).call_s3, []

    def ask_twice(self, method, *rest, **options):
        answer = ask(self, method, *rest, **options)
        if method in {"put_object", "complete_multipart_upload"}:
            repeated.append(method)
            with contextlib.suppress(FileNotFoundError):  # moto has forgotten the completed upload
                return ask(self, method, *rest, **options)
            raise FileExistsError
        return answer

    np.save(tmp_path / "small.npy", np.arange(3))
    np.save(tmp_path / "large.npy", np.zeros(40 << 20, np.uint8))
    monkeypatch.setattr(type(store), "call_s3", ask_twice)
    for name in ("small", "large"):
        fastrack.seal_file(tmp_path / f"{name}.npy", f"{url}/{name}", key, overwrite=False)
        fastrack.verify_file(f"{url}/{name}", key)
    assert repeated == ["put_object", "complete_multipart_upload"]


def test_nothing_is_left_of_an_interrupted_upload(url, key):
    if url.startswith("gs:"):
        pytest.skip("the emulator cancels no upload")

    def interrupt(_size):
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt

    save(1, key, url)
    before, count = names(url), 0
    for name in ("checkpoint.safetensors", "other"):
        count = 0
        with pytest.raises(KeyboardInterrupt) as caught:
            fastrack.save_file({"x": np.zeros(40 << 20, np.uint8)}, f"{url}/{name}", key, progress=interrupt)
        assert not hasattr(caught.value, "__notes__")
    assert (names(url), parts(url)) == (before, [])
    assert load(key, url) == 1


def test_what_another_process_adds_after_a_listing_is_found(url, key):
    """As by the rank that saves next, after this one has listed the folder in its own save."""
    save(1, key, url)
    names_below(url)
    assert in_forked_child(lambda: fastrack.save_file({"x": np.arange(3)}, f"{url}/x", key)) is None
    assert fastrack.load_file(f"{url}/x")["x"].shape == (3,)


def test_a_killed_upload_leaves_nothing_that_opens_and_the_next_save_removes_its_parts(url, key, monkeypatch):
    """Killed at each request, or so many of them: those of two parts, of the description and of removals."""
    rows, call, calls = 80_000, upload._call, []
    save(1, key, url, rows)
    monkeypatch.setattr(upload, "_call", lambda *rest, **options: (calls.append(1), call(*rest, **options))[1])
    save(2, key, url, rows)
    last, begun, outcomes = 2, 0, set()
    for number in sorted(random.Random(0).sample(range(1, len(calls)), min(KILLS, len(calls) - 1))):
        new = state(last + 1, rows)  # as torch's threads do not survive the fork
        child = os.fork()
        if child == 0:
            calls.clear()
            monkeypatch.setattr(
                upload,
                "_call",
                lambda *rest, **options: (
                    calls.append(1),
                    os.kill(os.getpid(), signal.SIGKILL) if len(calls) > number else None,  # noqa: B023
                    call(*rest, **options),
                )[2],
            )
            with contextlib.suppress(BaseException):
                save_state(new, key, url)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        begun += len(parts(url))
        found = load(key, url, rows)
        outcomes.add(found - last)
        last = found
    assert outcomes <= {0, 1}
    assert 0 in outcomes
    assert begun or not url.startswith("s3:")  # or the test would show nothing
    save(100, key, url, rows)
    assert load(key, url, rows) == 100
    assert (len(names(url)), parts(url)) == (2, [])


def test_an_upload_that_another_save_begins_meanwhile_is_removed_by_the_next_save_alone(url, key, monkeypatch):
    if not url.startswith("s3:"):
        pytest.skip("other stores remove the parts themselves")
    write_data = CheckpointWriter.write_data
    store, path = fsspec.core.url_to_fs(f"{url}/shards-{'0' * 32}.safetensors")
    name, _, object_key = path.partition("/")

    def begin_another(*rest):
        monkeypatch.undo()
        store.call_s3("create_multipart_upload", Bucket=name, Key=object_key)
        return write_data(*rest)

    monkeypatch.setattr(CheckpointWriter, "write_data", begin_another)
    save(1, key, url)
    assert len(parts(url)) == 1
    save(2, key, url)
    assert not parts(url)


def shared(value):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"rows": distribute_tensor(torch.full((12, 70), float(value)), mesh, [Shard(0)]), "value": value}


def save_shared(url, value):
    dcp.save(shared(int(value)), storage_writer=CheckpointWriter(url, key=KEY))


def load_shared(url, value):
    target = shared(-1)
    dcp.load(target, storage_reader=CheckpointReader(url, keys=KEY))
    assert target["value"] == int(value)
    assert torch.equal(target["rows"].full_tensor(), torch.full((12, 70), float(value)))


def fail_to_save(url, value):
    """The store refuses what the second process writes: both raise its error."""
    if dist.get_rank() == 1:
        upload._Writer.write = lambda writer, data: upload._call(writer._url, 1, "__truediv__", 0)
    with pytest.raises(CheckpointException) as caught:
        save_shared(url, value)
    [(rank, (error, _))] = caught.value.failures.items()
    assert rank == 1
    assert "writing failed: ZeroDivisionError" in str(error)


def test_processes_save_together_and_another_number_loads(url):
    if url.startswith("gs:"):
        pytest.skip("the emulator is configured only in this process")
    run_ranks((2, save_shared, url, 1), (3, load_shared, url, 1), (2, fail_to_save, url, 2), (2, load_shared, url, 1))
    assert len(names(url)) > 2  # of the process whose upload succeeded
    run_ranks((3, save_shared, url, 3), (2, load_shared, url, 3))
    assert len(names(url)) == 4


def test_a_forked_child_reads_and_writes(url, key):
    """The parent has used the store, and has a file of it open."""
    fastrack.save_file({"x": np.arange(1 << 20)}, f"{url}/x", key)
    file = fastrack.load_file(f"{url}/x")

    def use():
        fastrack.save_file({"x": np.arange(5)}, f"{url}/child", key)
        save(3, key, f"{url}/checkpoint")
        return int(fastrack.unseal(file["x"], key, framework="numpy")[-1])

    assert in_forked_child(use) == (1 << 20) - 1
    assert fastrack.unseal(fastrack.load_file(f"{url}/child")["x"], key, framework="numpy").tolist() == [*range(5)]
    assert load(key, f"{url}/checkpoint") == 3


def test_a_fork_in_the_middle_of_an_upload_leaves_it_to_the_parent(url, key):
    outcomes = []

    def fork(_size):
        child = os.fork() if not outcomes else None
        outcomes.append(child)

    parent = os.getpid()
    try:
        fastrack.save_file({"x": np.zeros(40 << 20, np.uint8)}, f"{url}/x", key, progress=fork)
        status = 1
    except OSError as error:
        status = 0 if "forked" in str(error) else 2
    if os.getpid() != parent:
        os._exit(status)
    assert status == 1  # written
    assert os.waitpid(outcomes[0], 0)[1] == 0
    fastrack.verify_file(f"{url}/x", key)


def test_no_error_of_a_store_has_a_secret(url, key, monkeypatch):
    secrets = ("hunter", AZURITE_KEY[:20], "AccountKey", "Signature")
    if url.startswith("s3:"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hunter2@127.0.0.1:1")
    place = f"{url.partition(':')[0]}://no-such-bucket-at-all/x"
    for use in (
        lambda: fastrack.save_file({"x": np.arange(3)}, place, key),
        lambda: save(1, key, place),
        lambda: fastrack.load_file(place),
    ):
        with pytest.raises((OSError, CheckpointException)) as caught:
            use()
        text = f"{caught.value!r} {caught.value} {caught.value.__cause__} {caught.value.__context__}"
        assert not [secret for secret in secrets if secret in text], text
