"""Several files in one call: paths, globs, folders and standard input."""

import json

import numpy as np
import pytest
import safetensors.numpy
from helpers.commands import invoke
from helpers.tampering import flip_byte

from fastrack import Key, load_file, seal, unseal_file

COUNT = 12


@pytest.fixture
def shards(key, folder):  # noqa: ARG001 - makes the key
    """A folder of shards, some of them in a folder below it, and a text."""
    owner = Key.load("owner.key")
    (folder / "data" / "more").mkdir(parents=True)
    for number in range(COUNT):
        place = folder / "data" / ("more" if number % 3 == 0 else "") / f"s{number:02}.safetensors"
        place.write_bytes(seal(np.full(50, number, np.int32), owner, name="x").to_bytes())
    (folder / "data" / "notes.txt").write_text("not sealed")
    return folder / "data"


def lines(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.usefixtures("shards")
@pytest.mark.parametrize("paths", ["-r data", "'data/**/*.safetensors'", "'data/s*.safetensors' data/more/s* -r data"])
def test_all_files_are_verified_in_one_call(cli, key, paths):
    said = cli(f"verify {paths} {key}").stdout
    assert f"every chunk of {COUNT} sealed tensors in {COUNT} files is authentic" in said
    assert ("left out: 1 file" in said) is ("-r" in paths)


def test_each_bad_file_is_named_and_the_others_are_verified(cli, key, shards):
    flip_byte(shards / "s01.safetensors")
    flip_byte(shards / "more" / "s03.safetensors")
    (shards / "s02.safetensors").write_bytes(b"no such file")
    result = cli(f"verify -r data missing.safetensors {key}", status=1)
    errors = result.stderr.splitlines()
    assert len(errors) == 4
    for name in ("data/s01", "data/more/s03", "data/s02", "missing"):
        assert sum(f"{name}.safetensors" in error for error in errors) == 1
    assert f"4 of {COUNT + 1} files FAILED; every chunk of 9 sealed tensors in 9 files" in result.stdout
    quiet = cli(f"verify -q -r data missing.safetensors {key}", status=1)
    assert (quiet.stdout, quiet.stderr) == ("", result.stderr)
    assert cli(f"verify -q -r data/more {key}", status=1).stdout == ""


def test_a_program_reads_one_document_a_line(cli, key, shards):
    flip_byte(shards / "s01.safetensors")
    result = cli(f"verify -r data missing --json {key}", status=1)
    documents = lines(result)
    assert result.stderr == ""
    assert len(documents) == COUNT + 1
    found = {document["path"]: document.get("error", {}).get("type") for document in documents}
    assert found.pop("data/s01.safetensors") == "AuthenticationError"
    assert found.pop("missing") == "FileNotFoundError"
    assert set(found.values()) == {None}
    assert all(document["ok"] for document in documents if "error" not in document)


def test_a_plain_file_among_sealed_ones_is_an_error(cli, key, shards):
    unseal_file(shards / "s01.safetensors", shards / "plain.safetensors", "owner.key")
    assert "plain.safetensors: expected sealed tensors" in cli(f"verify -r data {key}", status=1).stderr


def test_the_contents_of_several_files_are_shown(cli, shards):
    said = cli("inspect -r data").stdout
    assert said.count("1 sealed tensor,") == COUNT
    assert {document["path"] for document in lines(cli("inspect -r data --json"))} == {
        str(path.relative_to(shards.parent)) for path in shards.rglob("*.safetensors")
    }
    assert len(lines(cli("inspect data/s01.safetensors data/s02.safetensors --json"))) == 2


@pytest.mark.usefixtures("shards")
def test_a_folder_takes_the_option(cli, key):
    error = cli(f"verify data data/s01.safetensors {key}", status=1).stderr
    assert "data: expected a file, got a folder; --recursive" in error


def test_a_file_whose_name_is_a_pattern_is_itself(cli, key, shards):
    (shards / "s01.safetensors").rename("[a]*.safetensors")
    cli(f"verify '[a]*.safetensors' data/s02.safetensors {key}")
    assert cli.json(f"verify '[a]*.safetensors' {key}")["ok"]
    assert "No such file" in cli(f"verify 'b*' {key}", status=1).stderr


def test_a_link_to_a_folder_is_refused_and_not_followed(cli, key, shards):
    (shards / "link").symlink_to(shards / "more")
    assert "link to a folder" in cli(f"verify -r data {key}", status=1).stderr


@pytest.mark.parametrize("name", ["a\nerror: b", "a\x1b[2J", "a\r", "\u202eb"])
def test_hostile_names_are_escaped(cli, key, shards, name):
    (shards / "s01.safetensors").rename(shards / name)
    flip_byte(shards / name)
    result = cli(f"verify 'data/*' {key}", status=1)
    assert name not in result.output
    assert len(result.stderr.splitlines()) == 3  # that one, the text and the folder
    assert any(
        json.loads(line)["path"] == f"data/{name}"
        for line in cli(f"verify 'data/*' {key} --json", status=1).stdout.splitlines()
    )


@pytest.mark.usefixtures("key")
def test_a_sealed_file_comes_from_standard_input(shards):
    content = (shards / "s05.safetensors").read_bytes()

    def run(*line, content=content):
        return invoke(line, content)

    with load_file(shards / "s05.safetensors") as file:
        assert json.loads(run("verify", "-", "--key", "owner.key", "--json").stdout)["file_id"] == file.file_id
    assert json.loads(run("inspect", "-", "--json").stdout)["path"] == "-"
    bad = run("verify", "-", "--key", "owner.key", content=content[:-1] + bytes([content[-1] ^ 1]))
    assert bad.exit_code == 4
    assert "standard input: tensor 'x', chunk 0" in bad.stdout
    assert "error: standard input: expected a safetensors" in run("inspect", "-", content=b"text").stderr
    assert run("verify", "-", "--key", "-").exit_code == 2


@pytest.mark.usefixtures("key")
@pytest.mark.parametrize("line", ["inspect -", "verify - -k owner.key", "unseal - x.npz -k owner.key"])
def test_plaintext_from_standard_input_is_not_copied_to_a_disk(line, monkeypatch):
    copied = []
    monkeypatch.setattr("shutil.copyfileobj", lambda *_: copied.append(True))
    for content in (safetensors.numpy.save({"x": np.arange(3)}), b"", b"text" * 100, b"\xff" * 100):
        result = invoke(line.split(), content)
        assert result.exit_code == 6
        assert result.stderr.startswith("error: standard input: expected ")
    assert not copied


def test_a_sealed_folder_among_files_is_verified_whole(cli, key, shards, folder):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    for name in ("a", "b"):
        unseal_file(shards / "s01.safetensors", folder / "model" / f"{name}.safetensors", "owner.key")
    cli(f"seal -q model {shards.name}/sealed {key}")
    said = cli(f"verify -r data {key}").stdout
    assert f"in {COUNT} files is authentic, and all files of 1 sealed folder" in said
    documents = lines(cli(f"verify data/sealed data/s01.safetensors --json {key}"))
    assert [len(document.get("files", ())) for document in documents] == [3, 0]
    (shards / "sealed" / "b.safetensors").unlink()
    assert "b.safetensors" in cli(f"verify -q -r data {key}", status=1).stderr
    assert "sealed folder" in cli(f"unseal -r data back {key}", status=1).stderr
    assert "a sealed folder of 2 files" in cli("inspect -r data").stdout
