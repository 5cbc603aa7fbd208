"""Sealed folders that other libraries write: weights are in no file in plain, and what is not sealed is refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import fastrack
from fastrack import Key, load_folder, mount_folder, protect_checkpoints, unseal_folder, write_folder
from fastrack.errors import FormatError

KEY = Key.from_bytes(bytes(range(32)))
NEEDLE = np.random.default_rng(0).integers(0, 256, 3000, np.uint8)


@pytest.fixture(autouse=True)
def _temporary(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    yield
    assert list((tmp_path / "temporary").iterdir()) == []


def save_pretrained(path):
    """Write what save_pretrained does, in shards and a folder below."""
    Path(path, "config.json").write_text(json.dumps({"size": 1}))
    safetensors.torch.save_file({"w": torch.from_numpy(NEEDLE)}, f"{path}/model-1.safetensors", {"format": "pt"})
    safetensors.torch.save_file({"v": torch.ones(2).bfloat16()}, Path(path, "model-2.safetensors"))
    Path(path, "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}})
    )
    Path(path, "deep").mkdir()
    safetensors.torch.save_model(torch.nn.Linear(2, 2), f"{path}/deep/model.safetensors")


def list_files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def test_what_a_library_saves_is_a_sealed_folder_and_was_in_no_file_in_plain(tmp_path):
    with write_folder(tmp_path / "sealed", KEY) as path:
        assert Path(path).stat().st_mode & 0o777 == 0o700
        save_pretrained(path)
        files = [each for each in tmp_path.rglob("*") if each.is_file()]
        assert len(files) == 5 + 3  # stubs and configuration here, and sealed files there
        assert not any(bytes(NEEDLE[:64]) in each.read_bytes() for each in files)
    folder = load_folder(tmp_path / "sealed", KEY)
    folder.verify(KEY)
    assert folder.plain_names == ["config.json", "model.safetensors.index.json"]
    assert folder.weights().keys() == {"w", "v"}
    with mount_folder(folder, KEY) as path:
        assert torch.equal(safetensors.torch.load_file(f"{path}/model-1.safetensors")["w"], torch.from_numpy(NEEDLE))
    unseal_folder(tmp_path / "sealed", tmp_path / "back", KEY)
    assert np.array_equal(safetensors.numpy.load_file(tmp_path / "back" / "model-1.safetensors")["w"], NEEDLE)
    assert safetensors.safe_open(tmp_path / "back" / "model-2.safetensors", "pt").metadata() is None
    with pytest.raises(safetensors.SafetensorError, match="sealed by fastrack"):
        safetensors.torch.load_file(tmp_path / "sealed" / "model-2.safetensors")


def test_other_paths_and_threads_write_what_they_always_did(tmp_path):
    other = Key.generate()
    with (
        write_folder(tmp_path / "a", KEY) as one,
        write_folder(tmp_path / "b", other) as two,
        ThreadPoolExecutor() as pool,
    ):
        list(pool.map(save_pretrained, [one, two]))
        safetensors.numpy.save_file({"w": NEEDLE}, tmp_path / "plain.safetensors")
    for name, key in (("a", KEY), ("b", other)):
        load_folder(tmp_path / name, key).verify(key)
    assert np.array_equal(safetensors.numpy.load_file(tmp_path / "plain.safetensors")["w"], NEEDLE)


def test_what_is_not_sealed_is_refused_and_nothing_is_left(tmp_path):
    def pickle(path):
        save_pretrained(path)
        torch.save({"w": 1}, f"{path}/pytorch_model.bin")

    def rename(path):
        save_pretrained(path)
        Path(path, "model-1.safetensors").rename(Path(path, "model-3.safetensors"))

    def no_weights(path):
        Path(path, "config.json").write_text("{}")

    def serialize(path):
        save_pretrained(path)
        Path(path, "more.safetensors").write_bytes(safetensors.numpy.save({"w": NEEDLE}))

    for save, told in ((pickle, "pytorch_model.bin"), (rename, "model-3"), (no_weights, "config"), (serialize, "more")):
        with pytest.raises(ValueError, match=told), write_folder(tmp_path / "sealed", KEY) as path:
            save(path)
    with pytest.raises(ZeroDivisionError), write_folder(tmp_path / "sealed", KEY) as path:  # noqa: PT012
        save_pretrained(path)
        raise ZeroDivisionError
    assert [each.name for each in tmp_path.iterdir()] == ["temporary"]


def test_a_file_may_be_written_again_removed_and_named_plain(tmp_path):
    with write_folder(tmp_path / "sealed", KEY, plain=["notes"]) as path:
        save_pretrained(path)
        safetensors.numpy.save_file({"w": NEEDLE[::-1].copy()}, f"{path}/model-1.safetensors")
        Path(path, "deep", "model.safetensors").unlink()
        Path(path, "notes").write_text("of the owner")
    folder = load_folder(tmp_path / "sealed", KEY)
    folder.verify(KEY)
    assert "deep/model.safetensors" not in list_files(tmp_path / "sealed")
    opened = fastrack.unseal(folder.weights()["w"], KEY, framework="numpy")
    assert np.array_equal(opened, NEEDLE[::-1])
    with pytest.raises(FileExistsError), write_folder(tmp_path / "sealed", KEY):
        pass
    with pytest.raises(FormatError), write_folder(tmp_path / "other", KEY) as path:
        safetensors.numpy.save_file({"fastrack.guard": NEEDLE}, f"{path}/model.safetensors")


@pytest.mark.slow
def test_it_has_its_own_key_in_a_protected_process(tmp_path):
    with write_folder(tmp_path / "before", KEY) as path:
        save_pretrained(path)
    protect_checkpoints(Key.generate())
    with write_folder(tmp_path / "sealed", KEY) as path:
        save_pretrained(path)
    load_folder(tmp_path / "sealed", KEY).verify(KEY)
    with mount_folder(tmp_path / "sealed", KEY) as path:
        assert safetensors.numpy.load_file(f"{path}/model-1.safetensors")["w"].tobytes() == NEEDLE.tobytes()
