"""The tables of the documentation are those of the committed results."""

import json

import pytest
from test_results import FILES

from bench.tables import ROOT, TABLES, collectives, markdown, write

pytestmark = pytest.mark.skipif(not FILES or not (ROOT / "docs").exists(), reason="needs results and documentation")


def test_the_tables_of_the_documentation_are_made_of_the_results():
    files = {path.name for path in (ROOT / "docs").glob("_*.md")} - {
        "_qualified.md",
        "_policy-keys.md",
    }  # written by hand
    assert files == {f"_{name}.md" for name in TABLES}
    assert [name for name in TABLES if write(name) != (ROOT / f"docs/_{name}.md").read_text(encoding="utf-8")] == []


def test_an_altered_table_or_result_is_noticed(monkeypatch, tmp_path):
    _, file = TABLES["soaked"]
    document = json.loads((ROOT / f"bench/results/{file}.json").read_text())
    document["faults"]["full disk"]["caught"] -= 1
    (tmp_path / "bench/results").mkdir(parents=True)
    (tmp_path / f"bench/results/{file}.json").write_text(json.dumps(document))
    monkeypatch.setattr("bench.tables.ROOT", tmp_path)
    assert write("soaked") != (ROOT / "docs/_soaked.md").read_text(encoding="utf-8")


def test_a_way_that_was_not_measured_leaves_its_place_empty():
    rows = [
        {"subject": "a model", "size": 1000, "ranks": 2, "way": way, "seconds": seconds, "over_gloo": seconds}
        for way, seconds in (("gloo", 1.0), ("sealed", 1.5))
    ]
    assert (
        markdown(collectives({"collectives": rows})).splitlines()[-1]
        == "| a model | 1000 B | 2 | 1000.0 |  |  | 1.50 |  |"
    )
