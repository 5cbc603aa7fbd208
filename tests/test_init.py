import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from helpers.cases import each

import fastrack
import fastrack.attest


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_importing_fastrack_loads_nothing_heavy():
    loaded = set(run("import fastrack, sys; print(*sys.modules)"))
    heavy = {"numpy", "numba", "torch", "cupy", "cryptography", "safetensors", "rich", "typer", "pynvml"}
    assert not loaded & heavy


def test_listing_the_names_loads_nothing_either():
    assert run("import fastrack, sys; dir(fastrack); print('numpy' in sys.modules)") == ["False"]


def test_the_version_is_a_public_name():
    assert fastrack.__version__ == fastrack._version.__version__


@each("name", fastrack.__all__)
def test_every_public_name_is_there(name):
    assert getattr(fastrack, name) is not None
    assert name in dir(fastrack)


@each(("name", "home"), sorted(fastrack._HOMES.items()))
def test_every_lazy_name_is_public_and_comes_from_its_module(name, home):
    assert name in fastrack.__all__
    assert getattr(fastrack, name) is getattr(import_module(home), name)


def test_public_names_are_in_order():
    assert fastrack.__all__ == sorted(set(fastrack.__all__))


def test_a_name_is_loaded_once():
    assert fastrack.Key is fastrack.Key
    assert "Key" in vars(fastrack)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fastrack.nonsense


@pytest.mark.parametrize("package", [fastrack, fastrack.attest])
def test_type_checkers_are_told_the_same_names_from_the_same_modules(package):
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    told = {each.asname: each.name for node in stub.body for each in node.names}
    homes = {each.name: node.module for node in stub.body for each in node.names}
    assert sorted(told) == sorted(told.values()) == package.__all__
    assert {name: home for name, home in homes.items() if name != "AttestationError"} == {
        name: home for name, home in package._HOMES.items() if name != "AttestationError"
    }
