"""The examples in the docstrings of `fastrack.distributed` run as they stand."""

import doctest

import pytest

import fastrack.distributed


@pytest.mark.parametrize("name", ["SecureGroup", "init_process_group"])
@pytest.mark.filterwarnings("ignore")
def test_the_examples_run(name):
    item = getattr(fastrack.distributed, name)
    examples = doctest.DocTestFinder(recurse=False).find(item, name, module=False, globs={})
    assert examples
    for each in examples:
        assert each.examples
        assert doctest.DocTestRunner().run(each).failed == 0
