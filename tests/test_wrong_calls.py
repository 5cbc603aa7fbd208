"""Try wrong calls, for what they change. The words of their answers are in the snapshot of messages."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import wrong_calls
from helpers.cases import each
from helpers.commands import invoke

import fastrack
from fastrack import Key, SealedDataset
from fastrack._crypto import engine

KEY = Key.from_bytes(bytes(range(32)))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    KEY.save("owner.key")
    for number in (1, 2):
        Path(f"more{number}.csv").write_text(f"age\n{number}\n")
    return tmp_path


def names(place):
    return sorted(path.name for path in place.iterdir())


@pytest.mark.usefixtures("place")
def test_import_matches_patterns_in_python_and_on_the_command_line():
    assert invoke(["import", "more*.csv", "made", "-k", "owner.key"]).exit_code == 0
    assert fastrack.import_samples("more*.csv", "also", KEY) == 2
    assert invoke(["import", "more[12].csv", "-o", "out", "-k", "owner.key"]).exit_code == 0
    for folder in ("made", "also", "out"):
        data = SealedDataset(folder, keys=KEY)
        assert [int(fastrack.unseal(row["age"], KEY, framework="numpy")) for row in data] == [1, 2]
    Path("more*.csv").write_text("age\n3\n")  # a file of this name is meant by it
    assert fastrack.import_samples("more*.csv", "one", KEY) == 1


def test_a_line_that_is_refused_makes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with wrong_calls.prepared():
        before = sorted(Path().rglob("*"))
        for line in (*wrong_calls.LINES, "keygen shared/out --identity"):
            assert wrong_calls.line(line) != (None, None), line
            assert sorted(Path().rglob("*")) == before, line


@each("line", ["keygen made", "keygen made --signer", "keygen made --json"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_a_key_that_could_not_be_told_is_not_left(place, monkeypatch, line, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    before = names(place)
    monkeypatch.setattr("fastrack._cli.commands.keygen.tell", fail)
    result = invoke(line.split())
    assert result.exit_code == 1
    assert "was removed again" in result.output + result.stderr
    assert names(place) == before


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_a_pipe_that_ends_is_told_as_other_programs_tell_it():
    fastrack.save_file({f"{name}": np.ones(1) for name in range(2000)}, "x.safetensors", KEY)
    line = f"{sys.executable} -m fastrack inspect x.safetensors | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("141", "")
    assert "\n  141  " in invoke(["help", "status"]).stdout


def test_no_result_requires_a_gradient():
    for given in (torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)):
        moved = fastrack.to_device(given)
        assert (type(moved), moved.requires_grad) == (torch.Tensor, False)


def test_objects_that_hold_no_array_pass_as_documented():
    graph = object()
    assert fastrack.to_device(["cat", None, graph, np.array(["text"], object)])[:3] == ["cat", None, graph]
    assert list(fastrack.wrap([{"name": "cat", "graph": graph}])) == [{"name": "cat", "graph": graph}]


@each("name", ["StreamingSealedDataset", "sealed_activations"])
def test_what_needs_torch_says_so(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "fastrack._training.streaming", raising=False)
    monkeypatch.delitem(vars(fastrack), name, raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"^{name} needs torch.*pip install 'fastrack-io\[torch\]'"):
        getattr(fastrack, name)().__enter__()


def test_a_checkout_in_the_place_of_the_installed_package_says_so(tmp_path, monkeypatch):
    installed, checkout = tmp_path / "site-packages", tmp_path / "checkout"
    for folder in (installed, checkout):
        (folder / "fastrack").mkdir(parents=True)
        (folder / "fastrack/__init__.py").touch()
    about = installed / "fastrack_io-0.2.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fastrack-io\nVersion: 0.2.0\n")
    monkeypatch.setattr(engine, "__file__", str(checkout / "fastrack/_crypto/engine.py"))
    assert engine._place() == ""
    (checkout / "pyproject.toml").touch()
    assert engine._place() == f"it is the checkout {checkout}; "
    monkeypatch.syspath_prepend(str(installed))
    assert engine._place() == f"it is the checkout {checkout} in place of {installed / 'fastrack'}: leave its folder; "
    monkeypatch.setattr(engine, "__file__", str(installed / "fastrack/_crypto/engine.py"))
    assert engine._place() == ""


def test_a_keyword_of_a_function_in_a_class_is_no_wrong_keyword_of_the_class():
    class Failing(fastrack.Vault):
        def __init__(self):
            super().__init__(nothing=1)

    with pytest.raises(TypeError, match=r"^Vault\(\) got .* expected Vault\(store=None, \*, require=None\)$"):
        Failing()
