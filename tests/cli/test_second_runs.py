"""Commands that write, run once more: nothing is lost, doubled, replaced, or left unencrypted.

Each row of the table is a command that writes TARGET, in a folder with all that it needs. It is run, run again, and run
with each file that cannot be made again, and with a folder, in the place of TARGET.
"""

import shutil

import numpy as np
import pytest
from helpers.commands import invoke
from helpers.every_command import (
    AGAIN,
    BESIDE,
    COMMANDS,
    FAILING,
    KEY,
    READING,
    SECRET,
    SLOW,
    contents,
    every_command,
    machine,
    prepare,
    words_of,
)

from fastrack import SealedDataset


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def place(folder, prepared, monkeypatch):
    """A copy of that folder, in which the commands run."""
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    machine(monkeypatch)
    return folder


def target_of(name):
    """Return the name of the target of a command."""
    return next(word for word in COMMANDS[name].split() if word.startswith("TARGET"))


def is_target(name):
    # A challenge is used up, and SQLite leaves two files beside a database that it reads.
    return name.startswith(("TARGET", "challenge.used-", "broker.db-")) or name == "challenge"


def others(files):
    return {path: content for path, content in files.items() if not is_target(path)}


def targets(folder):
    return {path: content for path, content in contents(folder).items() if path.startswith("TARGET")}


def may_run_again(name):
    return name in AGAIN or ("--force" in COMMANDS[name] and "--to" not in COMMANDS[name])


def require_packages(name):
    if name.startswith(("broker", "tour own", "tour hold")):
        pytest.importorskip("uvicorn")


def test_every_command_is_in_a_table():
    words = [line.split() for line in COMMANDS.values()]
    written = {" ".join(line[:2]) if line[0] in {"attest", "broker", "plan", "tour"} else line[0] for line in words}
    assert written | READING.keys() | SLOW | BESIDE == every_command().keys()
    assert not written & READING.keys()


def attempt(cli, line):
    """Run a command, which may be refused, and return whether it was done."""
    result = invoke(words_of(line, cli.folder))
    assert not list(cli.folder.rglob(".fastrack-*")), line
    return result.exit_code == 0


EACH = [pytest.param(name, marks=[pytest.mark.nightly] * name.startswith("bench")) for name in COMMANDS]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.slow
def test_a_second_run_loses_and_doubles_nothing(cli, place, name):
    require_packages(name)
    before = contents(place)
    assert attempt(cli, COMMANDS[name])
    first = contents(place)
    is_done = attempt(cli, COMMANDS[name])
    second = contents(place)
    assert is_done == may_run_again(name)
    assert second.keys() == first.keys()
    assert is_done or second == first
    assert others(second) == others(before)
    if not COMMANDS[name].startswith("unseal"):
        assert not [path for path, content in second.items() if is_target(path) and SECRET in content]
    if name.startswith("import"):
        assert len(SealedDataset("TARGET", keys="owner.key")) == 50


READERS_OF_FILES = ("seal", "import", "unseal", "rekey", "publish")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.startswith(READERS_OF_FILES)])
@pytest.mark.slow  # of many cases
def test_a_second_run_with_other_input_replaces_all_of_the_result_or_nothing(cli, place, name):
    assert attempt(cli, COMMANDS[name])
    first = targets(place)
    for path in ("notes.txt", "lines.txt", "study/a.json", "study/b.txt"):
        (place / path).write_bytes(b"another\n")
    np.save("array.npy", np.frombuffer(b"another\n", np.uint8))
    shutil.rmtree("folder")
    for line in ("notes.txt sealed.safetensors --force", "study folder", "-r study files --force"):
        cli(f"seal {line} {KEY}")
    is_done = attempt(cli, COMMANDS[name])
    assert is_done == (may_run_again(name) and name != "import, resumed")
    if not is_done:
        assert targets(place) == first
    elif not name.startswith("publish"):
        result = place / target_of(name)
        if not name.startswith("unseal"):
            key = "other.key" if name.startswith("rekey") else "owner.key"
            cli(f"unseal {'-r ' if result.is_dir() else ''}{result.name} back -k {key}")
            result = place / "back"
        opened = contents(result) if result.is_dir() else {result: result.read_bytes()}
        assert opened
        assert not [path for path, content in opened.items() if SECRET in content or b"another" not in content]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.slow  # of many cases
def test_nothing_that_cannot_be_made_again_is_replaced(cli, place, name):
    lost = sorted((place / "lost").iterdir())
    before = contents(place)
    for suffix in ("", ".pub", ".grants"):
        target = target_of(name) + suffix
        for path in lost[:2] if suffix else lost:
            content = path.read_bytes()
            shutil.copy(path, place / target)
            is_done = attempt(cli, COMMANDS[name])
            assert (place / target).read_bytes() == content, (target, path)
            assert suffix or not is_done, path
            after = contents(place)
            assert others(after) == others(before)
            for left in place.glob("TARGET*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


@pytest.mark.parametrize("line", ["bench --size 0.01 --picture kept.png", "demo --picture kept.png"])
def test_no_chart_replaces_a_key(cli, place, line):
    shutil.copy(place / "owner.key", place / "kept.png")
    before = contents(place)
    assert "holds a key" in cli.error(line)
    assert contents(place) == before


@pytest.mark.parametrize("name", READING)
def test_a_command_that_reads_writes_nothing(cli, place, name):
    require_packages(name)
    before = contents(place)
    assert attempt(cli, READING[name])
    after = contents(place)
    assert {path: after[path] for path in after if not path.startswith("broker.db-")} == before  # SQLite's own


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.slow  # of many cases
def test_files_in_a_folder_of_the_name_stay(cli, place, name):
    shutil.copytree(place / "lost", place / target_of(name))
    (place / target_of(name) / "notes").write_bytes(b"other")
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
@pytest.mark.slow  # of many cases
def test_an_empty_argument_is_not_the_current_folder(place, name):
    before = contents(place)
    line = [part.strip("'") for part in COMMANDS[name].split()]
    for index, part in enumerate(line):
        if part == target_of(name) or (index == 1 and not part.startswith("-")):
            result = invoke([*line[:index], "", *line[index + 1 :]])
            assert result.exit_code in ({1, 2} if line[0] in {"grant", "attest", "broker"} else {2}), result.output
            assert contents(place) == before
