"""One `safe_open` of safetensors for the process, which asks openers about each path."""

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from helpers.foreign import take_back

from fastrack._patches import safetensors as replaced


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / "plain.safetensors"
    safetensors.numpy.save_file({"x": np.arange(3)}, path)
    yield path
    take_back()


def test_an_opener_takes_its_paths_and_the_original_all_others(plain):
    asked = []

    def opener(path, framework, device="cpu", **_):
        asked.append((str(path), framework, device))
        return "opened" if path == "mine" else NotImplemented

    original = safetensors.safe_open
    replaced.add_handler("safe_open", opener)
    try:
        assert safetensors.numpy.safe_open("mine", framework="np") == "opened"
        assert safetensors.numpy.load_file(plain)["x"].tolist() == [0, 1, 2]
        assert asked == [("mine", "np", "cpu"), (str(plain), "np", "cpu")]
    finally:
        replaced.remove_handler("safe_open", opener)
    take_back()
    assert safetensors.safe_open is original
    assert safetensors.numpy.safe_open is original


def test_it_is_replaced_once_and_the_last_handler_is_asked_first_but_for_those_of_all_files(plain):
    handlers = [lambda *_, name=name: name for name in "abc"]
    replaced.add_handler("safe_open", handlers[0])
    first = safetensors.safe_open
    for handler in (*handlers[1:], *handlers):
        replaced.add_handler("safe_open", handler, last=handler is handlers[2])
    assert safetensors.safe_open is first
    for name, handler in zip("bac", (handlers[1], handlers[0], handlers[2]), strict=True):
        assert safetensors.safe_open(plain) == name
        replaced.remove_handler("safe_open", handler)
    assert safetensors.numpy.load_file(plain)["x"].tolist() == [0, 1, 2]
