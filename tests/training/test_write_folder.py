"""Sealed folders that other libraries write: weights are unencrypted in no file, and what is not sealed is refused."""

import contextlib
import json
import multiprocessing
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from helpers.cases import each

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

    def no_weights(path):
        Path(path, "config.json").write_text("{}")

    def serialize(path):
        save_pretrained(path)
        Path(path, "more.safetensors").write_bytes(safetensors.numpy.save({"w": NEEDLE}))

    def write_over(path):
        save_pretrained(path)
        Path(path, "model-1.safetensors").write_bytes(safetensors.numpy.save({"w": NEEDLE}))

    def change(path):
        save_pretrained(path)
        stub = Path(path, "model-1.safetensors").read_bytes()
        Path(path, "notes.txt").write_bytes(stub.replace(b'"fastrack.draft":"', b'"fastrack.draft":"0'))

    saves = (pickle, "pytorch_model.bin"), (no_weights, "config"), (serialize, "more"), (write_over, "model-1")
    for save, told in (*saves, (change, "notes.txt")):
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


def values_in(path, key=KEY):
    """Return the first value of `w` in each file of a sealed folder."""
    folder = load_folder(path, key)
    folder.verify(key)
    found = {}
    for name in folder.sealed_names:
        with folder.open(name) as file:
            found[name] = int(fastrack.unseal(file["w"], key, framework="numpy")[0])
    return found


def save(path, value):
    safetensors.numpy.save_file({"w": np.full(3, value)}, path)


def test_what_was_moved_or_copied_is_there_under_its_last_name(tmp_path):
    with write_folder(tmp_path / "sealed", KEY) as path:
        first, second, third = (Path(path, f"{name}.safetensors") for name in ("model", "other", "sub/third"))
        save(first, 1)
        save(second, 2)
        second.replace(first)  # as a library that writes beside a file, and moves that over it
        third.parent.mkdir()
        shutil.copy(first, third)
        save(second, 3)
        third.with_name("swap").write_bytes(third.read_bytes())
        second.replace(third)
        third.with_name("swap").replace(second)
        Path(path, "link.safetensors").symlink_to("sub/third.safetensors")
        save(Path(path, "gone.safetensors"), 4)
        Path(path, "gone.safetensors").unlink()
    names = {"model": 2, "other": 2, "sub/third": 3, "link": 3}
    assert values_in(tmp_path / "sealed") == {f"{name}.safetensors": value for name, value in names.items()}
    assert len(list_files(tmp_path / "sealed")) == 5
    unseal_folder(tmp_path / "sealed", tmp_path / "back", KEY)
    assert safetensors.numpy.load_file(tmp_path / "back" / "link.safetensors")["w"][0] == 3


def test_no_stub_becomes_a_file_of_the_folder_whatever_stays_plain(tmp_path):
    with write_folder(tmp_path / "sealed", KEY, plain=["*.safetensors", "*.bin"]) as path:
        save(f"{path}/a.safetensors", 1)
        Path(path, "a.safetensors").rename(Path(path, "b.safetensors"))
        shutil.copy(Path(path, "b.safetensors"), Path(path, "weights.bin"))
        stub = Path(path, "b.safetensors").read_bytes()
    assert values_in(tmp_path / "sealed") == {"b.safetensors": 1, "weights.bin": 1}

    def put(path, name):
        save(f"{path}/a.safetensors", 1)
        Path(path, "more.bin").write_bytes(b"")
        Path(path, name).write_bytes(stub)  # of a block that has ended

    for name in ("b.safetensors", "weights.bin"):
        target, plain = tmp_path / "next", ["*.safetensors", "*.bin"]
        with pytest.raises(ValueError, match=name), write_folder(target, KEY, plain=plain) as path:
            put(path, name)


def test_a_folder_that_no_reader_would_open_is_refused(tmp_path):
    (tmp_path / "outside").write_text("")

    def name(path, name):
        Path(path, os.fsdecode(name)).write_text("{}")

    def link(path):
        Path(path, "notes.txt").symlink_to(tmp_path / "outside")

    cases = [
        (lambda path: name(path, b"new\nline.json"), "name of Unicode text"),
        (lambda path: name(path, b"back\\slash.json"), "name of Unicode text"),
        (lambda path: name(path, b"\xff.json"), "name of Unicode text"),
        (lambda path: save(os.fsencode(f"{path}/new\nline.safetensors"), 1), "name of Unicode text"),
        (lambda path: name(path, b"fastrack.folder"), "sealed already"),
        (link, "leads outside"),
    ]

    def put(path, write):
        save_pretrained(path)
        Path(path, "more.txt").write_text("")
        write(path)

    for write, told in cases:
        target, plain = tmp_path / "sealed", ["*.txt"]
        with pytest.raises(FormatError, match=told), write_folder(target, KEY, plain=plain) as path:
            put(path, write)
    assert not (tmp_path / "sealed").exists()


@each("ending", ["block", "error"])
def test_a_forked_child_that_leaves_the_block_takes_nothing_from_its_parent(tmp_path, ending):
    target = tmp_path / ending
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(write_folder(target, KEY))
        save(f"{path}/a.safetensors", 1)

        def leave():
            with contextlib.suppress(ZeroDivisionError), stack:
                if ending == "error":
                    raise ZeroDivisionError

        child = multiprocessing.get_context("fork").Process(target=leave)
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert not target.exists()
        save(f"{path}/b.safetensors", 2)
    assert values_in(target) == {"a.safetensors": 1, "b.safetensors": 2}


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
