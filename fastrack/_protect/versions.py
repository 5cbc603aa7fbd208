"""The versions that are covered. Another one has to write with the same functions as one that was tried."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from fastrack.errors import FastrackError

COVERED = {
    "torch": ((2, 13), (2, 16)),
    "safetensors": ((0, 8), (0, 9)),
    "transformers": ((4, 57), (6, 0)),
    "lightning": ((2, 5), (2, 7)),
    "pytorch-lightning": ((2, 5), (2, 7)),
    "accelerate": ((1, 10), (2, 0)),
}
"""The versions of each package that are covered: from the first up to the second, without it."""
WRITERS = Path(__file__).with_name("writers.txt")  # by `make writers`

# Releases that are not finished, by the versions of Python packages (PEP 440), such as 2.16.0a0+git1a2b3c.
_UNFINISHED = re.compile(r"[^+]*\d[._-]?(a|alpha|b|beta|c|dev|pre|preview|rc)", re.IGNORECASE)
# Calls with which Python code makes or writes a file of bytes, and how the mode of `open` says that.
_CALLS = (
    r"(?:Named|Spooled|)TemporaryFile|PyTorchFileWriter|FileIO|GdsFile|_write_file|write_bytes|write_record|writestr"
)
_CALLS += r"|tofile|(?:open_)?memmap|mmap|pwritev?|writev|savez(?:_compressed)?"
_FUNCTIONS = r"os\.(?:open|write)|(?:np|numpy)\.save"
_MODE = r"(?:[wax]\+?b\+?|b[wax]\+?|r\+b|rb\+|br\+)"
_WRITING = re.compile(
    rf"\b(?:{_CALLS}|{_FUNCTIONS})\(|(?:[\"']{_MODE}|}}b)[\"']|open[(,](?:[^()]|\([^()]*\))*mode\b".encode()
)
# What is listed by its name, whatever it calls: fastrack replaces, refuses or relies on these.
_NAMES = r"_*(?:(?:\w+_)?(?:save|write|dump|persist|offload)(?:_\w+)?|__reduce(?:_ex)?__|export|on_run_start|train)"
_NAMING = re.compile(rf"def {_NAMES}\(".encode())
_NAMED = re.compile(
    r"torch\.(serialization|storage|_tensor|distributed\.(checkpoint|_serialization|_shard)|cuda\.gds|_inductor\.package"
    r"|jit|export|package|nativert|onnx$)|safetensors|accelerate\.(accelerator|checkpointing|utils\.offload)"
    r"|transformers\.(trainer|modeling_utils)$|lightning[._]fabric\.(plugins|strategies)"
    r"|(lightning\.pytorch|pytorch_lightning)\.(callbacks\.model_checkpoint|loops\.fit_loop|plugins|strategies|trainer)"
)
# Tests, traces and tools of the packages themselves, and readers of others' models.
_LEFT_OUT = re.compile(
    r"torch\.(testing|profiler|_vendor|_dynamo\.repro|utils\.(benchmark|hipify))\b|transformers\.(cli|models|testing_utils)"
)
_EXTENSIONS = {"torch": "torch._C", "safetensors": "safetensors._safetensors_rust"}
_WORDS = "archive|dump|export|file|persist|pickle|save|serialize|write"
_TELLING = re.compile(rf"(?<![A-Za-z])(?:{_WORDS})|{_WORDS.title()}")
# Functions of kinds of devices, which some builds lack.
_OF_DEVICES = re.compile(r"torch\._C\..*(?<![a-z])(cuda|gds|hip|mps|mtia|nccl|xpu)", re.IGNORECASE)


def require_covered() -> None:
    """Refuse versions that are not covered, but for those that write with the functions of one that was tried."""
    told = []
    for name, (first, end) in COVERED.items():
        versions = versions_of(name)
        minors = {minor_of(version) for version in versions}
        if len(minors) > 1:
            raise _refusal(name, f"{name} of one version", " and ".join(versions), "--force-reinstall ")
        if any(minor < first for minor in minors):
            raise _refusal(name, f"{name} {_dotted(first)} or later", versions[0])
        # Trainers write with torch and safetensors, of which each version that is covered was tried.
        is_unfinished = name in _EXTENSIONS and any(map(_UNFINISHED.match, versions))
        if is_unfinished or any(minor >= end for minor in minors):
            told.append(_examine(name, versions[0]))
    if told:
        warning = f"protect_checkpoints: not tried, only compared: {', '.join(told)}"
        warnings.warn(warning, RuntimeWarning, stacklevel=4)


def versions_of(name: str) -> list[str]:
    """Return the versions that the metadata beside a package and its module say, none if there is no such package."""
    folders = _folders(name)
    if not folders:
        return []
    copies = list(importlib.metadata.distributions(name=name))
    # Those elsewhere are of a package that this one hides. Two here were left by an upgrade that was broken off.
    beside = [each for each in copies if Path(str(each.locate_file(""))).resolve() == folders[0].parent.resolve()]
    found = [importlib.metadata.version(name)] if beside == copies[:1] != [] else [each.version for each in beside]
    loaded = getattr(sys.modules.get(name.replace("-", "_")), "__version__", None)
    return list(dict.fromkeys(str(each) for each in (*found, loaded) if each)) or ["no version"]


def minor_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, or what is later than any, if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (sys.maxsize,) if found is None else tuple(map(int, found.groups()))


def _refusal(name: str, expected: str, got: str, option: str = "") -> FastrackError:
    first, end = map(_dotted, COVERED[name])
    return FastrackError(
        f"protect_checkpoints: expected {expected}, got {got}. Install another fastrack, or a version that is covered: "
        f"pip install {option}'{name}>={first},<{end}'"
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _examine(name: str, version: str) -> str:
    found = surface(name)
    differences = {tried: _differences(found, known) for tried, known in tried_surfaces()[name].items()}
    nearest, least = min(differences.items(), key=lambda each: len(each[1]))
    if least:
        got = f"{version:.40}, which differs from {nearest}: {'; '.join(least):.1000}"
        raise _refusal(name, f"{name} to write with the functions of a version that was tried", got)
    return f"{name} {version:.40}, which writes with the functions of {nearest}"


def _differences(found: set[str], known: set[str]) -> list[str]:
    new, old = ({each.partition("(")[0] for each in some} for some in (found - known, known - found))
    missing = {each for each in old - new if not _OF_DEVICES.match(each)}
    kinds = {"new": new - old, "changed": new & old, "missing": missing}
    return [f"{kind} {each}" for kind, names in kinds.items() for each in sorted(names)]


def tried_surfaces() -> dict[str, dict[str, set[str]]]:
    """Return the functions of each version that was tried, by package and version."""
    listed: dict[str, dict[str, set[str]]] = {}
    for section in WRITERS.read_text("utf-8").split("\n["):
        title, *functions = section.splitlines()
        name, *versions = title.strip("[]").split()
        for version in versions:
            listed.setdefault(name, {}).setdefault(version, set()).update(functions)
    return listed


def surface(name: str) -> set[str]:
    """Return the functions of an installed package that write or that fastrack relies on, with their parameters."""
    found = set(_in_extension(name)) if name in _EXTENSIONS else set()
    for folder in _folders(name):
        for path in folder.rglob("*.*"):
            inner = ".".join((*path.relative_to(folder).parts[:-1], path.name.partition(".")[0]))
            module = f"{folder.name}.{inner}".removesuffix(".__init__")
            if path.suffix == ".py" and not _LEFT_OUT.match(module):
                found.update(_in_source(module, path.read_bytes()))
            elif path.suffix == ".so" and path.name.count(".") > 1:  # one that Python imports
                found.add(f"{module} (compiled)")
    return found


def _folders(name: str) -> list[Path]:
    try:
        spec = find_spec(name.replace("-", "_"))
    except ValueError:  # of a module that a program has made
        spec = None
    found = [Path(each) for each in (spec and spec.origin and spec.submodule_search_locations) or ()]
    return [*found, *(each.with_name("lightning_fabric") for each in found if name == "pytorch-lightning")]


def _in_source(module: str, content: bytes) -> Iterator[str]:
    is_named = _NAMED.match(module) is not None
    if not (_WRITING.search(content) or (is_named and _NAMING.search(content))):
        return
    waiting: list[tuple[ast.AST, str]] = []
    try:
        with warnings.catch_warnings(action="ignore"):  # such as those of escapes in strings
            waiting.append((ast.parse(content), f"{module}:"))
    except (SyntaxError, ValueError):  # of a later Python
        yield f"{module} (not readable)"
    while waiting:
        node, place = waiting.pop()
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            place = f"{place.partition('(')[0]}.{node.name}".replace(":.", ":")
            if not isinstance(node, ast.ClassDef):
                place += f"({', '.join(each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg))})"
                if is_named and re.fullmatch(_NAMES, node.name):
                    yield place
        elif isinstance(node, ast.Call) and _is_writing(node):
            yield place
        waiting.extend((each, place) for each in ast.iter_child_nodes(node))


def _is_writing(call: ast.Call) -> bool:
    name = str(getattr(call.func, "attr", getattr(call.func, "id", "")))
    if re.fullmatch(_CALLS, name) or (
        name in {"open", "save", "write"} and re.fullmatch(_FUNCTIONS, ast.unparse(call.func))
    ):
        return True
    opens = re.fullmatch(r"\w*open|partial|(?:BZ2|Gzip|LZMA)File", name)
    given = [ast.unparse(each) for each in (*call.args, *(each.value for each in call.keywords))] if opens else []
    return any(re.search(rf"[\"']{_MODE}[\"']|mode$|[+{{].*b['\"]$", each) for each in given)


def _in_extension(name: str) -> Iterator[str]:
    """Yield the functions of an extension, and operators, whose names say that they write: no more is seen of them."""
    root = importlib.import_module(_EXTENSIONS[name])
    waiting: list[tuple[str, Any]] = [(root.__name__, root)]
    seen = {id(root)}
    for path, owner in waiting:
        for key in [each for each in list(vars(owner)) if each == "__init__" or not each.startswith("__")]:
            inner, value = f"{path}.{key}", getattr(owner, key, None)
            value = getattr(value, "fastrack_original", value)  # a folder may have been written, or mounted, before
            home = str(getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", ""))
            if isinstance(value, (ModuleType, type)) and home.startswith((name, "builtins")) and id(value) not in seen:
                seen.add(id(value))
                waiting.append((inner, value))
            if callable(value) and _TELLING.search(inner.removeprefix(root.__name__)) and "pybind" not in key:
                yield f"{inner}({'' if _OF_DEVICES.match(inner) else _documented(key, value)})"
    for schema in root._jit_get_all_schemas() if name == "torch" else ():
        arguments = ", ".join(each.name for each in schema.arguments)
        is_telling = _TELLING.search(schema.name) or "file" in arguments
        if is_telling and schema.name.startswith(("aten::", "prim::")):
            yield f"{schema.name}({arguments})"


def _documented(name: str, function: Any) -> str:
    """Return the parameters of a function of an extension, as far as its documentation tells them."""
    calls = re.findall(rf"^(?:\d+\. )?{name}(\(.*\))", getattr(function, "__doc__", None) or "", re.MULTILINE)
    told = " ".join((getattr(function, "__text_signature__", None) or "", *calls))
    return ", ".join(dict.fromkeys(re.findall(r"[(,] *(\w+)(?=[:=,)])", told)))
