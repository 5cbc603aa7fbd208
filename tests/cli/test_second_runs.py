"""Commands that write, run once more: nothing is lost, doubled, replaced, or left in plain.

Each row of the table is a command that writes TARGET, in a folder with all that it needs. It is run, run again, and run
with each file that cannot be made again, and with a folder, in the place of TARGET.
"""

import shutil

import numpy as np
import pytest

from fastrack import SealedDataset
from fastrack.providers import WrappedKey

KEY = "-k owner.key"
SECRET = b"a secret line"
COMMANDS = {
    "keygen": "keygen TARGET",
    "keygen, an identity": "keygen TARGET --identity",
    "keygen, a signer": "keygen TARGET --signer",
    "seal": f"seal notes.txt TARGET {KEY}",
    "seal with --force": f"seal notes.txt TARGET --force {KEY}",
    "seal an array with --force": f"seal array.npy TARGET --force {KEY}",
    "seal for others": "seal notes.txt TARGET --to reader.pub --sign owner.signer",
    "seal for others with --force": "seal notes.txt TARGET --force --to reader.pub --sign owner.signer",
    "seal a folder": f"seal study TARGET {KEY}",
    "seal a folder for others": "seal study TARGET --to reader.pub --sign owner.signer",
    "seal file by file": f"seal -r study TARGET --force {KEY}",
    "seal a glob": f"seal 'study/*' TARGET --force {KEY}",
    "import": f"import lines.txt TARGET {KEY}",
    "import, resumed": f"import lines.txt TARGET --resume {KEY}",
    "unseal": f"unseal sealed.safetensors TARGET {KEY}",
    "unseal with --force": f"unseal sealed.safetensors TARGET --force {KEY}",
    "unseal a folder": f"unseal folder TARGET {KEY}",
    "unseal file by file": f"unseal -r files TARGET --force {KEY}",
    "rekey": f"rekey sealed.safetensors TARGET {KEY} --new other.key",
    "rekey with --force": f"rekey sealed.safetensors TARGET --force {KEY} --new other.key",
    "publish": "publish sealed.safetensors --sign owner.signer -o TARGET",
    "anchor": "anchor TARGET --owner owner.signer.pub",
    "grant": "grant owner.key --to reader.pub --sign owner.signer -o TARGET",
    "grant, changed": "grant owner.grants --to second.pub --sign owner.signer --key owner.key -o TARGET",
    "bench": "bench --size 0.01 --repeat 1 --json TARGET",
}
AGAIN = {"import, resumed", "publish", "grant, changed", "bench", "seal file by file", "seal a glob"}
"""Commands that may be run again without --force, or with a folder in the place of the target."""
FAILING = {
    "nothing matches": f"seal 'nope*' TARGET {KEY}",
    "nothing to seal": f"seal empty TARGET {KEY}",
    "no glob of --plain matches": f"seal study TARGET --plain 'nope*' {KEY}",
    "all that is there fails": f"seal -r files TARGET {KEY}",
    "no importable source": f"import sealed.safetensors TARGET {KEY}",
    "a malformed source": f"import bad.jsonl TARGET {KEY}",
    "a wrong key for a folder": "unseal folder TARGET -k other.key",
    "a wrong key for files": "unseal -r files TARGET -k other.key",
    "a wrong key": "unseal sealed.safetensors TARGET -k other.key",
}


@pytest.fixture
def place(cli, folder):
    """A folder with all that the commands need."""
    for made in ("owner.key", "other.key", "reader --identity", "second --identity", "owner.signer --signer"):
        cli(f"keygen {made}")
    for name in ("study", "empty", "lost"):
        (folder / name).mkdir()
    for name in ("notes.txt", "study/a.json", "study/b.txt"):
        (folder / name).write_bytes(SECRET)
    (folder / "lines.txt").write_bytes(b"".join(b"%s %d\n" % (SECRET, index) for index in range(50)))
    (folder / "bad.jsonl").write_bytes(b"{")
    np.save("array.npy", np.frombuffer(SECRET, np.uint8))
    cli(f"seal notes.txt sealed.safetensors {KEY}")
    cli(f"seal study folder {KEY}")
    cli(f"seal -r study files {KEY}")
    cli("grant owner.key --to reader.pub --sign owner.signer -o owner.grants")
    cli("grant other.key --to reader.pub --sign owner.signer -o lost/grants")
    cli("anchor lost/anchor --owner owner.signer.pub")
    for name in ("owner.key", "reader", "owner.signer", "owner.signer.pub"):
        shutil.copy(name, folder / "lost" / name)
    WrappedKey("aws-kms", "SYMMETRIC_DEFAULT", 32 * "0", 256, b"x", {"key": "owner"}).save(folder / "lost" / "wrapped")
    return folder


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_target(name):
    return name.startswith("TARGET")


def attempt(cli, line):
    """Run a command, which may be refused, and return whether it was done."""
    from typer.testing import CliRunner

    from fastrack._cli.app import app

    result = CliRunner().invoke(app, [part.strip("'") for part in line.split()])
    assert result.exception is None or isinstance(result.exception, SystemExit), line
    assert not list(cli.folder.rglob(".fastrack-*")), line
    return result.exit_code == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_a_second_run_loses_and_doubles_nothing(cli, place, name):
    before = contents(place)
    assert attempt(cli, COMMANDS[name])
    first = contents(place)
    is_done = attempt(cli, COMMANDS[name])
    second = contents(place)
    assert is_done == (name in AGAIN or ("--force" in COMMANDS[name] and "--to" not in COMMANDS[name]))
    assert second.keys() == first.keys()
    assert is_done or second == first
    assert {path: content for path, content in second.items() if not is_target(path)} == before
    if not COMMANDS[name].startswith("unseal"):
        assert not [path for path, content in second.items() if is_target(path) and SECRET in content]
    if name.startswith("import"):
        assert len(SealedDataset("TARGET", keys="owner.key")) == 50


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_that_cannot_be_made_again_is_replaced(cli, place, name):
    lost = sorted((place / "lost").iterdir())
    before = contents(place)
    for target in ("TARGET", "TARGET.pub", "TARGET.grants"):
        for path in lost if target == "TARGET" else lost[:2]:
            content = path.read_bytes()
            shutil.copy(path, place / target)
            is_done = attempt(cli, COMMANDS[name])
            assert (place / target).read_bytes() == content, (target, path)
            assert target != "TARGET" or not is_done, path
            after = contents(place)
            assert {path: content for path, content in after.items() if not is_target(path)} == before
            for left in place.glob("TARGET*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


@pytest.mark.parametrize("name", COMMANDS)
def test_files_in_a_folder_of_the_name_stay(cli, place, name):
    shutil.copytree(place / "lost", place / "TARGET")
    (place / "TARGET" / "notes").write_bytes(b"other")
    before = contents(place)
    attempt(cli, COMMANDS[name])
    after = contents(place)
    assert {path: after.get(path) for path in before} == before


@pytest.mark.parametrize("name", FAILING)
def test_a_command_that_fails_leaves_no_target_and_the_right_one_works_then(cli, place, name):
    before = contents(place)
    assert not attempt(cli, FAILING[name])
    assert not (place / "TARGET").exists()
    assert contents(place) == before
    assert attempt(cli, COMMANDS["seal a folder"])


def test_a_resumed_import_of_another_source_changes_nothing(cli, place):
    assert attempt(cli, COMMANDS["import"])
    before = contents(place / "TARGET")
    lines = (place / "lines.txt").read_bytes().splitlines(keepends=True)
    others = {"later": lines[25:], "more in front": [b"new\n", *lines], "fewer": lines[:-1], "turned": lines[::-1]}
    for name, other in others.items():
        (place / "lines.txt").write_bytes(b"".join(other))
        assert "resume" in cli.error(COMMANDS["import, resumed"]), name
        assert contents(place / "TARGET") == before
    (place / "lines.txt").write_bytes(b"".join([*lines, b"one more\n"]))
    assert cli.json(COMMANDS["import, resumed"])["samples"] == 51


@pytest.mark.parametrize("name", [name for name, line in COMMANDS.items() if line.split()[0] != "keygen"])
def test_an_empty_argument_is_not_the_current_folder(place, name):
    from typer.testing import CliRunner

    from fastrack._cli.app import app

    before = contents(place)
    line = [part.strip("'") for part in COMMANDS[name].split()]
    for index, part in enumerate(line):
        if part == "TARGET" or (index == 1 and not part.startswith("-")):
            result = CliRunner().invoke(app, [*line[:index], "", *line[index + 1 :]])
            assert result.exit_code in ({1, 2} if line[0] == "grant" else {2}), result.output
            assert contents(place) == before
