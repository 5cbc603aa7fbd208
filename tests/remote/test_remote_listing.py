"""Datasets by a folder of a store or a pattern: which files they are, in which order, and what is refused."""

import shutil
import uuid
from pathlib import Path

import numpy as np
import pytest
from helpers.forking import in_forked_child
from stores import list_below

import fastrack
from fastrack import FormatError, RollbackError, SealedDataset

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402


@pytest.fixture
def folder():
    """The URL of an empty folder in memory."""
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def numbered(folder, key):
    """Files of two samples of their number, written in another order than that of their names."""
    for name, value in (("train-10", 2), ("train-02", 1), ("test-01", 0), ("below/train-03", 9)):
        fastrack.save_file({"x": np.full((2, 3), value)}, f"{folder}/{name}.safetensors", key)
    fsspec.filesystem("memory").pipe_file(f"{folder}/notes.txt", b"first")
    return folder


def values(data, key):
    return fastrack.unseal(data[:]["x"], key, framework="numpy")[:, 0].tolist()


def test_a_folder_is_all_of_its_sealed_files_in_the_order_of_their_names(numbered, key):
    for path in (f"{numbered}/", numbered):
        assert values(SealedDataset(path, keys=key), key) == [0, 0, 1, 1, 2, 2]


def test_a_pattern_is_the_files_that_match_it(numbered, key):
    for pattern, expected in (("train-*.safetensors", [1, 1, 2, 2]), ("*-0[12].safetensors", [0, 0, 1, 1])):
        assert values(SealedDataset(f"{numbered}/{pattern}", keys=key), key) == expected


def test_a_pattern_of_local_files_is_too(key, tmp_path):
    for name, value in (("a/2", 1), ("a/10", 0), ("b/1", 2), ("b/[1]", 3)):
        Path(tmp_path, name).parent.mkdir(exist_ok=True)
        fastrack.save_file({"x": np.full((1, 3), value)}, tmp_path / f"{name}.safetensors", key)
    for pattern, expected in (("a/*.safetensors", [0, 1]), ("?/[12].safetensors", [1, 2]), ("b/[1].safetensors", [3])):
        for path in (pattern, tmp_path / pattern):
            assert values(SealedDataset(path, keys=key), key) == expected
    with pytest.raises(FileNotFoundError, match="expected files that match this pattern, got none"):
        SealedDataset("c/*.safetensors")


def test_objects_are_listed_with_size_and_validator(numbered):
    listed = list_below(f"{numbered}/")
    assert [name for name, *_ in listed] == [
        "notes.txt",
        "test-01.safetensors",
        "train-02.safetensors",
        "train-10.safetensors",
    ]
    name, size, validator = listed[0]
    assert (name, size) == ("notes.txt", 5)
    assert validator is not None


def test_a_folder_without_files_is_refused_and_so_is_a_pattern_without(folder):
    with pytest.raises(FileNotFoundError, match=r"expected \.safetensors files in this folder, got none"):
        SealedDataset(f"{folder}/")
    with pytest.raises(FileNotFoundError, match="expected files that match this pattern, got none"):
        SealedDataset(f"{folder}/*.safetensors")
    with pytest.raises(FileNotFoundError, match="the server has no such file"):
        SealedDataset(folder)


def test_what_cannot_be_listed_is_refused_with_another_way(numbered):
    for url in ("https://host/train/", "https://host/train-*.safetensors"):
        with pytest.raises(ValueError, match=r"expected a store that lists its objects.*fastrack\.index_dataset"):
            SealedDataset(url)
    with pytest.raises(ValueError, match="expected a pattern in the last part of the URL"):
        SealedDataset(f"{numbered}/*/a.safetensors")


def test_a_name_that_a_terminal_would_obey_is_refused(folder):
    fsspec.filesystem("memory").pipe_file(f"{folder}/a\x1b[2J.safetensors", b"")
    with pytest.raises(FormatError, match=r"without control characters, got 'a\\x1b\[2J"):
        SealedDataset(f"{folder}/")


def test_shards_of_a_writer_are_known_by_their_numbers(folder, key, tmp_path):
    with fastrack.DatasetWriter(tmp_path / "data", key, shard_size=1) as writer:
        writer.write_batch({"x": np.arange(4)})
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path / "data") + "/", f"{folder}/", recursive=True)
    store.pipe_file(f"{folder}/more.safetensors", b"of another program")
    assert fastrack.unseal(SealedDataset(folder, keys=key)[:]["x"], key, framework="numpy").tolist() == [0, 1, 2, 3]
    store.rm_file(f"{folder}/shard-000001.safetensors")
    with pytest.raises(FormatError, match=r"expected shard-000001\.safetensors, got none"):
        SealedDataset(folder, keys=key)


def test_an_index_in_a_folder_names_what_is_missing_other_and_more(numbered, key, monkeypatch):
    fastrack.index_dataset(numbered, key)
    store = fsspec.filesystem("memory")
    opened = []
    original = MemoryFileSystem.cat_file
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *a, **o: opened.append(a[1]) or original(*a, **o))
    data = SealedDataset(f"{numbered}/", keys=key)
    assert {Path(path).name for path in opened} == {"fastrack.index"}
    assert values(data, key) == [0, 0, 1, 1, 2, 2]
    names = [f"{numbered}/{name}.safetensors" for name in ("train-02", "train-10", "train-11")]
    store.copy(names[1], names[2])
    with pytest.raises(RollbackError, match=r"train-11\.safetensors: expected no such shard"):
        SealedDataset(f"{numbered}/", keys=key)
    store.mv(names[2], names[0])  # of the same size
    with pytest.raises(RollbackError, match=r"train-02\.safetensors: expected the file id"):
        values(SealedDataset(f"{numbered}/", keys=key), key)
    store.rm_file(names[0])
    with pytest.raises(RollbackError, match=r"train-02\.safetensors: expected \d+ bytes .* got none"):
        SealedDataset(f"{numbered}/", keys=key)
    with pytest.raises(FileNotFoundError, match=r"train-02\.safetensors"):
        values(SealedDataset(f"{numbered}/fastrack.index", keys=key), key)


def test_an_index_on_a_web_server_opens_the_shards_beside_it(served, key):
    with fastrack.DatasetWriter(served.folder / "data", key, shard_size=1) as writer:
        writer.write_batch({"x": np.arange(5)})
    fastrack.index_dataset(served.folder / "data", key)
    data = SealedDataset(served.url("data/fastrack.index"), keys=key)
    assert [path for path, _ in served.requests] == ["/data/fastrack.index"]
    assert fastrack.unseal(data[1:3]["x"], key, framework="numpy").tolist() == [1, 2]
    assert len(served.requests) == 3
    shutil.copy(served.folder / "data/shard-000003.safetensors", served.folder / "data/shard-000004.safetensors")
    with pytest.raises(RollbackError, match=r"shard-000004\.safetensors: expected the file id"):
        fastrack.unseal(data[4]["x"], key)


def test_an_error_of_a_listing_has_no_text_of_the_store(folder, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("GET https://user:hunter2@host/?X-Amz-Signature=abc")

    monkeypatch.setattr(MemoryFileSystem, "ls", refuse)
    with pytest.raises(OSError, match="RuntimeError") as caught:
        list_below(f"{folder}/")
    chain = [caught.value, caught.value.__cause__, caught.value.__context__]
    assert not any(secret in str(error) for error in chain for secret in ("hunter2", "Signature"))


def test_a_forked_child_lists_too(numbered):
    listed = list_below(f"{numbered}/")
    assert in_forked_child(lambda: list_below(f"{numbered}/")) == listed
