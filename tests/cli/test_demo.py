import importlib.util
import re
import sys

import numpy as np
import pytest

from fastrack import Key, save_file
from fastrack._cli.commands import demo as demo_module
from fastrack._cli.console import stdout
from fastrack.errors import FastrackError

QUICK = "demo --size 0.0625 --repeat 1 --picture chart.png --directory work"


@pytest.fixture
def work(folder):
    (folder / "work").mkdir()
    return folder / "work"


@pytest.mark.slow
def test_the_demo_tells_its_story_and_leaves_a_picture(cli, folder, work):
    said = cli(QUICK).stdout
    steps = [line for line in said.splitlines() if line[:3] in {f"{number}. " for number in range(1, 8)}]
    assert [line[0] for line in steps] == list("1234567")
    assert "images   float32  [1797, 64]" in said
    for name in ("images", "labels", "source", "starts"):
        assert f"{name:<8} arrived on cpu" in said
    assert "equal bit for bit on both" in said or importlib.util.find_spec("torch") is None
    assert re.search(r"refused: .*tensor 'source', chunk ", said.replace("\n", " "))
    assert "1 of 4 sealed tensors FAILED" in said
    assert "+ overlap" in said
    assert f"Picture: {folder / 'chart.png'}" in said
    assert (folder / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert list(work.iterdir()) == []
    assert cli.names() == ["chart.png", "work"]


def train_twice(folder, **changes):
    """The training of the demo, on the digits, or on others than those that were sealed."""
    key, digits = Key.generate(), demo_module._digits()
    save_file(digits, folder / "digits.safetensors", key)
    return demo_module._train_twice(folder / "digits.safetensors", key, {**digits, **changes}, stdout())


has_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="trains with torch")


@pytest.mark.slow
@has_torch
def test_training_on_sealed_data_is_training_on_plain_data(folder, capsys):
    losses = train_twice(folder)
    said = capsys.readouterr().out
    assert len(losses) == demo_module._EPOCHS
    assert losses[0] > 20 * losses[-1]
    first, last = re.match(r"20 epochs, loss (\S+) -> (\S+), equal bit for bit on both$", said, re.MULTILINE).groups()
    assert (float(first), float(last)) == (round(losses[0], 2), round(losses[-1], 3))
    assert re.search(r"^an epoch took \d+ ms on the sealed file, \d+ ms on the arrays$", said, re.MULTILINE)


@pytest.mark.slow
@has_torch
def test_training_that_differs_in_one_pixel_is_noticed(folder):
    images = demo_module._digits()["images"]
    images[1000, 20] += 1
    with pytest.raises(FastrackError, match="other weights"):
        train_twice(folder, images=images)


def test_training_is_left_out_without_torch(folder, capsys, monkeypatch):
    monkeypatch.setattr(demo_module, "find_spec", lambda _: None)
    assert train_twice(folder) == []
    assert capsys.readouterr().out == "left out, as torch is not installed: pip install 'fastrack-io[torch]'\n"


def test_the_library_is_python_source():
    library = demo_module._library()
    starts = library["starts"]
    assert library["source"].size == starts[-1] > 1_000_000
    compile(library["source"][: starts[1]].tobytes(), "first", "exec")


@pytest.mark.slow
def test_a_demo_that_fails_leaves_nothing(cli, work, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    library = {"source": np.arange(50_000, dtype=np.uint8), "starts": np.zeros(1, np.int64)}
    monkeypatch.setattr(demo_module, "_library", lambda: library)  # of one page, so that it takes a moment
    monkeypatch.setattr(demo_module, "_forge", fail)
    cli(QUICK, status=130)
    assert list(work.iterdir()) == []
    assert cli.names() == ["work"]


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("package", ["sklearn", "matplotlib"])
def test_a_demo_without_its_packages_says_what_to_install(cli, monkeypatch, package):
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr("fastrack._bench.plots.find_spec", lambda name: None if name == package else True)
    assert cli.error(QUICK) == f"error: {package} is not installed: pip install 'fastrack-io[demo]'\n"


def test_the_demo_needs_directories_that_are_there(cli):
    assert "work: no such directory" in cli.error(QUICK)
    assert "nowhere: no such directory" in cli.error("demo --picture nowhere/chart.png")
