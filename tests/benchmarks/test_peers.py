"""The comparison with other packages: every part of it, with those peers that the tests' own environment has."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.peers import __main__ as command
from bench.peers import child, children, report, rounds
from bench.peers.catalog import PEERS
from bench.peers.children import DeadError
from bench.peers.rounds import Result

HERE = ["fastrack", "fastrack-unsynced", "fastrack-out", "cobblestone", "fernet", "numpy"]
TORCH = ["safetensors", "safetensors-copied", "safetensors-mapped"]
MACHINE = {"software": {"python": "3", "torch": "2"}, "system": "Linux", "memory": {"total": 1 << 30}}
MACHINE |= {"cpu": {"model": "a CPU", "threads": 2}}


@pytest.fixture
def arrays():
    return child.make_arrays(1, 0)


def results():
    found = [Result.of(slug) for slug in ("fastrack", "tink", "age")]
    for each, seconds in zip(found, (0.5, 1.0), strict=False):
        each.version, each.bytes, each.flip, each.cut = "1", child.MIB + 100, "refused", "refused"
        each.seal, each.synced, each.open = [seconds, 9, seconds / 2], [seconds] * 3, [seconds / 2] * 3
    found[2].error = "start: ModuleNotFoundError: No module named 'pyrage'"
    return found


def reported(found=None):
    return report.Report(found or results(), size=1, rounds=3, machine=MACHINE)


REPLIES = {
    "start": {"version": "1"},
    "seal": {"seconds": 1.0, "synced": 2.0, "bytes": 7, "owned": 3},
    "open": {"seconds": 0.5, "owned": 4},
    "verify": {"same": True},
    "forget": {},
    "warm": {},
    "trim": {},
    "flip": {"outcome": "refused", "by": "InvalidTag"},
    "cut": {"outcome": "not noticed"},
}


class Alive:
    """A child without a process."""

    def __init__(self, slug, *_):
        self.slug = slug

    def ask(self, command):
        TURNS.append((self.slug, command))
        if (self.slug, command) in FAULTS:
            raise DeadError("the process ended with -9")
        return FAULTS.get(command, REPLIES[command])

    ask_watched = ask

    def end(self):
        TURNS.append((self.slug, "end"))


TURNS: list = []
FAULTS: dict = {}


@pytest.fixture
def measured():
    """Measure peers without processes: the sizes do not matter."""
    TURNS.clear()
    FAULTS.clear()
    return lambda slugs, number, say=said_nothing: rounds.measure(slugs, 1, number, "", say=say, child=Alive)


def started(slug, folder):
    worker = child.Worker(slug, 1, folder, 0)
    worker.do_start()
    return worker


def test_a_peer_gives_back_what_it_was_given(arrays, tmp_path):
    pytest.importorskip("torch")
    for slug in (*HERE, *TORCH):
        peer = PEERS[slug]()
        peer.seal(arrays, tmp_path / slug)
        found = peer.open(tmp_path / slug)
        assert child.same(found, arrays), slug
        assert all(np.asarray(found[name]).shape == array.shape for name, array in arrays.items()), slug


def test_what_is_told_of_a_changed_file_was_tried(tmp_path):
    pytest.importorskip("torch")
    slugs = ["cobblestone", "fastrack", "fernet", "safetensors"]
    for slug in slugs:
        worker = started(slug, tmp_path)
        worker.do_seal()
        assert worker.do_flip()["outcome"] == ("other data came out" if slug == "safetensors" else "refused")
        assert worker.do_cut()["outcome"] == "refused"
    assert sorted(each.name for each in tmp_path.iterdir()) == slugs


@pytest.mark.slow
def test_a_child_measures_a_peer(tmp_path):
    found = rounds.measure(["cobblestone", "numpy"], 1, 2, tmp_path, say=said_nothing)
    for each in found:
        assert each.is_whole
        assert len(each.seal) == len(each.synced) == len(each.open) == 2
        assert all(synced >= seal > 0 for seal, synced in zip(each.seal, each.synced, strict=True))
        assert each.bytes > child.MIB
        assert each.version
    assert [each.flip for each in found] == ["refused", "other data came out"]
    assert "InvalidTag" in found[0].notes["flip"]


def said_nothing(_):
    pass


def test_a_child_that_dies_is_told(tmp_path):
    worker = children.Child("numpy", 1, tmp_path, 0)
    worker._process.kill()
    with pytest.raises(DeadError, match="the process ended with -9"):
        worker.ask("start")
    worker.end()


def test_peers_take_turns(measured):
    slugs = ["tink", "age", "numpy", "fernet"]
    measured(slugs, 5)
    seals, opens = ([slug for slug, what in TURNS if what == asked][8:] for asked in ("seal", "open"))
    orders = [tuple(seals[at : at + 4]) for at in range(0, 20, 4)]
    assert seals == opens
    assert all(sorted(order) == sorted(slugs) for order in orders)
    assert len({order[order.index("tink") - 1] for order in orders}) > 1
    assert TURNS[-4:] == [(slug, "end") for slug in slugs]
    TURNS.clear()
    measured(slugs, 5)
    assert [slug for slug, what in TURNS if what == "seal"][8:] == seals


def test_the_others_go_on_after_one_has_died(measured):
    FAULTS["tink", "open"] = True
    said = []
    tink, age = measured(["tink", "age"], 2, said.append)
    assert tink.error == "the process ended with -9"
    assert not tink.is_whole
    assert age.open == [0.5, 0.5]
    assert (age.flip, age.cut, age.notes) == ("refused", "not noticed", {"flip": "InvalidTag"})
    assert "  Tink streaming AEAD: the process ended with -9" in said


def test_figures_are_medians_beside_fastracks():
    fastrack, tink, _ = reported().figures()
    assert fastrack[0] == "fastrack"
    assert tink[1:6] == ("1.000", "1.000", "0.500", "0.00", "0.00")
    assert tink[8:] == ("100", "0.010", "2.00", "2.00", "2.00")
    assert fastrack[-3:] == ("1.00", "1.00", "1.00")


@pytest.mark.slow
def test_the_command_writes_what_it_prints(tmp_path, capsys):
    arguments = ["--only", "numpy", "--size", "1", "--rounds", "1", "--folder", str(tmp_path)]
    arguments += ["--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md")]
    assert command.main(arguments) == 0
    assert "np.load" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["peers"][0]["error"] == ""
    assert (tmp_path / "a.md").read_text().count("np.load") >= 3
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.json", "a.md"]


def test_wrong_options_are_refused(capsys):
    for arguments in (["--size", "0"], ["--rounds", "0"], ["--only", "nobody"]):
        with pytest.raises(SystemExit) as caught:
            command.main(arguments)
        assert caught.value.code == 2
        assert arguments[0] in capsys.readouterr().err
