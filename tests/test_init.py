import subprocess
import sys
from importlib import import_module

import pytest
from helpers.cases import each

import fastrack


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
