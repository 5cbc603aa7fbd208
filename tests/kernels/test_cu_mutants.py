"""The list of mutants: every edit still fits the kernels, and every test that it names is there."""

import json
import os
import re
import subprocess
import sys

import pytest
from helpers.cases import each
from helpers.kernel_host import ROOT, SOURCE
from mutants.__main__ import judge, main
from mutants.edits import MUTANTS


def test_every_mutant_has_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_no_edit_is_stale():
    sources = {path.name: path.read_text() for path in SOURCE.parent.glob("*.cu*")}
    found = {mutant.name: sources[mutant.file].count(mutant.old) for mutant in MUTANTS}
    assert {name: count for name, count in found.items() if count != 1} == {}
    assert [mutant.name for mutant in MUTANTS if mutant.old == mutant.new] == []


def test_every_source_has_mutants():
    assert {mutant.file for mutant in MUTANTS} == {path.name for path in SOURCE.parent.glob("*.cu*")}


def test_the_tests_that_mutants_name_are_there():
    for test in {test for mutant in MUTANTS for test in mutant.tests}:
        file, name = test.partition("[")[0].split("::")
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), test
    assert all(mutant.tests for mutant in MUTANTS)


@each(
    ("code", "output", "outcome", "by"),
    [
        (1, "F\nFAILED tests/ptx/test_x.py::test_x[a] - AssertionError", "caught", "ptx/test_x.py::test_x[a]"),
        (0, "2 passed in 1.0s", "SURVIVED", "test_x"),
        (0, "2 skipped in 1.0s", "broken", "pytest ended with 0"),  # as without a compiler
        (1, "E\nERROR tests/kernels/test_cu_x.py::test_x - error: expected", "broken", "pytest ended with 1"),
        (4, "ERROR: not found: test_x", "broken", "pytest ended with 4"),
        (-11, "Fatal Python error: Segmentation fault", "broken", "pytest ended with -11"),
    ],
)
def test_only_a_test_that_fails_catches_a_mutant(code, output, outcome, by):
    assert judge(code, output, ("test_x",))[:2] == (outcome, by)


def test_a_name_that_no_mutant_has_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mutants", "no such name"])
    with pytest.raises(SystemExit, match="expected parts of names, got 'no such name'"):
        main()


@pytest.mark.slow
@pytest.mark.usefixtures("build")
def test_the_command_says_how_a_mutant_was_caught(tmp_path):
    command = [sys.executable, "-m", "mutants", "middle-of-two-words", "--json", str(tmp_path / "found.json")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["caught"], found["mutants"], found["unchanged_passes"]) == (1, 1, True)
    assert found["results"][0]["by"] == "kernels/test_cu_ghash.py::test_single_bits_are_multiplied[holes]"
