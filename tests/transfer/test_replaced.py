"""One `safe_open` of safetensors for the process, which asks openers about each path."""

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from fastrack._transfer import replaced
from fastrack._util.replacing import restore


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / "plain.safetensors"
    safetensors.numpy.save_file({"x": np.arange(3)}, path)
    yield path
    restore()


def test_an_opener_takes_its_paths_and_the_original_all_others(plain):
    asked = []

    def opener(path, framework, device):
        asked.append((str(path), framework, device))
        return "opened" if path == "mine" else None

    original = safetensors.safe_open
    replaced.install()
    replaced.add_opener(opener)
    try:
        assert safetensors.numpy.safe_open("mine", framework="np") == "opened"
        assert safetensors.numpy.load_file(plain)["x"].tolist() == [0, 1, 2]
        assert asked == [("mine", "np", "cpu"), (str(plain), "np", "cpu")]
    finally:
        replaced.remove_opener(opener)
    restore()
    assert safetensors.safe_open is original
    assert safetensors.numpy.safe_open is original


def test_it_is_replaced_once_and_the_last_opener_is_asked_first(plain):
    replaced.install()
    first = safetensors.safe_open
    replaced.install()
    assert safetensors.safe_open is first
    openers = [lambda *_, name=name: name for name in "ab"]
    try:
        for opener in (*openers, *openers):
            replaced.add_opener(opener)
        assert safetensors.safe_open(plain) == "b"
    finally:
        for opener in openers:
            replaced.remove_opener(opener)
