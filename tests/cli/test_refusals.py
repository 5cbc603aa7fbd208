import contextlib
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from helpers.every_command import every_command
from helpers.processes import largest_file
from helpers.tampering import tamper_file

from fastrack import Key, SealedFile, load_file
from fastrack.format import chunk_offset

each_writer = pytest.mark.parametrize(
    ("command", "line"), [("seal", "plain.npz new.safetensors"), ("unseal", "sealed.safetensors new.npz")]
)

# Targets


@pytest.mark.usefixtures("sealed")
def test_a_target_may_be_called_like_an_id_and_not_like_a_key(cli, key, folder):
    cli(f"seal plain.npz {'0a' * 16} {key}")
    assert (folder / ("0a" * 16) / "plain.npz.safetensors").is_file()
    assert "looks like a key" in cli.error(f"seal plain.npz {'0a' * 32} {key}")


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("line", ["seal plain.npz there.safetensors", "unseal sealed.safetensors there.npz"])
def test_a_target_is_replaced_by_force_alone(cli, key, folder, line):
    target = line.split()[-1]
    (folder / target).write_text("mine")
    assert cli.error(f"{line} {key}") == f"error: {target}: exists already; --force replaces it\n"
    assert (folder / target).read_text() == "mine"
    cli(f"{line} --force {key}")
    assert (folder / target).stat().st_size > 1000


def on_progress(monkeypatch, happen):
    """Have something happen whenever a command has come further with a file."""
    monkeypatch.setattr("fastrack._cli.run.progress_bar", lambda *_: contextlib.nullcontext(happen))


@each_writer
@pytest.mark.parametrize("force", ["", "--force"])
@pytest.mark.usefixtures("sealed")
def test_a_target_that_appears_meanwhile_is_replaced_by_force_alone(
    cli, key, folder, monkeypatch, command, line, force
):
    on_progress(monkeypatch, lambda _: (folder / line.split()[1]).write_text("mine"))
    if force:
        cli(f"{command} {line} --force {key}")
    else:
        assert "exists" in cli.error(f"{command} {line} {key}")
    assert ((folder / line.split()[1]).read_bytes() == b"mine") is not bool(force)


def test_a_target_is_a_regular_file_in_a_directory_that_is_there(cli, key, sealed, folder):
    (folder / "place").mkdir()
    os.mkfifo(folder / "pipe.npy")
    (folder / "place" / sealed).mkdir()
    for target in ("place", "pipe.npy"):
        assert "regular file" in cli(f"unseal {sealed} {target} --force --tensor y {key}", status=1).stderr
        assert not (folder / target).is_file()
    (folder / "link.npz").symlink_to("elsewhere")
    assert "--force" in cli.error(f"unseal {sealed} link.npz {key}")
    assert "nowhere: " in cli.error(f"unseal {sealed} nowhere/back.npz {key}")


def test_a_full_disk_is_told_and_nothing_is_left(cli, key, folder):
    (folder / "big.bin").write_bytes(bytes(200_000))
    with largest_file(100_000):
        assert cli.json(f"seal big.bin big.safetensors {key}", status=1)["error"]["type"] == "OSError"
    assert cli.names() == ["big.bin", "owner.key"]
    cli(f"seal big.bin big.safetensors {key}")
    with largest_file(100_000):
        assert "free some" in cli.error(f"seal big.bin full {key}")
    for target in ("full.safetensors", "full.npz", "full.npy", "full.txt"):
        with largest_file(100_000):
            assert "free some" in cli.error(f"unseal big.safetensors {target} {key}")
        assert cli.names() == ["big.bin", "big.safetensors", "owner.key"]
    (folder / "lines.txt").write_bytes(b"a secret line\n" * 20_000)
    (folder / "study").mkdir()
    (folder / "study" / "big.bin").write_bytes(bytes(200_000))
    cli(f"seal study sealed {key}")
    cli(f"seal -r study files {key}")
    before = cli.names()
    for line in ("unseal sealed back", "import lines.txt samples"):
        with largest_file(100_000):
            assert "free some" in cli.error(f"{line} {key}")
            assert "free some" in cli.json(f"{line} {key}", status=1)["error"]["message"]
        assert cli.names() == before
    with largest_file(100_000):
        assert "free some" in cli(f"unseal -r files back {key}", status=1).stderr
    assert cli.names() == before


@each_writer
@pytest.mark.usefixtures("sealed")
def test_an_interruption_leaves_nothing(cli, key, monkeypatch, command, line):
    on_progress(monkeypatch, mock.Mock(side_effect=KeyboardInterrupt))
    before = cli.names()
    assert cli.error(f"{command} {line} {key}", status=130) == "error: interrupted\n"
    assert cli.json(f"{command} {line} {key}", status=130)["error"]["type"] == "KeyboardInterrupt"
    assert cli.names() == before


# Sources


def test_a_pipe_is_not_sealed_as_an_empty_file(cli, key, folder):
    os.mkfifo(folder / "pipe")
    assert "regular file" in cli.error(f"seal . new {key}")


def test_an_array_of_text_is_an_error_of_its_file(cli, key):
    np.savez("text.npz", a=np.array(["a", "b"]))
    error = cli.json(f"seal text.npz new.safetensors {key}", status=1)["error"]
    assert error["type"] == "FormatError"
    assert "text.npz: " in error["message"]
    assert "cannot hold the NumPy dtype <U1" in error["message"]


@pytest.mark.usefixtures("sealed")
def test_a_source_is_not_replaced_by_a_file_of_another_kind(cli, key, folder):
    before = (folder / "plain.npz").read_bytes()
    (folder / "link.safetensors").symlink_to("plain.npz")
    for target in ("plain.npz", "./plain.npz", "link.safetensors"):
        told = "SOURCE" if target.endswith(".safetensors") else "another file"
        assert told in cli.error(f"seal plain.npz {target} --force {key}", status=2)
    assert (folder / "plain.npz").read_bytes() == before


@pytest.mark.parametrize("cut", [1, 1000, 200_000, 240_000])
def test_a_file_cut_short_is_refused(cli, key, sealed, folder, cut):
    data = (folder / sealed).read_bytes()
    (folder / sealed).write_bytes(data[:-cut])
    for line in (f"unseal {sealed} back.npz {key}", f"inspect {sealed}", f"verify {sealed} {key}"):
        assert cli.json(line, status=1)["error"]["type"] == "FormatError"
    assert "back.npz" not in cli.names()


# Tensors


def test_a_flipped_bit_is_refused_and_nothing_is_written(cli, key, sealed, folder):
    tamper_file(folder / sealed, "x", chunk_offset(9))
    for target in ("back.npz", "back.safetensors", "x.npy --tensor x"):
        assert "tensor 'x', chunk 9: " in cli.error(f"unseal {sealed} {target} {key}")
    error = cli.json(f"unseal {sealed} back.npz {key}", status=1)["error"]
    assert (error["type"], error["tensor"], error["chunk"]) == ("AuthenticationError", "x", 9)
    assert cli.names() == ["owner.key", "plain.npz", "sealed.safetensors"]
    cli(f"unseal {sealed} y.npy --tensor y {key}")  # what is sound can still be had


@pytest.mark.usefixtures("sealed")
def test_a_file_with_everything_left_in_plain_is_not_verified(cli, key):
    cli(f"seal plain.npz open.safetensors --plain x --plain y {key}")
    assert "got none" in cli.error(f"verify open.safetensors {key}")
    for option in ("", "--allow-plain", "--plain x --plain y", "--tensor x --plain x"):
        assert "got none" in cli.error(f"unseal open.safetensors back.npz {option} {key}")
    assert "back.npz" not in cli.names()


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("options", ["", "--tensor y", "--plain x"])
def test_a_plain_tensor_is_not_copied_unless_it_is_asked_for(cli, key, options):
    cli(f"seal plain.npz mixed.safetensors --plain y {key}")
    said = cli.error(f"unseal mixed.safetensors back.npz {options} {key}")
    assert "'y' unencrypted" in said
    error = cli.json(f"unseal mixed.safetensors back.npz {options} {key}", status=1)["error"]
    assert (error["type"], error["tensor"]) == ("AuthenticationError", "y")
    assert "back.npz" not in cli.names()


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("line", ["unseal mixed.safetensors back.npz --allow-plain", "verify mixed.safetensors"])
def test_what_is_expected_must_be_there_and_sealed(cli, key, line):
    cli(f"seal plain.npz mixed.safetensors --plain y {key}")
    assert "got an unencrypted" in cli.error(f"{line} --expect y {key}")
    assert "'z'" in cli.error(f"{line} --expect x --expect z {key}")
    assert "back.npz" not in cli.names()
    cli(f"{line} --expect x {key}")


@pytest.mark.parametrize("command", ["unseal {} back.npz", "verify {}"])
def test_another_file_of_the_same_key_is_refused_by_its_id(cli, key, sealed, command):
    with load_file(sealed) as file:
        wanted = file.file_id
    cli(f"{command.format(sealed)} --file-id {wanted} {key}")
    cli(f"seal plain.npz other.safetensors {key}")
    line = f"{command.format('other.safetensors')} --file-id {wanted} {key} {'--force' * ('unseal' in command)}"
    assert f"expected file id '{wanted}'" in cli.error(line)


@pytest.mark.parametrize(("command", "target"), [("unseal", "back.npz"), ("verify", "")])
def test_a_file_is_opened_once(cli, key, sealed, command, target):
    init = SealedFile.__init__
    with mock.patch.object(SealedFile, "__init__", autospec=True, side_effect=init) as opened:
        cli(f"{command} {sealed} {target} {key}")
    opened.assert_called_once()


# Keys

NEEDS_KEY = ["seal plain.npz new", "unseal sealed.safetensors new.npz", "verify sealed.safetensors"]


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("line", NEEDS_KEY[1:])
def test_another_key_is_refused(cli, line):
    cli("keygen other.key")
    said = cli.error(f"{line} --key other.key")
    assert f"expected key {Key.load('owner.key').id}" in said
    assert f"got {Key.load('other.key').id}" in said
    assert cli.json(f"{line} --key other.key", status=1)["error"]["type"] == "UnknownKeyError"


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("line", NEEDS_KEY)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_file_that_others_may_read_is_refused(cli, folder, line, mode):
    (folder / "owner.key").chmod(mode)
    said = cli.error(f"{line} --key owner.key")
    assert "chmod 600 owner.key" in said
    assert cli.json(f"{line} --key owner.key", status=1)["error"]["type"] == "KeyPermissionError"


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("line", NEEDS_KEY)
def test_a_key_is_given_by_a_key_file_and_not_repeated(cli, folder, line):
    said = cli.error(line)
    assert "--key" in said
    assert "FASTRACK_KEY_FILE" in said
    assert ("keygen" in said) == (line.split()[0] == "seal")  # a new key opens nothing
    (folder / "junk.key").write_text("secret")
    (folder / "junk.key").chmod(0o600)
    assert "fastrack key" in cli.error(f"{line} --key junk.key")
    for secret in ("0123456789abcdef" * 2, "0123456789abcdef" * 4, "fastrack-key-1:0123456789abcdef"):
        assert "0123456789abcdef" not in cli.error(f"{line} --key {secret}", status=2)


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("line", [*NEEDS_KEY, "doctor"])
@pytest.mark.parametrize("part", [0, 1, None])
def test_a_key_in_place_of_its_path_in_the_environment_is_not_repeated(cli, folder, monkeypatch, line, part):
    text = (folder / "owner.key").read_text()
    parts = {None: text, 0: text.splitlines()[1], 1: text.splitlines()[1].split(":")[1]}
    monkeypatch.setenv("FASTRACK_KEY_FILE", parts[part])
    for flag in ("", " --json"):
        said = cli(line + flag, status=0 if line == "doctor" else 1)  # the script looks for the key in all output
        assert "key itself" in " ".join(said.output.split())


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("line", NEEDS_KEY)
def test_another_file_in_place_of_a_key_is_told_as_such_whatever_its_mode(cli, folder, monkeypatch, line):
    (folder / "plain.npz").chmod(0o644)
    told = "error: plain.npz is not a fastrack key file; `fastrack keygen NEW.key` makes one\n"
    assert cli.error(f"{line} --key plain.npz") == told
    monkeypatch.setenv("FASTRACK_KEY_FILE", "plain.npz")
    assert cli.error(line) == f"{told}note: it came from FASTRACK_KEY_FILE\n"


# Usage


def test_a_file_that_cannot_be_read_is_no_bad_usage(cli, sealed, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # typer asks, and root is never told no
    cli(f"inspect {sealed}")
    commands = [command.callback for command in every_command().values()]
    annotations = [one for command in commands for one in command.__annotations__.values()]
    parameters = [info for one in annotations for info in getattr(one, "__metadata__", ())]
    assert len(parameters) > 90
    assert not any(info.readable for info in parameters)


def test_a_default_that_is_a_path_is_taken():
    from fastrack._cli.errors import file_path, path

    assert path(Path("demo")) == file_path(Path("demo")) == Path("demo")
