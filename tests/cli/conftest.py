"""Scripts of commands: each runs in a folder of its own, and says what status it expects."""

import json
import re
import shlex

import numpy as np
import pytest
from helpers.commands import invoke

from fastrack._cli.errors import KINDS

ERRORS = {1, *(status for status, _ in KINDS.values())}


class Script:
    """Runs command lines. Whatever they print, it is no traceback and no key.

    The status 1 stands for any error but bad usage: `test_exit_status` has the status of each kind.
    """

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, line, *, status=0):
        result = invoke(shlex.split(line))
        assert status == "any" or result.exit_code in (ERRORS if status == 1 else {status}), result.output
        assert not [secret for secret in self.secrets() if secret in result.output]
        return result

    def json(self, line, *, status=0):
        result = self(f"{line} --json", status=status)
        assert result.stderr == ""
        document = json.loads(result.stdout)
        if "error" in document and result.exit_code in ERRORS:
            assert result.exit_code == KINDS.get(document["error"]["kind"], (1,))[0]
        return document

    def error(self, line, *, status=1):
        result = self(line, status=status)
        assert result.stdout == ""
        return result.stderr

    def secrets(self):
        texts = [path.read_bytes() for path in self.folder.iterdir() if path.is_file()]
        return [found.decode() for text in texts for found in re.findall(rb"fastrack-key-1:([0-9a-f]+)", text)]

    def names(self):
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture(autouse=True)
def _short_timings(limited):
    """Have `doctor` time the engine once in place of 0.2 seconds long."""
    limited(engine_timing=1e-3)


@pytest.fixture(autouse=True)
def _no_width(monkeypatch):
    """Have an output that is no terminal, and so as wide as its text. A test of widths sets one."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def gpu_test(monkeypatch):
    """Return a function that has the self-test of a GPU find what a `CudaCheck` says."""

    def find(check):
        for name in ("doctor", "warmup"):
            monkeypatch.setattr(f"fastrack._cli.commands.{name}.check_cuda", lambda: check)

    return find


@pytest.fixture
def quiet(monkeypatch):
    """Have ``attest collect`` say nothing, which writes on the streams of another command when it runs in a thread."""
    monkeypatch.setattr("fastrack._cli.attest.exchange.note", lambda _: None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cli(folder):
    return Script(folder)


@pytest.fixture
def key(cli):
    cli("keygen owner.key")
    return "--key owner.key"


@pytest.fixture
def arrays():
    return {"x": np.arange(60_000, dtype=np.float32).reshape(-1, 6), "y": np.arange(7, dtype=np.int64)}


@pytest.fixture
def sealed(cli, key, arrays):
    """A sealed file of the two arrays."""
    np.savez("plain.npz", **arrays)
    cli(f"seal plain.npz sealed.safetensors {key}")
    return "sealed.safetensors"
