"""The blocks of a page of the documentation, and a program that runs them.

Run as a program it takes, as JSON on standard input, blocks and whether torch may be imported: it runs them in order in
the current folder, the ones of Python in one namespace, and prints what each of them printed.
"""

import contextlib
import importlib.machinery
import io
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(
    r"(?:^<!-- not run: ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)
_RUN = {"python", "sh", "diff"}
# Moments, ids, times and speeds with their units, which no two runs have in common.
_VARIES = re.compile(r"\b\d{4}-\d\d-\d\dT[\d:+.]+|\b[0-9a-f]{8,}\b|\b\d[\d.,]* ?(?:[mµ]?s|min|[kMG]i?B/s)\b")


class Block(NamedTuple):
    language: str
    text: str
    printed: str | None  # what the page says that it prints, if it says so
    reason: str | None  # why it is not run


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of Python and of shell commands; what they print is the `text` that follows at once.

    A `diff` is a block of Python, as it is after the change.
    """
    found = (Block(language, text, printed, reason or None) for reason, language, text, printed in _find(page))
    return [
        block._replace(language="python", text=side_of(block.text, "+")) if block.language == "diff" else block
        for block in found
        if block.language in _RUN
    ]


def side_of(diff: str, sign: str) -> str:
    """Return a program before (`-`) or after (`+`) the change that a `diff` shows."""
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in {sign, " ", ""})


def _find(page):
    place = 0
    while match := _BLOCK.search(page, place):
        reason, language, text, printed = match.groups()
        yield reason, language, text, printed if language != "text" else None
        # Behind a block of another language the `text` may be one by itself.
        place = match.end() if language in _RUN else match.end(3) + len("```")


def lines_of(text: str) -> list[str]:
    """Return the lines of an output without what varies, and with single spaces."""
    return [" ".join(_VARIES.sub("#", line).split()) for line in text.strip().splitlines()]


def _run_shell(text):
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _run_python(text, name, space):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(text, name, "exec"), space)
    return said.getvalue()


class _NoTorch(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else super().find_spec(name, path, target)


def main() -> None:
    """Run the blocks, and print what each printed as JSON."""
    blocks, with_torch = json.load(sys.stdin)
    if not with_torch:
        finder = importlib.machinery.PathFinder
        sys.meta_path[:] = [_NoTorch if found is finder else found for found in sys.meta_path]
    programs = Path(".programs")  # what the commands of the page find first
    programs.mkdir()
    for name, words in (("fastrack", '-m fastrack "$@"'), ("python", '"$@"')):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}\n')
        (programs / name).chmod(0o700)
    os.environ |= {"PATH": f"{programs.resolve()}:{os.environ['PATH']}", "COLUMNS": "80"}
    space = {"__name__": "__main__"}
    said = []
    for place, (language, text, *_) in enumerate(blocks):
        if with_torch or "import torch" not in text:
            run = _run_shell if language == "sh" else partial(_run_python, name=f"<block {place}>", space=space)
            said.append((place, run(text).replace(str(Path.cwd()), "/home/you")))
    assert with_torch or "torch" not in sys.modules
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
