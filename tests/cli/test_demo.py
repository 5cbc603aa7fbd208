import importlib.util
import re
from pathlib import Path

import pytest
from helpers import measuring

from fastrack import Key, save_file
from fastrack._cli.commands import demo as demo_module
from fastrack._cli.measurements import narrow_console
from fastrack.errors import FastrackError

QUICK = "demo --size 0.0625 --repeat 1 --picture chart.png --directory work"


@pytest.fixture
def work(folder):
    (folder / "work").mkdir()
    return folder / "work"


@pytest.fixture
def little(monkeypatch):
    """Let the library be 2,000 rows, and a size be measured once, so that a tour takes a second or two."""
    library = demo_module._library()
    library["text"] = library["text"][:2000]
    monkeypatch.setattr(demo_module, "_library", lambda: library)
    measuring.shorten(monkeypatch)


def steps_of(said):
    """Return what the demo prints, by the number of the step, its first line included."""
    parts = re.split(r"^(?=[1-7]\. )", said, flags=re.MULTILINE)
    return {int(part[0]): part.strip().splitlines() for part in parts[1:]}


@pytest.mark.slow
@pytest.mark.usefixtures("little")
def test_the_demo_tells_its_story_and_leaves_a_picture(cli, folder, work):
    said = cli(QUICK).stdout
    assert list(steps_of(said)) == [1, 2, 3, 4, 5, 6, 7]
    assert re.search(r"^text   U8   \[2000, 64\] +125 KiB$", said, re.MULTILINE)
    for name in ("text", "files"):
        assert f"{name}: arrived as a " in said
    assert "bit for bit alike" in said or importlib.util.find_spec("torch") is None
    assert re.search(r"refused: forged.safetensors: tensor 'text', chunk 3: ", said)
    assert "text   FAILED at chunk 3\n" in said
    assert "files  ok\n" in said
    assert "+ overlap" in said
    assert "Picture: chart.png" in said
    assert (folder / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert list(work.iterdir()) == []
    assert cli.names() == ["chart.png", "work"]


def words(said):
    return {word for word in re.findall(r"\S+", said) if re.fullmatch(r"[\w'`-]+[.,:;]?", word)} - {
        word for word in said.split() if re.search(r"\d", word)
    }


@pytest.mark.slow
@pytest.mark.usefixtures("little", "work")
def test_the_demo_fits_in_a_narrow_terminal_and_breaks_no_word(cli, monkeypatch, limited):
    limited(demo_noticed=float("inf"))  # times are of the moment: the same sentence on both
    said = {}
    for columns in (200, 80, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        said[columns] = cli(QUICK).stdout
        assert [line for line in said[columns].splitlines() if len(line) > min(columns, 80)] == []
    assert words(said[200]) == words(said[80]) == words(said[40])
    for number, lines in steps_of(said[80]).items():
        more = 6 * (number == 7)  # the rows of another size
        assert len(lines) + more <= 24


@pytest.mark.nightly
@pytest.mark.usefixtures("little", "work")
def test_a_wide_demo_has_all_columns(cli):
    assert "p99" not in cli(QUICK).stdout
    assert re.search(r"p50 +p99 +max +CPU", cli(f"{QUICK} --wide").stdout)


def train_twice(folder, **changes):
    """The training of the demo, on some of the library, or on another text than the one that was sealed."""
    key, text = Key.generate(), demo_module._library()["text"][:20_480]
    save_file({"text": text}, folder / "text.safetensors", key)
    return demo_module._train_twice(folder / "text.safetensors", key, changes.get("text", text), narrow_console())


has_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="trains with torch")


@pytest.mark.slow
@has_torch
def test_training_on_sealed_data_is_training_on_plain_data(folder, capsys):
    losses = train_twice(folder)
    said = capsys.readouterr().out
    assert len(losses) == demo_module._POINTS
    assert losses[0] > losses[-1] + 1
    first, last = re.match(r"40 batches of 512 rows; loss (\S+) -> (\S+), bit for bit alike\n", said).groups()
    assert (float(first), float(last)) == (round(losses[0], 2), round(losses[-1], 2))
    assert re.search(r"\na batch: \d+\.\d ms from the sealed file, \d+\.\d ms from arrays in memory\n", said)


@pytest.mark.nightly
@has_torch
def test_training_that_differs_in_one_character_is_noticed(folder):
    text = demo_module._library()["text"][:20_480].copy()
    text[1000, 20] ^= 1
    with pytest.raises(FastrackError, match="other weights"):
        train_twice(folder, text=text)


@pytest.mark.parametrize(
    ("more", "told"),
    [(1.26, "These 1.3 ms are what sealing costs a batch"), (0.01, "nothing that is seen"), (-1, "no")],
)
def test_what_a_sealed_batch_costs_is_said(more, told):
    assert told in demo_module._explain(more)


@pytest.mark.slow
def test_training_is_left_out_without_torch(folder, capsys, hide):
    hide("torch")
    assert train_twice(folder) == []
    assert capsys.readouterr().out == "left out, as torch is not installed: pip install 'fastrack-io[torch]'\n"


def test_what_make_demo_installs_is_locked_with_hashes():
    root = Path(__file__).parents[2]
    locked = re.findall(r"^(\S+==\S+)", (root / "requirements.txt").read_text(), re.MULTILINE)
    installed = re.findall(r"^(\S+==\S+)", (root / ".ci/demo.txt").read_text(), re.MULTILINE)
    assert set(installed) <= set(locked)
    names = {line.partition("==")[0] for line in installed}
    assert {"cryptography", "matplotlib", "numba", "pip", "torch", "typer"} <= names
    assert not names & {"mypy", "pyarrow", "pytest", "scikit-learn", "scipy", "ziglang"}


def test_the_library_is_python_source():
    library = demo_module._library()
    text, starts = library["text"], library["files"]
    assert text.size > starts[-1] > 1_000_000
    compile(text.reshape(-1)[: starts[1]].tobytes(), "first", "exec")


@pytest.mark.slow
@pytest.mark.usefixtures("little")
def test_a_demo_that_fails_leaves_nothing(cli, work, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module, "_forge", fail)
    cli(QUICK, status=130)
    assert list(work.iterdir()) == []
    assert cli.names() == ["work"]


@pytest.mark.usefixtures("work")
def test_a_demo_without_its_package_says_what_to_install(cli, hide):
    hide("matplotlib")
    assert cli.error(QUICK) == "error: matplotlib is not installed: pip install 'fastrack-io[demo]'\n"


@pytest.mark.slow
def test_the_demo_needs_directories_that_are_there(cli):
    assert "work: no such directory" in cli.error(QUICK)
    assert "nowhere: no such directory" in cli.error("demo --picture nowhere/chart.png")
