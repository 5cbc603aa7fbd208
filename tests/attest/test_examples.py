"""The examples of what is public run as they are written."""

from __future__ import annotations

import doctest
import inspect

import pytest

from fastrack import attest

NAMES = [
    name
    for name in attest.__all__
    if callable(value := getattr(attest, name)) and not (inspect.isclass(value) and issubclass(value, Exception))
]


@pytest.mark.parametrize("name", NAMES)
def test_public_names_have_examples_that_run(name):
    found = doctest.DocTestFinder().find(getattr(attest, name), name, module=False, globs={})
    assert sum(len(test.examples) for test in found), f"{name} has no example"
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


@pytest.mark.parametrize("name", NAMES)
def test_public_names_know_where_they_are_public(name):
    assert getattr(attest, name).__module__ == "fastrack.attest"
