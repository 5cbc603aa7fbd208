"""The examples of what is public run as they are written."""

import doctest
import re
from pathlib import Path

import pytest
from helpers.cases import each

from fastrack import distributed


@pytest.mark.filterwarnings("ignore")  # of torch, about a single process
@each("name", distributed.__all__)
def test_public_names_have_examples_that_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestFinder().find(getattr(distributed, name), name, module=False, globs={})
    assert sum(len(test.examples) for test in found), f"{name} has no example"
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_example_of_the_package_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(distributed).failed == 0


def test_the_api_page_has_the_public_names_and_no_others():
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. auto\w+:: fastrack\.distributed\.(\w+)(?:\(\))?$", page, re.MULTILINE)
    assert sorted(named) == sorted(distributed.__all__)


@each("name", distributed.__all__)
def test_public_names_know_where_they_are_public(name):
    assert getattr(distributed, name).__module__ == "fastrack.distributed"
