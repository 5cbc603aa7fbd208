"""The examples in the docstrings of public names run as they stand."""

import doctest

import pytest

import fastrack


@pytest.mark.parametrize("name", ["Channel", "synchronize", "to_device", "to_host"])
def test_the_examples_run(name):
    examples = doctest.DocTestFinder(recurse=False).find(getattr(fastrack, name), name, module=False, globs={})
    assert examples
    for each in examples:
        assert each.examples
        assert doctest.DocTestRunner().run(each).failed == 0
