"""Checkpoints of torch.distributed.checkpoint in a store: as on the disk, and an upload that ends anywhere."""

import contextlib
import itertools
import os
import pickle

import numpy as np
import pytest
from helpers.forking import in_forked_child

import fastrack
from fastrack import AuthenticationError, FormatError
from fastrack._remote import upload
from fastrack._util.locations import Url

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("fsspec", reason="fsspec is not installed")
import torch
import torch.distributed.checkpoint as dcp
from helpers.object_store import ObjectStore
from torch.distributed.checkpoint import CheckpointException

from fastrack.distributed import CheckpointReader, CheckpointWriter
from fastrack.distributed._description import SHARDS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

URL, DESCRIPTION = "shelf://bucket/run", "checkpoint.safetensors"


def state(seed):
    return {"weight": torch.full((300, 70), float(seed)), "bias": torch.arange(9) + seed, "epoch": seed}


def save(seed, key, url=URL, **options):
    dcp.save(state(seed), storage_writer=CheckpointWriter(url, key=key), no_dist=True, **options)


def load(key, url=URL, **options):
    found = state(-1)
    dcp.load(found, storage_reader=CheckpointReader(url, keys=key), no_dist=True, **options)
    assert torch.equal(found["weight"], state(found["epoch"])["weight"])
    assert torch.equal(found["bias"], state(found["epoch"])["bias"])
    return found["epoch"]


@contextlib.contextmanager
def refused(*errors):
    with pytest.raises(CheckpointException) as caught:
        yield
    assert all(isinstance(error, errors) for error, _ in caught.value.failures.values()), caught.value.failures


def test_what_was_saved_in_a_store_is_loaded_and_the_next_save_replaces_it(key):
    for seed in (1, 2):
        save(seed, key)
        assert load(key) == seed
        described, shards = ObjectStore.names("bucket/run")
        assert (described, shards[:7]) == (DESCRIPTION, "shards-")


def test_the_argument_checkpoint_id_may_be_a_url(key, tmp_path):
    save(3, key, tmp_path / "unused", checkpoint_id=URL)
    assert load(key, tmp_path / "unused", checkpoint_id=URL) == 3
    for kind in (CheckpointReader, CheckpointWriter):
        assert kind.validate_checkpoint_id(URL)
        assert not kind.validate_checkpoint_id("file://elsewhere/run")
        assert "hunter" not in repr(kind("s3://a:hunter@b/c", key).checkpoint_id)


def test_a_save_in_the_background_reaches_the_store(key):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        dcp.async_save(state(4), storage_writer=CheckpointWriter(URL, key=key)).result()
    finally:
        torch.distributed.destroy_process_group()
    assert load(key) == 4


def test_a_server_of_files_is_not_written_to(key):
    with refused(OSError):
        save(1, key, "https://127.0.0.1:1/run")


@pytest.mark.slow
def test_a_save_that_stops_anywhere_leaves_the_old_checkpoint_or_the_new(key):
    class Stopped(BaseException):
        pass

    def stop(operation):
        steps.append(operation)
        if len(steps) == at:
            raise Stopped

    outcomes = []
    save(0, key)
    first = dict(ObjectStore.store)
    for at in itertools.count(1):
        ObjectStore.store.clear()
        ObjectStore.store.update(first)
        steps = []
        ObjectStore.before = staticmethod(stop)
        with contextlib.suppress(CheckpointException, Stopped):
            save(1, key)
        is_done, ObjectStore.before = len(steps) < at, staticmethod(lambda operation: None)
        outcomes.append(load(key))
        save(2, key)  # which removes what was left
        assert load(key) == 2
        assert len(ObjectStore.names("bucket/run")) == 2
        if is_done:
            break
    assert outcomes == sorted(outcomes)
    assert outcomes.count(0) > 5
    assert outcomes.count(1) > 1


def test_the_objects_of_others_are_left(key):
    save(1, key, "shelf://bucket/other")
    _, shards = ObjectStore.names("bucket/other")
    for name in ("notes.txt", "shards-00001.safetensors", f"below/{shards}", f"shards-{'0' * 32}.safetensors"):
        ObjectStore().pipe_file(f"bucket/run/{name}", b"data")
    save(2, fastrack.Key.generate(), "shelf://bucket/third")
    _, foreign = ObjectStore.names("bucket/third")
    ObjectStore().cp_file(f"bucket/third/{foreign}", f"bucket/run/{foreign}")
    before = set(ObjectStore.names("bucket/run"))
    save(2, key)
    save(3, key)
    assert before < set(ObjectStore.names("bucket/run"))
    assert len(ObjectStore.names("bucket/run")) == len(before) + 2
    assert load(key) == 3


def test_an_error_of_the_store_reaches_the_caller_and_leaves_the_old_checkpoint(key):
    save(1, key)

    def fail(operation):
        if operation == "write":
            raise RuntimeError("hunter2")

    ObjectStore.before = staticmethod(fail)
    with refused(OSError):
        save(2, key)
    with pytest.raises(CheckpointException) as caught:
        save(2, key)
    assert "hunter" not in str(caught.value)
    ObjectStore.before = staticmethod(lambda operation: None)
    assert load(key) == 1


def test_another_or_an_altered_file_is_refused(key):
    save(1, key)
    _, old = ObjectStore.names("bucket/run")
    content = bytes(ObjectStore.store[f"/bucket/run/{old}"].getbuffer())
    save(2, key)
    _, new = ObjectStore.names("bucket/run")
    sound = bytes(ObjectStore.store[f"/bucket/run/{new}"].getbuffer())
    flipped = sound[:-40_000] + bytes([sound[-40_000] ^ 1]) + sound[-39_999:]
    for altered in (content, flipped, sound[:-1], b""):
        ObjectStore().pipe_file(f"bucket/run/{new}", altered)
        with refused(AuthenticationError, FormatError):
            load(key)
    ObjectStore().rm_file(f"bucket/run/{new}")
    with refused(FileNotFoundError):
        load(key)


def test_all_pages_of_uploads_that_have_not_ended_are_listed(monkeypatch):
    """And not one without an end, of a server that repeats a page."""
    keys = [f"run/shards-{number:032x}.safetensors" for number in range(5)]

    class Paged:
        def split_path(self, path):
            return "bucket", "run", None

        def call_s3(self, _, *, KeyMarker="", UploadIdMarker="", **__):  # noqa: N803
            start = keys.index(KeyMarker) + 1 if KeyMarker else 0
            assert UploadIdMarker == (KeyMarker and f"upload of {KeyMarker}")
            last, page = keys[min(start + 1, 4)], keys[start : start + 2]
            uploads = [{"Key": each, "UploadId": f"upload of {each}"} for each in page]
            return {
                "Uploads": uploads,
                "IsTruncated": is_endless or start < 4,
                "NextKeyMarker": last,
                "NextUploadIdMarker": f"upload of {last}",
            }

    monkeypatch.setattr(upload, "_find_writable", lambda _: (Paged(), "bucket/run"))
    for is_endless in (False, True):  # noqa: B007 - of `call_s3`
        found = [each for _, each, _ in upload.list_uploads(Url("s3://bucket/run"), SHARDS)]
        assert found == keys


# After a fork


def test_a_forked_child_neither_ends_nor_spoils_the_upload_of_its_parent(key):
    """The child goes on where the parent is: in the middle of a write."""
    outcomes = []

    def fork(_size):
        if not outcomes:
            outcomes.append("parent")
            outcomes.append(in_forked_child(write_on))

    def write_on():
        fastrack.save_file({"x": np.ones(9)}, "shelf://bucket/own", key)  # an upload of the child's own
        return ObjectStore.names("bucket/own")

    fastrack.save_file({"x": np.arange(9)}, "shelf://bucket/x", key, progress=fork)
    assert outcomes == ["parent", ["/bucket/own"]]
    assert fastrack.unseal(fastrack.load_file("shelf://bucket/x")["x"], key, framework="numpy").tolist() == [*range(9)]


def test_an_upload_that_was_begun_before_a_fork_is_refused_in_the_child(key):
    reading, writing = os.pipe()
    parent = os.getpid()

    def fork(_size):
        if os.getpid() == parent:
            os.fork()

    try:
        fastrack.save_file({"x": np.arange(9)}, "shelf://bucket/x", key, progress=fork)
        told = "written"
    except OSError as error:
        told = str(error)
    if os.getpid() != parent:
        os.write(writing, pickle.dumps((told, ObjectStore.names("bucket/x"))))
        os._exit(0)
    os.close(writing)
    assert told == "written"
    message, names = pickle.loads(os.read(reading, 1 << 16))
    os.close(reading)
    os.wait()
    assert "forked" in message
    assert not names


def test_a_file_of_a_store_that_was_opened_before_a_fork_is_read_in_the_child(key):
    fastrack.save_file({"x": np.arange(1 << 17)}, "shelf://bucket/x", key)
    file = fastrack.load_file("shelf://bucket/x")
    found = in_forked_child(lambda: int(fastrack.unseal(file["x"], key, framework="numpy")[-1]))
    assert found == (1 << 17) - 1
