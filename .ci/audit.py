"""Write docs/dev/audit.md: what an auditor reads, in three rings, counted from the sources.

``python .ci/audit.py`` prints the page, ``python .ci/audit.py --write`` writes it.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fastrack"
PAGE = ROOT / "docs" / "dev" / "audit.md"
ENTRIES = {
    "seal": "_sealed/seal.py",
    "save_file": "_files/writer.py",
    "SealedFile": "_files/reader.py",
    "to_device": "_transfer/api.py",
}
GENERATOR = ROOT / "kernels" / "fastrack_native"  # makes the native extension, and is not where fastrack runs
RELEASE = ("attest/", "grants/", "providers/", "_net/", "_service/", "_keys/")  # but for what the core needs of keys
_QUIET = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
HEAD = """\
# What an auditor reads

This page is made by a command (`python .ci/audit.py --write`), and a test compares it with the sources. It says which
files to read, in which order, where documents of strangers come in, and which code holds each of the
[invariants](../attacks.md#invariants). The [threat model](../threat-model.md) says what is protected from whom, and
[architecture](architecture.md) how the packages fit.

*Lines* are all lines of the Python files, *code* those without docstrings, comments and blank lines.

## Three rings

| ring | what it is | files | lines | code |
|---|---|---:|---:|---:|
"""
CONTRACTS = """
Import contracts in `pyproject.toml` keep the core free of what is around it: files on servers, providers and evidence
come to it through tables (`_util/registry.py`), which `fastrack/__init__.py` fills.

## Where documents of strangers come in

Each of these functions gives a document to `_util/gate.py:admit`, which refuses it by counts of its bytes before it is
parsed. `_util/gate.py:LIMITS` has the limits, and [the format](../format.md#limits-of-what-strangers-send) lists them.

| function | file |
|---|---|
"""
INVARIANTS = """
## Invariants, and the code that holds them

Of the [attacks](../attacks.md) on each invariant, those that code of `core` prevents.

| | places |
|---|---|
"""


def main(argv: Sequence[str]) -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(prog="python .ci/audit.py", description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--write", action="store_true", help="write the page, in place of printing it")
    page = make_page()
    if parser.parse_args(argv).write:
        PAGE.write_text(page, encoding="utf-8")
    else:
        sys.stdout.write(page)


def rings() -> dict[str, list[Path]]:
    """Return the files of each ring, and of the generator of the native extension."""
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    core = _closure(paths)
    release = {name for name in paths if name.startswith(RELEASE)} - core
    parts = {"core": core, "release": release, "rest": {*paths} - core - release}
    files = {part: [paths[name] for name in sorted(names)] for part, names in parts.items()}
    return {**files, "generator": sorted(GENERATOR.glob("*.py"))}


def make_page() -> str:
    """Return the text of the page."""
    parts, kernels = rings(), sorted((ROOT / "kernels").glob("*.cu*"))
    entries = ", ".join(f"`{name}`" for name in ENTRIES)
    what = {
        "core": f"1 | `core`: all that {entries} import, late imports too",
        "release": "2 | `release`: what lets a key out: evidence, policies, grants, and where keys are kept",
        "rest": "3 | the rest: loaders, models, folders, remote files, collectives, tours, the command line",
        "generator": " | the generator of the native extension, which only a build runs: `kernels/fastrack_native/`",
    }
    text = HEAD + "".join(f"| {what[part]} | {_totals(paths)} |\n" for part, paths in parts.items())
    size = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in kernels)
    text += f"| | the kernels, which a GPU runs: `kernels/` | {len(kernels)} | {size:,} | |\n" + CONTRACTS
    every = [path for paths in parts.values() for path in paths]
    text += "".join(f"| `{function}` | `{_name(path)}` |\n" for path in sorted(every) for function in _gates(path))
    text += INVARIANTS
    for number, places in _invariants([_name(path) for path in parts["core"]]).items():
        text += f"| {number} | {', '.join(f'`{place}`' for place in places)} |\n"
    for part in ("core", "release", "generator"):
        text += f"\n## Files of the {part}\n\n| file | what it is | code |\n|---|---|---:|\n"
        for path in parts[part]:
            summary = (ast.get_docstring(_parsed(path)) or "").partition("\n")[0].replace("|", "\\|")
            text += f"| `{_name(path)}` | {summary} | {len(code_lines(path))} |\n"
    return text


@cache
def code_lines(path: Path) -> frozenset[int]:
    """Return the numbers of the lines of a file with code: no docstring, comment or blank line."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in _QUIET:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return frozenset(lines)


def _closure(paths: Mapping[str, Path]) -> set[str]:
    """Return the files that the entries import, directly or not."""
    found: set[str] = set()
    left = [*ENTRIES.values()]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            packages = (f"{folder.as_posix()}/__init__.py" for folder in Path(name).parents)
            left += {each.removeprefix("./") for each in packages} & paths.keys()
            left += _imported(paths, paths[name])
    return found


def _imported(paths: Mapping[str, Path], path: Path) -> Iterator[str]:
    """Yield the files of fastrack that a file imports, but for those of types."""
    for node in _imports(_parsed(path)):
        modules = [each.name for each in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{each}" for each in modules)]
        for module in modules:
            stem = module.removeprefix("fastrack").removeprefix(".").replace(".", "/")
            yield from (each for each in (f"{stem}.py", f"{stem}/__init__.py") if each in paths)


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from _imports(node)


def _gates(path: Path) -> Iterator[str]:
    """Yield the names of functions of a file that give a document to the gate."""
    if "admit(" in path.read_text(encoding="utf-8"):
        for node in ast.walk(_parsed(path)):
            called = {ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}
            if isinstance(node, ast.FunctionDef) and called & {"admit", "gate.admit"}:
                yield node.name


def _invariants(core: Collection[str]) -> dict[int, list[str]]:
    """Return the places of `core` that hold an invariant, by its number, as the page of attacks names them."""
    places: dict[int, set[str]] = {}
    for line in (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("| ") and len(cells) > 3 and re.fullmatch(r"[\d, ]+", cells[1]):
            here = {place for place in re.findall(r"`([^`]+)`", cells[2]) if _file_of(place) in core}
            for number in map(int, cells[1].split(",")):
                places.setdefault(number, set()).update(here)
    return {number: sorted(places[number]) for number in sorted(places)}


def _file_of(place: str) -> str:
    stem = place.partition(":")[0].replace(".", "/")
    return f"{stem}.py" if (PACKAGE / f"{stem}.py").is_file() else f"{stem}/__init__.py"


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _totals(paths: Sequence[Path]) -> str:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    return f"{len(paths)} | {lines:,} | {sum(len(code_lines(path)) for path in paths):,}"


if __name__ == "__main__":
    main(sys.argv[1:])
