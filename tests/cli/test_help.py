"""Help by command and topic, examples, and the words that people try."""

import re
import shlex

import numpy as np
import pytest
import typer
from helpers.cases import each
from helpers.commands import application, whole

from fastrack._cli.examples import EXAMPLES
from fastrack._cli.help import ALIASES, TOPICS

CODE = re.compile(r"^    fastrack .*(?<!\\)\n|^    fastrack (?:.*\\\n)+.*\n", re.MULTILINE)  # to copy


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
    assert all(len(line) <= 82 for text in shown for code in CODE.findall(text) for line in code.splitlines())
    for text in shown:
        lines = CODE.sub("", text).splitlines()
        assert [line for line in lines if len(line) > max(width, 20) and len(line.split()) > 1 and width > 20] == []


def test_the_first_screen_has_a_line_for_each_command(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("help").stdout.splitlines()
    assert len(lines) <= 24
    named = [name for line in lines if line.startswith("  ") for name in line[2:].partition("  ")[0].split(", ")]
    assert named == [name for name in commands() if len(name.split()) == 1 and name != "completion"]
    assert "completion." in "".join(lines)
    assert [line for line in lines[1:] if not line.startswith("  ")] == ["Keys and sharing:", "Machines:"]


def test_the_help_of_each_command_fits_the_terminal_and_names_what_it_leaves_out(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for line in commands():
        text = cli(f"help {line}").stdout
        assert len(text.splitlines()) <= 24, line
        assert not re.search(r"  None$", text, re.MULTILINE), line  # of an argument whose help was lost
        if " " in line or line not in {"attest", "broker", "plan", "tour"}:
            whole_text = cli(f"{line} --help-all").stdout
            listed = set(re.findall(r"^  (--[a-z-]+)", whole_text, re.MULTILINE))
            assert listed <= set(re.findall(r"--[a-z-]+", text)), line
            assert "--help-all" in text or text == whole_text


def test_what_is_used_most_is_on_the_first_page(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = cli("seal --help").stdout
    first = re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
    assert first == ["--key", "--recursive", "--force", "--plain", "--to", "--sign", "--help", "--help-all"]
    assert "SOURCE that is a folder is sealed as one" in " ".join(cli("seal --help-all").stdout.split())


def test_the_values_of_an_option_are_shown_as_they_are_written(cli):
    assert re.search(r"^  --product Milan\|Genoa ", cli("attest fetch --help-all").stdout, re.MULTILINE)


def test_each_command_has_examples_which_its_parser_takes(cli):
    program = typer.main.get_command(application())
    parent = program.make_context("fastrack", ["help"])
    assert set(EXAMPLES) == {line for line in commands() if line not in {"attest", "broker", "plan", "tour"}}
    for line, examples in EXAMPLES.items():
        shown = cli(f"help {line}").stdout.partition("Examples:\n")[2].replace("\\\n", " ")
        assert [row.split() for row in shown.splitlines()] == [
            ["fastrack", *line.split(), *each.split()] for each in examples
        ]
        for example in examples:
            command, words = program, [*line.split(), *shlex.split(example.partition(" >")[0])]
            while members := getattr(command, "commands", None):
                command = whole(members[words.pop(0)])
            command.make_context(line, words, parent=parent)


@pytest.mark.usefixtures("key")
def test_the_first_examples_work_in_turn(cli, folder):
    np.save(folder / "a.npy", np.arange(3))
    (folder / "people.csv").write_text("age,name\n30,Ada\nNA,Bo\n")
    cli("keygen owner.signer --signer")
    for line in (
        f"seal {EXAMPLES['seal'][0]}",
        f"inspect {EXAMPLES['inspect'][0]}",
        f"verify {EXAMPLES['verify'][0]}",
        f"unseal {EXAMPLES['unseal'][0].replace('a.npy', 'again.npy')}",
        f"import {EXAMPLES['import'][1]}",
        f"index {EXAMPLES['index'][0]}",
        f"anchor {EXAMPLES['anchor'][0]}",
    ):
        cli(line)


def test_help_of_a_command_is_told_in_each_way(cli):
    for command in commands():
        said = cli(f"{command} --help").stdout
        assert said == cli(f"{command} -h").stdout == cli(f"help {command}").stdout
        assert said.startswith(f"Usage: fastrack {command} ")
        assert "<" not in said.partition("Options:")[2].partition("Examples:")[0], "a metavariable behind a flag"
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
