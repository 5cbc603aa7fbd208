"""The page of attacks names code and tests that are there."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "attacks.md"
DEFINITION = re.compile(r"^( {4})?(?:async )?(def|class) (\w+)", re.MULTILINE)  # to parse the files takes a second

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(not PAGE.exists(), reason="the tests run without the documentation"),
]


def rows():
    """Return attack, invariants, code and tests of each row of the page."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [row for row in found if row[0] != "attack"]


@cache
def names_in(path):
    """Return the functions and classes of a file, and the methods of these as ``Class.method``."""
    names, owner = set(), None
    for indent, kind, name in DEFINITION.findall(path.read_text(encoding="utf-8")) if path.exists() else ():
        if not indent:
            owner = name if kind == "class" else None
            names.add(name)
        elif owner:
            names.add(f"{owner}.{name}")
    return names


def has_code(reference):
    module, _, name = reference.partition(":")
    first, *parts = module.split(".")
    top = {"examples": [], "fastrack_native": ["kernels"]}.get(first, ["fastrack"])
    path = ROOT.joinpath(*top, first, *parts)
    return name in names_in(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


def has_test(reference):
    file, *names = reference.split("::")
    return names[-1].startswith("test_") and ".".join(names) in names_in(ROOT / "tests" / file)


def test_each_attack_names_an_invariant_code_and_a_test_that_are_there():
    text = PAGE.read_text(encoding="utf-8")
    invariants = set(re.findall(r"^(\d+)\. ", text, re.MULTILINE))
    for attack, kept, code, tests in rows():
        assert set(kept.split(", ")) <= invariants, attack
        for cell, is_there in ((code, has_code), (tests, has_test)):
            references = re.findall(r"`([^`]+)`", cell)
            assert references, attack
            assert not [reference for reference in references if not is_there(reference)], attack


def test_each_attack_is_named_once_and_each_invariant_somewhere():
    attacks = [row[0] for row in rows()]
    assert len(attacks) > 100
    assert sorted(set(attacks)) == sorted(attacks)
    invariants = set(re.findall(r"^(\d+)\. ", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert invariants == {number for row in rows() for number in row[1].split(", ")}


def test_a_name_that_is_not_there_is_found():
    assert has_code("_util.atomic:new_file")
    assert not has_code("_util.atomic:no_file")
    assert not has_code("_util.no_module:new_file")
    assert has_code("examples.serving.shared:Replays.admit")
    assert not has_code("examples.serving.shared:Replays.none")
    assert has_test("project/test_attacks.py::test_a_name_that_is_not_there_is_found")
    assert not has_test("project/test_attacks.py::test_that_is_not_there")
    assert not has_test("project/test_no_attacks.py::test_a_name_that_is_not_there_is_found")
