"""Progress of loads: a function of the caller, a line on a terminal, and nothing where there is none."""

import contextlib
import io
import sys

import numpy as np
import pytest
import torch
from helpers.cases import each

from fastrack import AuthenticationError, Key, load_model, load_tensors, mount_folder, save_file, seal_folder
from fastrack._models import mapped_pages, progress

KEY = Key.from_bytes(bytes(range(32)))
TENSORS = {f"t{number}": np.full((1 << 8, 1 << 8), number, np.float32) for number in range(6)}  # of 256 KiB each
SIZE = sum(tensor.nbytes for tensor in TENSORS.values())


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Gone(Terminal):
    def write(self, _):
        raise OSError("no such terminal")


@pytest.fixture
def sealed(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/model.gguf").write_bytes(bytes(SIZE))
    save_file(TENSORS, tmp_path / "model.safetensors", KEY)
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    return tmp_path


@pytest.fixture
def at_once(monkeypatch):
    """Let the line appear at once, and show each tensor."""
    monkeypatch.setattr(progress, "_DELAY", 0)
    monkeypatch.setattr(progress, "_INTERVAL", 0)
    for name in ("_WHOLE", "_LEAST", "_MOST"):
        monkeypatch.setattr(mapped_pages, name, 1 << 18)


pytestmark = pytest.mark.usefixtures("at_once")


def shown_by(load, *given, stream=None, **options):
    """Return what a load shows on a terminal, or on another stream."""
    with contextlib.redirect_stderr(stream or Terminal()) as stderr:
        load(*given, **options)
    return stderr.getvalue()


def by_tensors(folder, **options):
    return load_tensors(folder / "model.safetensors", keys=KEY, framework="np", **options)


def by_model(folder, **options):
    model = torch.nn.ParameterDict({name: torch.empty(tensor.shape) for name, tensor in TENSORS.items()})
    load_model(model, folder / "model.safetensors", KEY, **options)


def by_memfd(folder, **options):
    with mount_folder(folder / "sealed", KEY, memfd=["*.gguf"], **options):
        pass


WAYS = [by_tensors, by_model, by_memfd]


@each("load", WAYS)
def test_a_function_is_called_with_all_bytes(sealed, load):
    counts = []
    assert shown_by(load, sealed, progress=counts.append) == ""
    assert sum(counts) == SIZE
    if load is not by_memfd:
        assert len(counts) == len(TENSORS)


@each("load", WAYS)
def test_a_terminal_shows_a_line_that_is_gone_at_the_end(sealed, load):
    said = shown_by(load, sealed)
    shown = said.split("\r")
    assert "fastrack: 100 % of 1.5 MiB opened" in shown[-3]
    assert shown[-2:] == [" " * 60, ""]
    assert {len(line) for line in shown[1:-1]} == {60}
    assert "\x1b" not in said


@each("silent", ["off", "variable", "rank", "file", "soon"])
@each("load", WAYS)
def test_nothing_is_shown(sealed, monkeypatch, load, silent):
    if silent == "variable":
        monkeypatch.setenv("FASTRACK_PROGRESS", "0")
    elif silent == "rank":
        monkeypatch.setenv("LOCAL_RANK", "1")
    elif silent == "soon":
        monkeypatch.setattr(progress, "_DELAY", 60)
    stream = io.StringIO() if silent == "file" else None
    assert shown_by(load, sealed, stream=stream, **({"progress": False} if silent == "off" else {})) == ""


@each("load", WAYS)
def test_a_load_goes_on_without_a_terminal_and_where_it_has_gone(sealed, monkeypatch, load):
    assert shown_by(load, sealed, stream=Gone()) == ""
    closed = Terminal()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        load(sealed)


def test_the_line_is_gone_when_a_load_fails(sealed):
    path = sealed / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    stream = Terminal()
    with pytest.raises(AuthenticationError):
        shown_by(by_tensors, sealed, stream=stream)
    assert stream.getvalue().endswith("\r")
    assert "100 %" not in stream.getvalue()
