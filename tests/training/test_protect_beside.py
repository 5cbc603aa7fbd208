"""Protection beside mounted folders, folders that are written, and libraries that replace functions too."""

import functools
import os
import sys
import threading
import types
from importlib.abc import MetaPathFinder

import pytest
from helpers import canaries
from helpers.foreign import take_back

import fastrack

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
library = pytest.importorskip("safetensors.torch")

KEY = fastrack.Key.generate()
SECRET = os.urandom(64)


@pytest.fixture(autouse=True)
def as_before():
    yield
    take_back()


@pytest.fixture
def weights():
    return {"weights": torch.frombuffer(bytearray(SECRET), dtype=torch.uint8)}


@pytest.fixture
def quick(monkeypatch):
    """Leave out the canary, which takes longer than a test should."""
    canaries.replace(monkeypatch)


class Refusing:
    """A `protect_checkpoints` in another thread, whose canary refuses when the block ends."""

    def __init__(self, monkeypatch):
        self._begun, self._go_on = threading.Event(), threading.Event()
        canaries.replace(monkeypatch, self._sing)
        self._thread = threading.Thread(target=self._protect)

    def _sing(self):
        self._begun.set()
        self._go_on.wait(60)
        raise fastrack.FastrackError("this version is not covered")

    def _protect(self):
        with pytest.raises(fastrack.FastrackError, match="not covered"):
            fastrack.protect_checkpoints(KEY)

    def __enter__(self):
        self._thread.start()
        assert self._begun.wait(60)

    def __exit__(self, *_):
        self._go_on.set()
        self._thread.join()


@pytest.fixture
def sealed(tmp_path, weights):
    with fastrack.write_folder(tmp_path / "sealed", KEY) as path:
        library.save_file(weights, f"{path}/model.safetensors")
    take_back()
    return tmp_path / "sealed"


@pytest.mark.slow
def test_a_call_that_fails_leaves_a_folder_that_another_thread_writes_sealed(tmp_path, monkeypatch, weights):
    refusing = Refusing(monkeypatch)
    with refusing:
        block = fastrack.write_folder(tmp_path / "sealed", KEY)
        path = block.__enter__()
    library.save_file(weights, f"{path}/model.safetensors")
    with open(f"{path}/model.safetensors", "rb") as file:  # noqa: PTH123 - a path of another library
        assert SECRET not in file.read()
    block.__exit__(None, None, None)
    with fastrack.load_folder(tmp_path / "sealed", KEY).open("model.safetensors") as file:
        assert bytes(fastrack.unseal(file["weights"], KEY, framework="numpy")) == SECRET


@pytest.mark.slow
def test_a_call_that_fails_leaves_a_folder_that_another_thread_has_mounted(sealed, monkeypatch, weights):
    with Refusing(monkeypatch):
        block = fastrack.mount_folder(sealed, KEY)
        path = block.__enter__()
    assert torch.equal(library.load_file(f"{path}/model.safetensors")["weights"], weights["weights"])
    with pytest.raises(OSError, match="a sealed one that is mounted") as refused:
        library.save_file(weights, f"{path}/other.safetensors")
    with pytest.raises(OSError, match="a sealed one that is mounted"):
        block.__exit__(None, None, None)
    assert refused.value.errno


@pytest.mark.slow
def test_a_call_that_fails_keeps_finders_and_functions_that_others_have_put_there(monkeypatch):
    class Finder(MetaPathFinder):
        def find_spec(self, *_):
            return None

    other, write = Finder(), torch.serialization._save
    before = list(sys.meta_path)
    with Refusing(monkeypatch):
        sys.meta_path.insert(0, other)
        wrapped = functools.wraps(torch.serialization._save)(functools.partial(torch.serialization._save))
        monkeypatch.setattr(torch.serialization, "_save", wrapped)
    try:
        assert sys.meta_path == [other, *before]
        assert torch.serialization._save is wrapped
    finally:
        sys.meta_path.remove(other)
    monkeypatch.undo()
    torch.serialization._save = write


@pytest.mark.slow
def test_what_another_thread_imports_meanwhile_is_as_ever_when_the_call_has_failed(tmp_path, monkeypatch):
    (tmp_path / "late_library.py").write_text("def dump(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "late_library", None)
    monkeypatch.delitem(sys.modules, "late_library")
    from fastrack._protect import refusals

    monkeypatch.setitem(refusals.REFUSED, "late_library", ("dump",))
    with Refusing(monkeypatch):
        import late_library

        with pytest.raises(fastrack.FastrackError, match="would write plaintext"):
            late_library.dump()
    assert late_library.dump() == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("is_mounted_first", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_save_into_a_mounted_folder_is_refused_in_a_protected_process(sealed, weights, is_mounted_first):
    if not is_mounted_first:
        fastrack.protect_checkpoints(KEY)
    block = fastrack.mount_folder(sealed, KEY)
    path = block.__enter__()
    fastrack.protect_checkpoints(KEY)
    with pytest.raises(OSError, match="a sealed one that is mounted"):
        library.save_file(weights, f"{path}/trained.safetensors")
    with pytest.raises(OSError, match="a sealed one that is mounted"):
        block.__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("is_written_first", [True, False])
def test_a_folder_is_written_sealed_in_a_protected_process(tmp_path, weights, is_written_first):
    if not is_written_first:
        fastrack.protect_checkpoints(KEY)
    with fastrack.write_folder(tmp_path / "sealed", KEY) as path:
        fastrack.protect_checkpoints(KEY)
        library.save_file(weights, f"{path}/model.safetensors")
    assert fastrack.load_folder(tmp_path / "sealed", KEY).sealed_names == ["model.safetensors"]


def test_a_writer_that_was_kept_before_a_folder_was_written_is_found(tmp_path, weights):
    kept = types.SimpleNamespace(write=functools.partial(safetensors.serialize_file))
    with fastrack.write_folder(tmp_path / "sealed", KEY) as path:
        library.save_file(weights, f"{path}/model.safetensors")
    with pytest.raises(fastrack.FastrackError, match="only in modules, got it in a partial"):
        fastrack.protect_checkpoints(KEY)
    del kept
