"""The canary refuses what is not covered, before anything is written, and leaves the process as it was."""

import functools
import pickle
import sys

import pytest
from helpers.foreign import take_back

import fastrack
from fastrack._patches import safetensors as replaced

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.torch")
pytest.importorskip("torch.distributed.checkpoint")

KEY = fastrack.Key.generate()
PLAIN_ARCHIVE = torch._C.PyTorchFileWriter
PLAIN_SAVE = torch.serialization._save


@pytest.fixture(autouse=True)
def unchanged():
    before = torch.serialization._save, safetensors.serialize_file, torch.serialization._open_file_like
    yield
    assert not any(replaced._handlers.values())
    assert before[0] is torch.serialization._save
    take_back()
    assert before == (
        torch.serialization._save,
        safetensors.serialize_file,
        torch.serialization._open_file_like,
    )


def refused(match):
    return pytest.raises(fastrack.FastrackError, match=match)


def save_elsewhere(obj, f, *_, **__):
    """Stand for the `torch.save` of a version that has moved the functions that write."""
    archive = PLAIN_ARCHIVE(str(f)) if not hasattr(f, "write") else PLAIN_ARCHIVE(f)
    PLAIN_SAVE(obj, archive, pickle, 2, False)
    archive.write_end_of_file()


@pytest.mark.slow
def test_a_torch_that_saves_by_another_function_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "save", save_elsewhere)
    with refused(r"torch\.save: .*found it unencrypted|torch\.save: .*got a"):
        fastrack.protect_checkpoints(KEY)


def test_a_torch_that_lacks_a_function_is_refused(monkeypatch):
    monkeypatch.delattr(torch.serialization, "_open_zipfile_writer")
    with refused("_open_zipfile_writer"):
        fastrack.protect_checkpoints(KEY)


@pytest.mark.parametrize("kind", [torch.UntypedStorage, torch.storage.TypedStorage])
@pytest.mark.slow
def test_a_torch_that_pickles_storages_by_another_function_is_refused(monkeypatch, kind):
    monkeypatch.setattr(kind, "__reduce__", lambda storage: (bytes, (bytes(storage.tolist()),)))
    with refused("pickle: "):
        fastrack.protect_checkpoints(KEY)


class Other:
    """Reader that hands out something else."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def get_tensor(self, _):
        return torch.zeros(64, dtype=torch.uint8)


class OtherArchive(torch._C.PyTorchFileReader):
    """Reader of archives by which `torch.load` still gets its storages."""

    def get_record(self, name):
        return b"other" if name.startswith("data/") else super().get_record(name)


@pytest.mark.slow
def test_a_door_that_reads_otherwise_than_it_writes_is_refused(monkeypatch):
    """By each door both directions are tried, and not by one of several that read the same file."""
    for change, door in (
        (lambda patched: patched.setattr(torch._C, "PyTorchFileReader", OtherArchive), r"torch\.save: "),
        (lambda patched: patched.setattr(safetensors.torch, "safe_open", Other), r"safetensors\.torch: "),
    ):
        with monkeypatch.context() as patched:
            change(patched)
            with refused(rf"{door}expected a sealed file that comes back equal"):
                fastrack.protect_checkpoints(KEY)


@pytest.mark.slow
def test_a_checkpoint_reader_that_was_made_anew_is_refused(monkeypatch):
    import torch.distributed.checkpoint as dcp

    def load(state, **options):
        original(state, **options)
        if "checkpoint_id" in options:  # one of two ways
            state["x"] = torch.zeros(64, dtype=torch.uint8)

    original = dcp.load
    monkeypatch.setattr(dcp, "load", load)
    with refused(r"torch\.distributed\.checkpoint: expected"):
        fastrack.protect_checkpoints(KEY)


@pytest.mark.slow
def test_a_safetensors_that_saves_by_another_function_is_refused(monkeypatch):
    def moved(*arguments, write=safetensors.serialize_file):
        write(*arguments)

    monkeypatch.setattr(safetensors.torch, "serialize_file", moved)
    with refused(r"safetensors\.torch: "):
        fastrack.protect_checkpoints(KEY)


def test_a_writer_that_is_held_where_nothing_replaces_it_is_refused():
    kept = [functools.partial(safetensors.serialize_file), staticmethod(safetensors.serialize)]
    while kept:
        with refused(rf"only in modules, got it in a {type(kept[0]).__name__}"):
            fastrack.protect_checkpoints(KEY)
        del kept[0]


def test_a_safetensors_that_lacks_a_function_is_refused(monkeypatch):
    monkeypatch.delattr(safetensors, "serialize")
    with refused("serialize"):
        fastrack.protect_checkpoints(KEY)


def test_a_checkpoint_writer_that_was_moved_is_refused(monkeypatch):
    import torch.distributed.checkpoint as dcp

    monkeypatch.delattr(dcp.filesystem._FileSystemWriter, "finish")
    with refused("finish|torch.distributed.checkpoint: "):
        fastrack.protect_checkpoints(KEY)


@pytest.mark.slow
def test_a_torch_that_returns_other_values_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *args, **options: {"x": torch.zeros(64, dtype=torch.uint8)})
    with refused("comes back equal"):
        fastrack.protect_checkpoints(KEY)


def test_a_wrong_key_is_refused_first(tmp_path):
    with pytest.raises(TypeError):
        fastrack.protect_checkpoints(3)
    with pytest.raises(FileNotFoundError):
        fastrack.protect_checkpoints(tmp_path / "missing.key")


def test_a_process_without_torch_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"protect_checkpoints needs torch.*\[protect\]"):
        fastrack.protect_checkpoints(KEY)
