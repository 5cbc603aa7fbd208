import pytest
from helpers.tampering import tamper_file

from fastrack import load_file
from fastrack.format import chunk_offset


def test_a_sound_file_is_authentic(cli, key, sealed):
    before = cli.names()
    said = cli(f"verify {sealed} {key}").stdout
    assert [line.split()[:2] for line in said.splitlines() if line.startswith("ok")] == [["ok", "x"], ["ok", "y"]]
    assert "every chunk of 2 sealed tensors is authentic; 234.4 KiB in " in said
    assert cli.names() == before
    with load_file(sealed) as file:
        assert f"key: {file.key_id}\nfile id: {file.file_id}\n" in said


def test_a_program_is_told_that_a_file_is_sound(cli, key, sealed, arrays):
    document = cli.json(f"verify {sealed} {key}")
    with load_file(sealed) as file:
        assert (document["key_id"], document["file_id"]) == (file.key_id, file.file_id)
    assert "error" not in document
    assert document["bytes"] == sum(array.nbytes for array in arrays.values())
    assert document["gbps"] > 0
    assert (document["ok"], document["not_protected"]) == (True, [])
    what, found = {"name": "y", "dtype": "I64", "shape": [7], "bytes": 56}, {"ok": True, "chunk": None, "message": None}
    assert document["tensors"][1] == what | found


def test_every_flipped_bit_is_found_and_placed(cli, key, sealed, folder):
    tamper_file(folder / sealed, "x", chunk_offset(14))
    said = cli(f"verify {sealed} {key}", status=1).stdout
    assert next(line for line in said.splitlines() if line.startswith("FAILED")).rstrip().endswith("chunk 14")
    assert "1 of 2 sealed tensors FAILED" in said
    tamper_file(folder / sealed, "y", chunk_offset(0))
    assert "2 of 2 sealed tensors FAILED" in cli(f"verify {sealed} {key}", status=1).stdout


def test_a_program_is_told_which_chunk_failed(cli, key, sealed, folder):
    tamper_file(folder / sealed, "x", chunk_offset(3))
    document = cli.json(f"verify {sealed} {key}", status=1)
    assert document["ok"] is False
    found = [(check["name"], check["ok"], check["chunk"]) for check in document["tensors"]]
    assert found == [("x", False, 3), ("y", True, None)]
    error = document["error"]
    assert (error["type"], error["tensor"], error["chunk"]) == ("AuthenticationError", "x", 3)


@pytest.mark.parametrize("place", [0, 23, 24, 55])
def test_a_flipped_bit_of_a_header_is_found(cli, key, sealed, folder, place):
    tamper_file(folder / sealed, "y", place)
    said = cli(f"verify {sealed} {key}", status=1).stdout
    assert next(line for line in said.splitlines() if line.startswith("FAILED")).rstrip().endswith("header")


@pytest.mark.usefixtures("sealed")
def test_what_is_in_plain_is_said_not_to_be_checked(cli, key):
    cli(f"seal plain.npz mixed.safetensors --plain y {key}")
    assert "not protected, so not checked: y" in cli(f"verify mixed.safetensors {key}").stdout
    assert cli.json(f"verify mixed.safetensors {key}")["not_protected"] == ["y"]


def test_a_key_that_a_folder_of_keys_lacks_is_asked_for_once(cli, sealed, folder):
    (folder / "keys").mkdir()
    said = cli.error(f"verify {sealed} --key keys")
    assert said.count("expected") == 1
    cli("keygen other.key")
    assert "name its source with --key" in cli.error(f"verify {sealed} --key other.key")
