"""Help by command and topic, the words that people try, and completion."""

import os
import subprocess
import sys

import pytest
import typer
from helpers.cases import each
from helpers.commands import application, whole

from fastrack._cli.help import ALIASES, TOPICS


def commands():
    """Yield the words of each command."""
    for name, command in typer.main.get_command(application()).commands.items():
        yield name
        yield from (f"{name} {member}" for member in getattr(whole(command), "commands", ()))


@pytest.mark.parametrize("width", [40, 80, *(pytest.param(width, marks=pytest.mark.nightly) for width in (20, 200))])
def test_help_fits_the_terminal_and_breaks_no_word(cli, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    shown = [cli(f"help {line}").stdout for line in [*commands(), *TOPICS, ""]]
    monkeypatch.setenv("COLUMNS", "10000")
    wide = [cli(f"help {line}").stdout for line in [*commands(), *TOPICS, ""]]
    assert {word for text in shown for word in text.split()} == {word for text in wide for word in text.split()}
    for text in shown:
        lines = text.splitlines()
        lines = [line for line in lines if not line.startswith("    _FASTRACK_COMPLETE=")]  # to copy
        assert [line for line in lines if len(line) > max(width, 20) and len(line.split()) > 1 and width > 20] == []


def test_the_first_screen_has_a_line_for_each_command(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("help").stdout.splitlines()
    assert len(lines) <= 24
    named = [name for line in lines if line.startswith("  ") for name in line[2:].partition("  ")[0].split(", ")]
    assert named == [name for name in commands() if len(name.split()) == 1]
    assert [line for line in lines[1:] if not line.startswith("  ")] == ["Keys and sharing:", "Machines:"]
    assert len(cli("help import").stdout.splitlines()) <= 24


def test_a_line_to_copy_is_not_folded(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    code = [line for line in cli("help completion").stdout.splitlines() if "_FASTRACK_COMPLETE" in line]
    assert [line.partition(" > ")[2] for line in code] == [
        "~/.local/share/bash-completion/completions/fastrack",
        "~/.zfunc/_fastrack",
        "~/.config/fish/completions/fastrack.fish",
    ]


def test_help_of_a_command_is_told_in_each_way(cli):
    for command in commands():
        said = cli(f"{command} --help").stdout
        assert said == cli(f"{command} -h").stdout == cli(f"help {command}").stdout
        assert said.startswith(f"Usage: fastrack {command} ")
        assert "<" not in said.partition("Options:")[2], "a metavariable behind a flag"
    assert cli("help").stdout == cli("--help").stdout == cli("", status=2).stderr
    assert cli("-V").stdout == cli("--version").stdout


def test_a_topic_has_other_names(cli):
    for name, topic in ALIASES.items():
        assert cli(f"help {name}").stdout == cli(f"help {topic}").stdout
    assert "`fastrack help keys`" in cli.error("help kyes", status=2)


@each(
    ("line", "told"),
    [
        ("encrypt a b", "no command 'encrypt': `fastrack seal` encrypts"),
        ("decrypt a b", "no command 'decrypt': `fastrack unseal` decrypts"),
        ("info a", "no command 'info': `fastrack inspect` shows what a file holds"),
        *((f"{word} a", "`fastrack inspect`") for word in ("show", "ls", "list", "stat")),
        *((f"{word} a", "`fastrack unseal`") for word in ("cat", "extract", "export", "open", "Decrypt", "decript")),
        *((f"{word} a", "`fastrack seal`") for word in ("pack", "save", "sael", "SEAL", "seel", "encript")),
        *((f"{word} a", "`fastrack verify`") for word in ("check", "test", "verfy")),
        ("convert a", "`fastrack import`"),
        ("sign a", "`fastrack publish`"),
        ("share a", "`fastrack grant`"),
        ("load a", "`fastrack.load_file`"),
        ("train", "`fastrack.SealedDataset`"),
        ("version", "`fastrack --version`"),
        ("xyzzy", "`fastrack --help` lists the commands"),
        ("attest vrify", "`fastrack attest verify`"),
        ("attest encrypt", "`fastrack attest --help`"),
        ("seal a b --outt c", "no option --outt: did you mean --out?"),
        ("seal a b --overwrite", "did you mean --force?"),
        ("seal a b --silent", "did you mean --quiet?"),
        ("seal a b -z", "`fastrack seal --help` lists the options"),
        ("--verison", "did you mean --version?"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(cli, line, told):
    said = cli.error(line, status=2)
    assert told in said
    assert said.count("\n") == 1


def test_a_file_in_the_place_of_a_command_is_told(cli, folder):
    (folder / "data.npy").write_bytes(b"")
    assert "'data.npy', which is a file" in cli.error("data.npy out", status=2)


def test_an_error_of_usage_is_a_document_for_programs(cli):
    for line in ("seal a b --outt c", "seal", "keygen x --bits 3", "seal a b --force --skip-existing"):
        error = cli.json(line, status=2)["error"]
        assert cli.error(line, status=2) == f"error: {error['message']}\n"
    assert "no option --outt" in cli.error("bench --outt x --json y", status=2)  # where it is the name of a file


def test_a_key_in_a_wrong_place_is_not_repeated(cli):
    for line in ("keygen a {}", "{}", "key --{}", "seal a b --format {}"):
        assert "0123456789abcdef" not in cli.error(line.format("0123456789abcdef" * 4), status=2), line


def test_completion_edits_no_file(tmp_path):
    def run(**variables):
        environment = {**os.environ, "HOME": str(tmp_path), **variables}
        line = [sys.executable, "-m", "fastrack"]
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout

    assert "complete_bash" in run(_FASTRACK_COMPLETE="source_bash")
    said = run(_FASTRACK_COMPLETE="complete_bash", COMP_WORDS="fastrack unse", COMP_CWORD="1")
    assert said.split() == ["unseal"]
    assert not list(tmp_path.iterdir())
    for shell in ("bash", "zsh", "fish"):
        assert f"_FASTRACK_COMPLETE=source_{shell} fastrack >" in TOPICS["completion"]
