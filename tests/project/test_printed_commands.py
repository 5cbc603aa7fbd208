"""The commands that pages and examples print name programs, options, files, targets and extras that there are."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from helpers.commands import application, whole

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("examples/*.*"),
    *ROOT.glob("examples/*/*.py"),
    ROOT / "kernels/DESIGN.md",
]
BLOCK = re.compile(r"^```(?:sh|text|dockerfile)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
COMMAND = re.compile(r"(?:RUN )?((?:fastrack|python3?|torchrun|make|pip) .*)")

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(not (ROOT / "docs").exists(), reason="the tests run without the documentation"),
]


def commands():
    """Return each command that is printed, with the name of its page."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        lines = [line for block in BLOCK.findall(text) for line in block.replace("\\\n", "").splitlines()]
        lines += INLINE.findall(text)
        lines += re.findall(r"^    ((?:python|torchrun) .*)", text, re.MULTILINE)
        for line in lines:
            match = COMMAND.fullmatch(" ".join(line.split()))
            if match and not re.search(r"[A-Z]{3}\b|\||\[|\.\.\.", match[1].partition(" ")[2].replace("BASE=", "")):
                yield path.name, match[1]


def options_of(words):
    """Return the options of the command of fastrack that the words begin with, and None where there is none such."""
    group = typer.main.get_command(application())
    while words and hasattr(group, "commands"):
        if words[0].startswith("-"):
            break
        group = whole(group.commands.get(words.pop(0)))
    if group is None:
        return None
    return {"--help", "-h"} | {
        name for parameter in group.params for name in (*parameter.opts, *parameter.secondary_opts)
    }


def fault_of(line):
    """Return what there is not of a command, or None."""
    program, *words = shlex.split(line, comments=True)
    words = words[: words.index("--")] if "--" in words else words  # behind it stands another program
    if program == "fastrack":
        options = options_of(words)
        if options is None:
            return "no such command"
        return next((word for word in words if word.startswith("-") and len(word) > 1 and word not in options), None)
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = [extra for word in words for extra in re.findall(r"(?:\.|fastrack-io)\[(.*)\]", word)]
        return next((extra for each in named for extra in each.split(",") if extra not in extras), None)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return next((word for word in words if "=" not in word and word not in targets), None)
    if words[:1] == ["-m"] and words[1].startswith("bench"):
        module = ROOT.joinpath(*words[1].split("."))
        return None if module.with_suffix(".py").exists() or (module / "__main__.py").exists() else words[1]
    return next((word for word in words if "/" in word and word.endswith(".py") and not (ROOT / word).exists()), None)


def test_what_is_printed_is_there():
    found = list(commands())
    assert len(found) > 60
    assert {(page, line): fault for page, line in found if (fault := fault_of(line)) is not None} == {}


def test_what_is_not_there_is_found():
    for line in ("fastrack sael x y", "fastrack seal x y --kye k", "fastrack attest offer", "pip install '.[torhc]'"):
        assert fault_of(line) is not None, line
    for line in (
        "make tset",
        "python -m bench.nothing",
        "python bench/bench_nothing.py",
        "torchrun examples/nothing.py",
    ):
        assert fault_of(line) is not None, line
