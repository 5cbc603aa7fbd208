"""Folders and datasets, written to a store: there when they are whole, and resumed after an interruption."""

import json

import numpy as np
import pytest
import safetensors.numpy
from helpers.cases import each
from helpers.commands import invoke
from helpers.tampering import rewrite_file

import fastrack
from fastrack._sets import folder_writer
from fastrack.errors import AuthenticationError, FormatError

pytest.importorskip("fsspec", reason="fsspec is not installed")
from fsspec.implementations.memory import MemoryFile
from helpers import object_store
from helpers.object_store import ObjectStore

URL = "shelf://bucket/model"


@pytest.fixture
def folder(tmp_path):
    plain = tmp_path / "plain"
    (plain / "below").mkdir(parents=True)
    weights = {"weight": np.arange(6000.0).reshape(60, 100), "bias": np.ones(60, np.float32)}
    safetensors.numpy.save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps({"size": 70}))
    (plain / "below" / "data.bin").write_bytes(bytes(range(256)) * 100)
    return plain


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Stopped(BaseException):
    pass


def stop_at(number):
    steps = []

    def stop(operation):
        steps.append(operation)
        if len(steps) == number:
            raise Stopped

    ObjectStore.before = staticmethod(stop)
    return steps


def go_on():
    ObjectStore.before = staticmethod(lambda operation: None)


def test_a_folder_is_sealed_to_a_store_and_unsealed_from_it(folder, tmp_path, key):
    fastrack.seal_folder(folder, URL, key)
    assert set(ObjectStore.names("bucket/model")) == {"fastrack.folder", *contents(folder)}
    fastrack.load_folder(URL, key).verify(key)
    fastrack.unseal_folder(URL, tmp_path / "back", key)
    assert contents(tmp_path / "back") == contents(folder)
    with pytest.raises(FileExistsError, match="no folder is replaced"):
        fastrack.seal_folder(folder, URL, key, resume=True)


def test_a_folder_that_is_interrupted_anywhere_is_absent_and_goes_on(folder, tmp_path, key):
    for number in range(1, 100):
        ObjectStore.clear()
        steps = stop_at(number)
        try:
            fastrack.seal_folder(folder, URL, key)
        except Stopped as error:
            notes = error.__notes__ if number > 1 else []
            assert all("resume=" in note for note in notes)
        go_on()
        if len(steps) < number:
            break
        with pytest.raises(FileNotFoundError):
            fastrack.load_folder(URL, key)
        before = {name: bytes(file.getbuffer()) for name, file in ObjectStore.store.items()}
        if before:
            with pytest.raises(FileExistsError, match="resume="):
                fastrack.seal_folder(folder, URL, key)
        fastrack.seal_folder(folder, URL, key, resume=True)
        assert before.items() <= {name: bytes(file.getbuffer()) for name, file in ObjectStore.store.items()}.items()
        fastrack.load_folder(URL, key).verify(key)
    assert number > 8
    fastrack.unseal_folder(URL, tmp_path / "back", key)
    assert contents(tmp_path / "back") == contents(folder)


def test_a_folder_is_sealed_though_each_answer_of_the_store_is_lost(folder, key, monkeypatch):
    (folder / "empty.txt").touch()

    def commit_twice(file):
        MemoryFile.commit(file)
        raise FileExistsError

    monkeypatch.setattr(object_store._Upload, "commit", commit_twice)
    fastrack.seal_folder(folder, URL, key, plain=["empty.txt"])
    fastrack.load_folder(URL, key).verify(key)


def without_index(folder, key):
    fastrack.seal_folder(folder, URL, key)
    ObjectStore().rm_file("bucket/model/fastrack.folder")


CHANGES = {
    "other weights": lambda folder: safetensors.numpy.save_file({"weight": np.ones(4)}, folder / "model.safetensors"),
    "one other byte": lambda folder: (folder / "below" / "data.bin").write_bytes(b"\1" + bytes(range(1, 256)) * 100),
    "more bytes": lambda folder: (folder / "below" / "data.bin").write_bytes(bytes(range(256)) * 101),
    "another plain file": lambda folder: (folder / "config.json").write_text('{"size": 71}'),
    "a file less": lambda folder: (folder / "below" / "data.bin").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_is_not_resumed_from_another_source(folder, key, change):
    without_index(folder, key)
    CHANGES[change](folder)
    with pytest.raises(FormatError, match="Give the source as it was"):
        fastrack.seal_folder(folder, URL, key, resume=True)
    assert "fastrack.folder" not in ObjectStore.names("bucket/model")


def test_an_object_that_was_altered_or_is_of_another_key_is_not_resumed(folder, key):
    without_index(folder, key)
    name = "/bucket/model/below/data.bin"
    content = bytes(ObjectStore.store[name].getbuffer())
    for altered in (content[:-1] + bytes([content[-1] ^ 1]), content[:-1], b""):
        ObjectStore().pipe_file(name, altered)
        with pytest.raises((AuthenticationError, FormatError)):
            fastrack.seal_folder(folder, URL, key, resume=True)
    fastrack.seal_file(folder / "below" / "data.bin", f"{URL}/below/data.bin", fastrack.Key.generate())
    with pytest.raises(fastrack.UnknownKeyError):
        fastrack.seal_folder(folder, URL, key, resume=True)
    assert "fastrack.folder" not in ObjectStore.names("bucket/model")


@each("name", ["below/data.bin", "model.safetensors"])
def test_an_object_that_got_a_plain_tensor_is_not_resumed(folder, tmp_path, key, name):
    def plant(_, tensors):
        tensors["planted"] = np.ones(3)

    ObjectStore.clear()
    without_index(folder, key)
    (tmp_path / "object").write_bytes(ObjectStore.store[f"/bucket/model/{name}"].getbuffer())
    rewrite_file(tmp_path / "object", plant)
    ObjectStore().pipe_file(f"/bucket/model/{name}", (tmp_path / "object").read_bytes())
    with pytest.raises(FormatError, match=f"^{URL}/{name}: expected what was sealed"):
        fastrack.seal_folder(folder, URL, key, resume=True)
    assert "fastrack.folder" not in ObjectStore.names("bucket/model")


def test_a_store_that_exchanges_a_file_while_a_folder_is_sealed_is_noticed(folder, key, monkeypatch):
    """By an older one of the same names and key, which the index would pin."""
    fastrack.seal_folder(folder, "shelf://bucket/old", key)
    write = folder_writer.write_sealed

    def write_and_exchange(tensors, place, *rest, **options):
        write(tensors, place, *rest, **options)
        name = place.full.removeprefix("shelf:/")
        ObjectStore.store[name] = ObjectStore.store[name.replace("model", "old", 1)]

    monkeypatch.setattr(folder_writer, "write_sealed", write_and_exchange)
    with pytest.raises(AuthenticationError, match="file id"):
        fastrack.seal_folder(folder, URL, key)
    assert "fastrack.folder" not in ObjectStore.names("bucket/model")


def test_the_command_seals_a_folder_to_a_store_and_goes_on(folder, key, tmp_path):
    key.save(tmp_path / "a.key")
    command = ["seal", str(folder), URL, "--key", str(tmp_path / "a.key")]
    without_index(folder, key)
    result = invoke(command)
    assert result.exit_code == 1
    assert "--skip-existing" in result.output
    result = invoke([*command, "--skip-existing"])
    assert result.exit_code == 0, result.output
    assert f"{URL}: sealed 2 files and copied 1 file" in result.output
    fastrack.load_folder(URL, key).verify(key)
    for options in (["--to", "a.pub"], ["--skip-existing", "--quantize", "fp8"]):
        assert invoke([*command, *options]).exit_code == 2


def test_only_a_store_is_resumed(folder, tmp_path, key):
    with pytest.raises(ValueError, match="resume="):
        fastrack.seal_folder(folder, tmp_path / "sealed", key, resume=True)
    with pytest.raises(ValueError, match="resume="):
        fastrack.seal_folder(folder, URL, key, resume=True, quantize="fp8")
