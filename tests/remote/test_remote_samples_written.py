"""Datasets written to a store: shards are there when they are whole, and a run goes on after any end."""

import shlex

import numpy as np
import pytest
from helpers.commands import invoke

import fastrack
from fastrack.errors import AuthenticationError, FormatError

pytest.importorskip("fsspec", reason="fsspec is not installed")
from fsspec.implementations.memory import MemoryFile
from helpers import object_store
from helpers.object_store import ObjectStore

URL = "shelf://bucket/train"
SHARD = "/bucket/train/shard-000000.safetensors"
ROWS = [{"name": f"row {number}", "value": number} for number in range(40)]


class Stopped(BaseException):
    pass


def values(key):
    urls = [f"{URL}/{name}" for name in ObjectStore.names("bucket/train")]
    data = fastrack.SealedDataset(urls, keys=key)
    return [int(fastrack.unseal(data[index]["value"], key, framework="numpy")) for index in range(len(data))]


def test_a_writer_goes_on_after_the_shards_of_a_store(key):
    for half in (ROWS[:25], ROWS[25:]):
        with fastrack.DatasetWriter(URL, key, shard_size=150) as writer:
            for row in half:
                writer.write(row)
    assert writer.stored == 40
    assert values(key) == list(range(40))
    assert len(ObjectStore.names("bucket/train")) > 3
    with pytest.raises(ValueError, match="under the key"):
        fastrack.DatasetWriter(URL, fastrack.Key.generate())
    ObjectStore().rm_file("bucket/train/shard-000001.safetensors")
    with pytest.raises(FormatError, match="shard-000001"):
        fastrack.DatasetWriter(URL, key)


def test_an_import_that_is_interrupted_anywhere_goes_on(key, tmp_path):
    (tmp_path / "rows.csv").write_text("name,value\n" + "".join(f"{row['name']},{row['value']}\n" for row in ROWS))

    def stop(operation):
        steps.append(operation)
        if len(steps) == at:
            raise Stopped

    for at in range(1, 200, 3):  # noqa: B007 - of `stop`
        ObjectStore.clear()
        steps = []
        ObjectStore.before = staticmethod(stop)
        try:
            fastrack.import_samples(tmp_path / "rows.csv", URL, key, shard_size=300)
        except Stopped:
            pass
        else:
            break
        ObjectStore.before = staticmethod(lambda operation: None)
        before = {name: bytes(file.getbuffer()) for name, file in ObjectStore.store.items()}
        if before:
            with pytest.raises(FileExistsError, match="resume=True"):
                fastrack.import_samples(tmp_path / "rows.csv", URL, key, shard_size=300)
        fastrack.import_samples(tmp_path / "rows.csv", URL, key, shard_size=300, resume=True)
        assert before.items() <= {name: bytes(file.getbuffer()) for name, file in ObjectStore.store.items()}.items()
        assert values(key) == list(range(40))
    assert at > 10


def test_an_import_is_not_resumed_from_what_was_altered(key, tmp_path):
    (tmp_path / "rows.csv").write_text("value\n" + "".join(f"{number}\n" for number in range(40)))
    fastrack.import_samples(tmp_path / "rows.csv", URL, key, shard_size=80)
    name = "/bucket/train/shard-000000.safetensors"
    content = bytes(ObjectStore.store[name].getbuffer())
    ObjectStore().pipe_file(name, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(AuthenticationError):
        fastrack.import_samples(tmp_path / "rows.csv", URL, key, shard_size=80, resume=True)


def test_the_commands_import_to_a_store_and_append(key, tmp_path):
    key.save(tmp_path / "a.key")
    (tmp_path / "a.csv").write_text("value\n1\n2\n")
    (tmp_path / "b.csv").write_text("value\n3\n")
    options = [URL, "--key", str(tmp_path / "a.key")]
    assert not ObjectStore.store
    result = invoke(["import", str(tmp_path / "a.csv"), *options, "--dry-run"])
    assert f"fastrack import {shlex.quote(f'{tmp_path}/a.csv')} {URL}" in result.output, result.output
    assert not ObjectStore.store
    result = invoke(["import", str(tmp_path / "a.csv"), *options])
    assert f'SealedDataset("{URL}"' in result.output, result.output
    assert "inspect" not in result.output
    assert invoke(["import", str(tmp_path / "b.csv"), *options]).exit_code == 1
    assert invoke(["import", str(tmp_path / "b.csv"), *options, "--append"]).exit_code == 0
    assert values(key) == [1, 2, 3]


def test_two_writers_of_one_folder_lose_nothing(key):
    first, second = (fastrack.DatasetWriter(URL, key) for _ in range(2))
    first.write({"value": 1})
    second.write({"value": 2})
    first.close()
    with pytest.raises(FileExistsError, match="another program"):
        second.close()
    assert values(key) == [1]


def test_a_condition_of_s3_that_fails_is_an_object_that_exists(key):
    def fail(_operation):
        error = OSError("hunter2")
        error.response = {"Error": {"Code": "PreconditionFailed"}}
        raise error

    ObjectStore.before = staticmethod(fail)
    with pytest.raises(FileExistsError, match="left as it was"):
        fastrack.save_file({"x": np.arange(3)}, f"{URL}/x", key)


def test_an_answer_that_was_lost_is_no_object_of_another_program(key, monkeypatch):
    """The store has the object, and the repeated request finds it."""

    def commit_twice(file):
        MemoryFile.commit(file)
        raise FileExistsError

    monkeypatch.setattr(object_store._Upload, "commit", commit_twice)
    with fastrack.DatasetWriter(URL, key) as writer:
        writer.write({"value": 1})
    assert writer.stored == 1
    assert values(key) == [1]


def test_an_object_of_another_writer_is_told_from_ones_own(key, monkeypatch):
    """It has the same sample and size, and appears while this one is written."""
    with fastrack.DatasetWriter(URL, key) as other:
        other.write({"value": 1})
    content = bytes(ObjectStore.store.pop(SHARD).getbuffer())

    def find_the_other(file):
        assert file.getbuffer().nbytes == len(content)
        ObjectStore().pipe_file(file.path, content)
        raise FileExistsError

    writer = fastrack.DatasetWriter(URL, key)
    writer.write({"value": 1})
    monkeypatch.setattr(object_store._Upload, "commit", find_the_other)
    with pytest.raises(FileExistsError, match="another program"):
        writer.close()
    assert bytes(ObjectStore.store[SHARD].getbuffer()) == content


def test_a_writer_shows_no_secret(key):
    with pytest.raises(OSError, match="read only") as caught:
        fastrack.DatasetWriter("https://user:hunter2@127.0.0.1:1/x", key)
    assert "hunter" not in str(caught.value)
    writer = fastrack.DatasetWriter("shelf://user:hunter2@bucket/x", key)
    assert "hunter" not in repr(writer)
    writer.write({"value": np.arange(3)})
    ObjectStore.before = staticmethod(lambda operation: 1 / 0)
    with pytest.raises(OSError, match="writing failed") as caught:
        writer.close()
    assert "hunter" not in str(caught.value)
