"""The public names of the package, where they are from, and the examples in their docstrings."""

import ast
import doctest
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from helpers.cases import each

import fastrack
from fastrack import attest, distributed, providers, tour

PACKAGES = [fastrack, attest, distributed, providers, tour]
PROVIDERS = ["pkcs11", "tpm", "vault", "aws", "gcp", "azure"]
NAMES = [(package, name) for package in PACKAGES for name in package.__all__]
LAZY = [fastrack, attest, tour]


def listed_by(package):
    """Return the modules, names and new names that the stub of a package imports."""
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    return [(node.module, one.name, one.asname) for node in stub.body for one in node.names]


HOMES = [(package, name, home) for package in LAZY for home, name, _ in listed_by(package) if home != package.__name__]


def is_described(package, name):
    """Return whether a name has a docstring of its own: it is a function or a class, and no error."""
    value = getattr(package, name)
    return inspect.isroutine(value) or (inspect.isclass(value) and not issubclass(value, Exception))


def loaded_by(code):
    code = f"{code}; import sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_fastrack_loads_nothing_heavy():
    heavy = {"numpy", "numba", "torch", "cupy", "cryptography", "safetensors", "rich", "typer", "pynvml"}
    assert not loaded_by("import fastrack") & heavy
    assert "numpy" not in loaded_by("import fastrack; dir(fastrack)")
    assert "numpy" not in loaded_by("import fastrack; fastrack.Key.generate()")
    assert not loaded_by("import fastrack.attest") & {"cryptography", "numpy", "socket", "ssl", "urllib.request"}


def test_the_version_is_a_public_name():
    assert fastrack.__version__ == fastrack._version.__version__


@each(("package", "name"), NAMES)
def test_every_public_name_is_there(package, name):
    assert getattr(package, name) is not None
    assert name in dir(package)
    assert package.__all__.count(name) == 1


@each(("package", "name", "home"), HOMES)
def test_every_lazy_name_is_public_and_comes_from_its_module(package, name, home):
    assert name in package.__all__
    assert getattr(package, name) is getattr(import_module(home), name)


@each(("package", "name"), [case for case in NAMES if case[1] not in {"KeyLike", "KeySource", "__version__"}])
def test_what_is_public_is_of_the_public_module(package, name):
    if package is not attest or is_described(package, name):  # the roots of attest are bytes
        assert getattr(package, name).__module__ == package.__name__


@pytest.mark.filterwarnings("ignore")  # of torch, about a single process
@each(("package", "name"), [case for case in NAMES if is_described(*case) and case[0] is not providers])
def test_public_names_have_examples_that_run(package, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"fastrack": fastrack, "np": np} if package is fastrack else {}
    # Without a module, as methods are defined in another than the public one.
    assert run_examples(getattr(package, name), name, module=False, globs=given), f"{name} has no example"


@pytest.mark.filterwarnings("ignore::UserWarning")
@each("name", ["distributed", "providers", *(f"providers._{name}" for name in PROVIDERS)])
@pytest.mark.slow
def test_the_examples_of_a_package_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(import_module(f"fastrack.{name}"), name)


def run_examples(item, name, **options):
    """Run the examples in all docstrings of a name, and return their number."""
    found = doctest.DocTestFinder().find(item, name, **options)
    runner, said = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), []
    for test in found:
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)
    return sum(len(test.examples) for test in found)


def test_public_names_are_in_order():
    assert fastrack.__all__ == sorted(fastrack.__all__)


def test_a_name_is_loaded_once():
    assert fastrack.Key is fastrack.Key
    assert "Key" in vars(fastrack)


@each("package", [fastrack, attest])
def test_a_name_that_is_not_there_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = package.nonsense


@each("package", LAZY)
def test_type_checkers_are_told_the_same_names(package):
    told = [(name, new) for home, name, new in listed_by(package) if home != package.__name__]
    assert sorted(told) == [(name, name) for name in package.__all__]


def test_modules_with_requirements_are_imported_by_their_names_but_not_listed():
    modules = {name for home, name, _ in listed_by(fastrack) if home == "fastrack"}
    assert {"attest", "ray", "vllm"} < modules
    assert modules & {*fastrack.__all__} == set()
    code = "import fastrack; assert not {*dir(fastrack)} & {'attest', 'tour'}; fastrack.attest, fastrack.tour"
    assert {"fastrack.attest", "fastrack.tour"} < loaded_by(code)
