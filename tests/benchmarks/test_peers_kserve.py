"""The comparison with KServe's confidential storage: its own side only where kserve-storage is installed."""

import json

import pytest

from bench.peers import kserve
from bench.peers.children import Child

FOUND = {
    "kserve": {"version": "0.21.0", "cpu": 3.0, "memory": 6.7, "stored": 1.333},
    "fastrack": {"version": "1", "cpu": 0.6, "memory": 1.01, "stored": 1.001},
}
ACCEPTED, REFUSED = (dict.fromkeys(kserve.FAULTS, outcome) for outcome in ("accepted", "refused: RollbackError"))
OUTCOMES = {"kserve": ACCEPTED, "fastrack": REFUSED}


def versions(folder):
    for version in range(2):
        (folder / f"plain-{version}").mkdir()
        for rank, name in enumerate(kserve.RANKS):
            kserve.write(folder / f"plain-{version}" / name, 10 * version + rank)
    return folder


def test_fastrack_refuses_a_model_that_is_another(tmp_path):
    assert kserve._try_fastrack(versions(tmp_path)) == REFUSED


def test_kserve_accepts_a_model_that_is_another(tmp_path):
    pytest.importorskip("kserve_storage")
    assert kserve._try_kserve(versions(tmp_path)) == ACCEPTED


@pytest.mark.slow
def test_kserve_is_measured_beside_fastrack(tmp_path, capsys):
    """Without the bounds: models of 1 MiB say nothing of time."""
    pytest.importorskip("kserve_storage")
    kserve.main(["--size", "1", "--rounds", "1", "--json", str(tmp_path / "a.json")])
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["outcomes"] == OUTCOMES
    assert document["peers"]["kserve"]["stored"] > 1.3
    assert document["peers"]["kserve"]["memory"] > document["peers"]["fastrack"]["memory"]
    assert "| accepted | accepted | accepted |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"cpu": 1.01}, False),
        ({"memory": 1.09}, False),
    ],
)
def test_more_than_a_third_of_the_time_or_more_memory_than_the_model_is_told(change, expected):
    rows = {**FOUND, "fastrack": {**FOUND["fastrack"], **change}}
    assert kserve.table(rows, OUTCOMES)[1] is expected


def test_a_model_that_fastrack_accepts_is_told():
    lines, is_kept = kserve.table(FOUND, {**OUTCOMES, "fastrack": ACCEPTED})
    assert not is_kept
    assert lines[3].startswith("| fastrack | 1 | 0.60 s | 1.01 | 1.001 | accepted")


def test_the_peers_take_turns(tmp_path):
    turns = []

    class Alive(Child):
        def __init__(self, slug, *_):
            self.slug = slug

        def ask(self, command):
            turns.append((self.slug, command))
            return {"version": "1", "bytes": 1 << 20, "cpu": 0.5, "owned": 2 << 20, "same": True}

        ask_watched = ask

        def end(self):
            turns.append((self.slug, "end"))

    found = kserve.measure(1, 3, tmp_path, child=Alive)
    assert found["fastrack"] == {"cpu": 0.5, "memory": 2.0, "version": "1", "stored": 1.0}
    opened = [slug for slug, command in turns if command == "open"]
    assert opened == [*kserve.PEERS, *kserve.PEERS * 3]
    assert turns[-2:] == [(slug, "end") for slug in kserve.PEERS]
