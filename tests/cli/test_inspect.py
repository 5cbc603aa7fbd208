import numpy as np
import pytest
from helpers import by_hand
from safetensors.numpy import save_file as save_plain

from fastrack import Key, load_file, save_checkpoint, save_file


def test_a_sealed_file_is_shown_without_a_key(cli, sealed, folder):
    key_id = Key.load("owner.key").id
    (folder / "owner.key").unlink()
    said = cli(f"inspect {sealed}").stdout
    assert "2 sealed tensors" in said
    assert key_id in said
    row = next(line for line in said.splitlines() if line.startswith("x "))
    assert row.split() == ["x", "F32", "[10000,", "6]", "234.4", "KiB", "234.7", "KiB", "15", "sealed"]
    assert "Nothing here was authenticated" in said


def test_a_sealed_file_is_described_to_a_program(cli, sealed, arrays, folder):
    document = cli.json(f"inspect {sealed}")
    with load_file(sealed) as file:
        assert document["file_id"] == file["x"].context.file
        assert document["key_id"] == file.key_id
    assert document["format"] == "1"
    assert document["file_bytes"] == (folder / sealed).stat().st_size
    assert document["plain_bytes"] == sum(array.nbytes for array in arrays.values())
    assert 0 < document["overhead_percent"] < 1
    assert document["metadata_authenticated"] is False
    entry = next(entry for entry in document["tensors"] if entry["name"] == "y")
    sizes = {"plain_bytes": 56, "stored_bytes": 56 + 56 + 16, "chunks": 1}
    assert entry == {"name": "y", "dtype": "I64", "shape": [7], "sealed": True} | sizes


def test_a_plain_file_is_said_to_be_plain(cli, arrays):
    save_plain(arrays, "plain.safetensors")
    assert "nothing is sealed; 2 tensors, unencrypted" in cli("inspect plain.safetensors").stdout
    document = cli.json("inspect plain.safetensors")
    assert [document[name] for name in ("format", "file_id", "key_id")] == [None, None, None]
    assert not any(entry["sealed"] for entry in document["tensors"])


@pytest.mark.usefixtures("sealed")
def test_a_file_of_both_kinds_says_which_is_which(cli, key):
    cli(f"seal plain.npz mixed.safetensors --plain y {key}")
    assert "1 sealed tensor, 1 unencrypted" in cli("inspect mixed.safetensors").stdout
    entries = cli.json("inspect mixed.safetensors")["tensors"]
    assert {entry["name"]: entry["sealed"] for entry in entries} == {"x": True, "y": False}


@pytest.mark.usefixtures("key")
def test_metadata_is_shown_as_anybodys_word(cli, arrays):
    save_file(arrays, "sealed.safetensors", Key.load("owner.key"), metadata={"licence": "CC0"})
    said = cli("inspect sealed.safetensors").stdout
    assert "metadata, neither encrypted nor authenticated:\n  licence: CC0" in said
    assert cli.json("inspect sealed.safetensors")["metadata"] == {"licence": "CC0"}


def test_a_file_without_tensors_is_shown_and_a_long_name_whole(cli):
    save_plain({}, "none.safetensors")
    assert "0 tensors, unencrypted" in cli("inspect none.safetensors").stdout
    assert cli.json("inspect none.safetensors")["overhead_percent"] is None
    save_plain({"n" * 400: np.ones(1)}, "long.safetensors")
    assert cli("inspect long.safetensors").stdout.count("n") >= 400


@pytest.mark.parametrize("name", ["\x1b]0;owned\x07", "a\nb", "[red]x[/red]", "\u202egpj", "tab\tbed"])
def test_a_name_cannot_drive_the_terminal(cli, folder, name):
    header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    (folder / "odd.safetensors").write_bytes(by_hand.container(header, b"x"))
    said = cli("inspect odd.safetensors").stdout
    assert not set(said) & {"\x1b", "\x07", "\u202e", "\t"}
    assert (name if name.isprintable() else name.encode("unicode_escape").decode()) in said
    assert cli.json("inspect odd.safetensors")["tensors"][0]["name"] == name


def test_a_folder_is_refused_with_the_option_that_takes_its_files(cli, key, folder):
    (folder / "shards").mkdir()
    for line, status in (("inspect shards", 1), (f"verify shards {key}", 2)):
        assert "--recursive" in cli.error(line, status=status)


def test_a_sealed_folder_is_shown_file_by_file_without_a_key(cli, key, folder, arrays):
    (folder / "model" / "deep").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "deep" / "notes.bin").write_bytes(b"notes")
    save_plain(arrays, "model/model.safetensors")
    cli(f"seal model sealed {key}")
    key_id = Key.load("owner.key").id
    (folder / "owner.key").unlink()
    document = cli.json("inspect sealed")
    assert (document["kind"], document["key_id"]) == ("folder", key_id)
    sealed = {file["name"]: file["sealed"] for file in document["files"]}
    assert sealed == {"config.json": False, "deep/notes.bin": True, "model.safetensors": True}
    assert document["file_bytes"] == sum(file["bytes"] for file in document["files"])
    said = cli("inspect sealed").stdout
    assert "a sealed folder of 3 files" in said
    assert key_id in said
    assert "Nothing here was authenticated" in said
    assert "--recursive" in cli.error("inspect model")


def test_a_data_set_is_shown_with_its_samples_and_columns(cli, key, folder):
    (folder / "lines.jsonl").write_text('{"text": "a", "label": 1}\n' * 3)
    cli(f"import lines.jsonl data {key}")
    assert "3 samples with the columns label, text\n" in cli("inspect data/shard-000000.safetensors").stdout
    document = cli.json("inspect data/shard-000000.safetensors")
    assert (document["kind"], document["samples"], document["columns"]) == ("tensor", 3, ["label", "text"])


@pytest.mark.usefixtures("key")
def test_a_checkpoint_is_shown_as_one(cli, arrays):
    save_checkpoint("run.safetensors", {"arrays": arrays}, "owner.key")
    assert "sealed tensors of a checkpoint" in cli("inspect run.safetensors").stdout
    document = cli.json("inspect run.safetensors")
    assert (document["kind"], document["samples"], document["columns"]) == ("checkpoint", None, None)
