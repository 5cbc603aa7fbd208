"""The examples of what is public run as they are written."""

import doctest
import inspect
import re
from pathlib import Path

from helpers.cases import each

from fastrack import attest

NAMES = [
    name
    for name in attest.__all__
    if callable(value := getattr(attest, name)) and not (inspect.isclass(value) and issubclass(value, Exception))
]


@each("name", NAMES)
def test_public_names_have_examples_that_run(name):
    found = doctest.DocTestFinder().find(getattr(attest, name), name, module=False, globs={})
    assert sum(len(test.examples) for test in found), f"{name} has no example"
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


def test_the_api_page_has_the_public_names_and_no_others():
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. auto\w+:: fastrack\.attest\.(\w+)(?:\(\))?$", page, re.MULTILINE)
    assert sorted(named) == sorted(NAMES)


@each("name", NAMES)
def test_public_names_know_where_they_are_public(name):
    assert getattr(attest, name).__module__ == "fastrack.attest"
