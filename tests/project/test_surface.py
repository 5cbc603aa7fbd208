"""Test that the public surface is the accepted one; a change is accepted once the changelog names it."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

PACKAGES = (
    "fastrack",
    *(f"fastrack.{name}" for name in ("attest", "distributed", "format", "grants", "providers", "tour")),
)
NAMES_ALONE = ("fastrack.ray", "fastrack.transformers")  # import frameworks that a machine may lack
SURFACE = Path(__file__).with_name("surface.txt")
ROOT = Path(__file__).parents[2]
CHANGELOG = ROOT / "CHANGELOG.md"


def parameters_of(thing):
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):  # as of an enumeration
        return "()"
    told = [
        each.replace(annotation=each.empty, default=shown(each.default)) for each in parameters if each.name != "self"
    ]
    return str(inspect.Signature(told))


class Elided:
    def __repr__(self):
        return "..."


def shown(default):
    """Return a default that looks the same in every process, or what stands for one."""
    same = default is inspect.Parameter.empty or default is None or isinstance(default, (bool, int, float, str))
    return default if same or default == frozenset() else Elided()


def describe(path, thing):
    """Yield a line for a public name, and one for each public member of a class."""
    if not inspect.isclass(thing):
        yield f"{path}{parameters_of(thing) if callable(thing) and inspect.isroutine(thing) else ''}"
        return
    yield f"{path}{'' if issubclass(thing, BaseException) else parameters_of(thing)}"
    own = [each for each in thing.__mro__ if each.__module__.startswith("fastrack")]
    for name in sorted({name for each in own for name in vars(each) if not name.startswith("_")}):
        member = inspect.getattr_static(thing, name)
        function = getattr(member, "__func__", member)
        yield f"{path}.{name}{parameters_of(function) if inspect.isfunction(function) else ''}"


def surface():
    lines = []
    for package in PACKAGES:
        module = import_module(package)
        for name in sorted(module.__all__):
            lines += describe(f"{package}.{name}", getattr(module, name))
    for package in NAMES_ALONE:
        text = (ROOT / package.replace(".", "/") / "__init__.py").read_text()
        [names] = re.findall(r"^__all__ = (\[.*?\])", text, re.MULTILINE | re.DOTALL)
        lines += [f"{package}.{name}" for name in ast.literal_eval(names)]
    return lines


def is_told(line, changed):
    """Return whether the changelog names what a line describes: by its class, if that is new too."""
    *_, parent, name = (path := line.partition("(")[0]).split(".")
    new = any(each.partition("(")[0] == path.rpartition(".")[0] for each in changed)
    return name in unreleased() or (new and parent in unreleased())


def unreleased():
    return CHANGELOG.read_text().partition("## [Unreleased]")[2].partition("\n## [")[0]


def test_the_public_surface_is_the_one_that_was_accepted(request):
    pytest.importorskip("torch")
    now, accepted = surface(), SURFACE.read_text().splitlines()
    changed = sorted({*now} ^ {*accepted})
    if request.config.getoption("--accept-messages"):
        untold = [line for line in changed if not is_told(line, changed)]
        assert untold == [], "name these in CHANGELOG.md under [Unreleased] first"
        SURFACE.write_text("\n".join(now) + "\n")
    told = "name the change in CHANGELOG.md, and accept it: pytest tests/project/test_surface.py --accept-messages"
    assert now == SURFACE.read_text().splitlines(), f"{told}\n" + "\n".join(changed)
