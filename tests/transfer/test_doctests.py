"""The examples in the docstrings of public names run as they stand."""

import doctest

from helpers.cases import each

import fastrack


@each("name", ["Channel", "load_tensors", "safe_open", "synchronize", "to_device", "to_host"])
def test_the_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestFinder(recurse=False).find(getattr(fastrack, name), name, module=False, globs={})
    assert examples
    for example in examples:
        assert example.examples
        assert doctest.DocTestRunner().run(example).failed == 0
