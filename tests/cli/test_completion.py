"""Completion by the shells themselves: at a prompt of bash and zsh, and as fish answers, where they are installed."""

import contextlib
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers.commands import invoke

LONGEST = 30.0  # seconds for an answer, each of which starts Python
SCRIPTS = {"bash": "fastrack.bash", "zsh": "_fastrack", "fish": "fastrack.fish"}
COMPLETED = {  # what is typed, and what stands there behind a tab
    "fastrack unse": "unseal ",
    "fastrack seal --form": "--format ",
    "fastrack seal --format np": "npy ",
    "fastrack attest ver": "verify ",
    "fastrack inspect my": r"my\\ model.safetensors ",  # a file
    "fastrack verify my\\ model.safetensors --key own": "owner.key ",  # a source of keys
}


@pytest.fixture
def shells(folder):
    """Have a program `fastrack`, what it prints for each shell, and files to complete. Return an environment."""
    program = folder / "bin" / "fastrack"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fastrack "$@"\n')
    program.chmod(0o755)
    for name in ("my model.safetensors", "owner.key"):
        (folder / name).touch()
    for shell, name in SCRIPTS.items():
        (folder / name).write_text(invoke(["completion", shell]).stdout)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    given = {"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(folder), "PATH": path, "TERM": "dumb", "PS1": "> "}
    return {**os.environ, **given}


def require(shell):
    return shutil.which(shell) or pytest.skip(f"{shell} is not installed")


@contextlib.contextmanager
def prompt(command, environment, begin):
    """Start a shell on a terminal. Yield a function that types, and returns once a text is there behind a pattern."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(command[0], command, environment)

    def enter(text, wanted):
        os.write(terminal, text.encode())
        found, end = "", time.monotonic() + LONGEST
        while not re.search(wanted, found):
            assert time.monotonic() < end, found
            if select.select([terminal], [], [], 0.1)[0]:
                found += os.read(terminal, 65536).decode(errors="replace")

    try:
        enter(f"{begin}; echo rea''dy\n", "ready\r?\n")
        yield enter
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "begin"),
    [
        ("bash", "source ./fastrack.bash"),
        ("zsh", "fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D"),
    ],
)
def test_a_tab_completes_commands_options_values_and_files(shells, shell, begin):
    plain = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"]}[shell]
    with prompt([require(shell), *plain, "-i"], shells, begin) as enter:
        for typed, wanted in COMPLETED.items():
            enter(f"\x15{typed}\t", wanted)


@pytest.mark.nightly
def test_fish_completes_commands_options_values_and_files(shells):
    for typed, wanted in COMPLETED.items():
        line = f"source fastrack.fish; complete -C {shlex.quote(typed)}"
        command = [require("fish"), "--no-config", "-c", line]
        said = subprocess.run(command, env=shells, capture_output=True, text=True, check=True).stdout
        assert [found.partition("\t")[0] for found in said.splitlines()] == [wanted.replace("\\\\", "").strip()]


def test_what_is_printed_is_of_each_shell(shells, folder):
    for shell, name in SCRIPTS.items():
        assert f"_FASTRACK_COMPLETE=complete_{shell}" in (folder / name).read_text()
    shlex.split((folder / "fastrack.fish").read_text())  # whose quotes are those of sh here
    for shell in ("bash", "zsh"):  # this of zsh is grammar of bash too
        checked = [shutil.which(shell) or "bash", "-n", SCRIPTS[shell]]
        subprocess.run(checked, check=True, env=shells)


def test_completion_edits_no_file(shells, folder):
    before = sorted(folder.rglob("*"))
    given = {**shells, "_FASTRACK_COMPLETE": "complete_bash", "COMP_WORDS": "fastrack unse", "COMP_CWORD": "1"}
    done = subprocess.run(["fastrack"], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["unseal"]
    assert sorted(folder.rglob("*")) == before


def test_another_shell_is_named_in_the_error(cli):
    assert cli.error("completion tcsh", status=2).startswith("error: SHELL: expected one of 'bash', 'zsh', 'fish'")
