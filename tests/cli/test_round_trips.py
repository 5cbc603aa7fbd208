import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file as load_plain
from safetensors.numpy import save_file as save_plain

from fastrack import Key, load_file

NOTES = b"not for everyone\r\n\x00\xff" * 3000


def same(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def test_a_safetensors_file_comes_back(cli, key, arrays):
    save_plain(arrays, "plain.safetensors", metadata={"made": "here"})
    cli(f"seal plain.safetensors sealed.safetensors {key}")
    cli(f"unseal sealed.safetensors back.safetensors {key}")
    back = load_plain("back.safetensors")
    for name, array in arrays.items():
        same(back[name], array)
    assert "made: here" in cli("inspect back.safetensors").stdout


def test_an_npz_file_comes_back(cli, key, arrays):
    np.savez("plain.npz", **arrays, scalar=np.float64(3.5), none=np.empty((0, 3), np.int8))
    cli(f"seal plain.npz sealed.safetensors {key}")
    cli(f"unseal sealed.safetensors back.npz {key}")
    with np.load("plain.npz") as plain, np.load("back.npz") as back:
        assert set(plain.files) == set(back.files)
        for name in plain.files:
            same(back[name], plain[name])


@pytest.mark.parametrize(
    "array",
    [np.float32(2.5), np.empty((0, 4)), np.eye(300), np.array([True, False]), np.arange(12).reshape(3, 4).T],
    ids=str,
)
def test_an_npy_file_comes_back_in_our_order(cli, key, array):
    np.save("one.npy", array)
    cli(f"seal one.npy sealed.safetensors {key}")
    cli(f"unseal sealed.safetensors back.npy {key}")
    same(np.load("back.npy"), np.asarray(array))
    assert np.load("back.npy").flags.c_contiguous


@pytest.mark.parametrize("data", [NOTES, b"", b"x", bytes(16384), bytes(16385)], ids=len)
def test_any_file_comes_back(cli, key, folder, data):
    (folder / "notes.txt").write_bytes(data)
    cli(f"seal notes.txt notes.safetensors {key}")
    assert len(data) < 16 or data[:16] not in (folder / "notes.safetensors").read_bytes()
    cli(f"unseal notes.safetensors back.txt {key}")
    assert (folder / "back.txt").read_bytes() == data


def test_a_key_file_of_128_bits_may_come_from_the_environment(cli, folder, monkeypatch):
    cli("keygen small.key --bits 128")
    monkeypatch.setenv("FASTRACK_KEY_FILE", "small.key")
    (folder / "notes.txt").write_bytes(NOTES)
    cli("seal notes.txt notes.safetensors")
    cli("verify notes.safetensors")
    cli("unseal notes.safetensors back.txt")
    assert (folder / "back.txt").read_bytes() == NOTES


def test_several_keys_may_be_given_to_open_with(cli, sealed):
    cli("keygen other.key")
    cli(f"verify {sealed} --key other.key --key owner.key")
    cli(f"unseal {sealed} back.npz --key other.key --key owner.key")


def test_one_tensor_of_several_may_be_taken(cli, key, sealed, arrays):
    cli(f"unseal {sealed} y.npy --tensor y {key}")
    same(np.load("y.npy"), arrays["y"])
    cli(f"unseal {sealed} y.safetensors --tensor y {key}")
    assert set(load_plain("y.safetensors")) == {"y"}
    cli(f"unseal {sealed} both.npz --tensor y --tensor x {key}")
    assert set(np.load("both.npz").files) == {"x", "y"}


def test_a_tensor_left_in_plain_comes_back_too(cli, key, arrays):
    np.savez("plain.npz", **arrays)
    said = cli(f"seal plain.npz sealed.safetensors --plain y {key}").stdout
    assert "sealed 1 tensor, 234.4 KiB, and left 1 tensor unencrypted, 56 B" in said
    with load_file("sealed.safetensors") as file:
        same(file.plain["y"], arrays["y"])
    for target, option in (("back.npz", "--plain y"), ("back.safetensors", "--allow-plain")):
        said = cli(f"unseal sealed.safetensors {target} {option} {key}").stdout
        assert "not protected, copied as stored: y" in said
    same(np.load("back.npz")["y"], arrays["y"])
    same(load_plain("back.safetensors")["y"], arrays["y"])


def test_sealing_says_what_anyone_can_read(cli, key, arrays):
    save_plain(arrays, "plain.safetensors", metadata={"prompt": "a secret wish"})
    said = cli(f"seal plain.safetensors sealed.safetensors {key}").stdout
    assert "anyone can read the names, dtypes and shapes of 'x', 'y'\n" in said
    assert "anyone can read the metadata 'prompt'\n" in said
    readable = cli.json(f"seal plain.safetensors sealed.safetensors --force {key}")["readable"]
    assert readable == {"names": ["x", "y"], "metadata": ["prompt"]}


def test_sealing_leaves_out_what_is_not_to_be_read(cli, key, arrays):
    save_plain({"x": arrays["x"]}, "doe.safetensors", metadata={"prompt": "a secret wish"})
    readable = cli.json(f"seal doe.safetensors sealed.safetensors --drop-metadata --name w --plain w {key}")["readable"]
    assert readable == {"names": ["w"], "metadata": []}
    Path("doe.pdf").write_bytes(b"result")
    cli(f"seal doe.pdf sealed.safetensors --name file --force {key}")
    content = Path("sealed.safetensors").read_bytes()
    assert b"doe" not in content
    cli(f"unseal sealed.safetensors back.pdf {key}")
    assert Path("back.pdf").read_bytes() == b"result"


def test_a_name_is_given_to_one_tensor_only(cli, key, arrays):
    save_plain(arrays, "plain.safetensors")
    line = f"seal plain.safetensors sealed.safetensors --name w {key}"
    assert "expected a file of one tensor, got 2" in cli.error(line)
    assert not Path("sealed.safetensors").exists()


def test_sealing_tells_a_program_what_it_did(cli, key, arrays):
    np.savez("plain.npz", **arrays)
    document = cli.json(f"seal plain.npz sealed.safetensors --plain y {key}")
    assert (document["tensors"], document["bytes"]) == (["x"], arrays["x"].nbytes)
    assert (document["not_protected"], document["plain_bytes"]) == (["y"], arrays["y"].nbytes)
    assert document["seconds"] > 0


def test_unsealing_tells_a_program_what_it_did(cli, key, sealed, arrays):
    document = cli.json(f"unseal {sealed} back.npz {key}")
    assert document["not_protected"] == []
    assert document["key_id"] == Key.load("owner.key").id
    with load_file(sealed) as file:
        assert document["file_id"] == file.file_id
    assert sorted(document["tensors"]) == ["x", "y"]
    assert document["bytes"] == sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize("mode", [0o440, 0o444, 0o644])
def test_a_mounted_secret_opens_where_its_mode_is_allowed(cli, sealed, folder, monkeypatch, mode):
    (folder / "owner.key").chmod(mode)
    refused = cli.error(f"verify {sealed} --key owner.key")
    assert "chmod 600 owner.key" in refused
    assert "FASTRACK_KEY_MODE=0440 or 0444" in refused
    monkeypatch.setenv("FASTRACK_KEY_MODE", f"0{mode:o}")
    cli(f"verify {sealed} --key owner.key")


def test_a_folder_of_keys_opens(cli, sealed, folder):
    (folder / "keys").mkdir()
    (folder / "owner.key").rename(folder / "keys" / "a")
    cli("keygen keys/b")
    cli(f"verify {sealed} --key keys")


@pytest.mark.slow
def test_standard_input_and_a_descriptor_give_a_key(sealed, folder):
    for source in ("-", "fd:0", "/dev/stdin"):
        done = subprocess.run(
            [sys.executable, "-m", "fastrack", "verify", sealed, "--key", source],
            input=(folder / "owner.key").read_bytes(),
            env=os.environ | {"FASTRACK_ENGINE": "openssl"},  # which starts fastest
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
