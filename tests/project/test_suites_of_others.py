"""The program that runs test suites of others: what it takes for documented, and how it goes on after a stop."""

import re
from pathlib import Path

import pytest
from peers import __main__ as peers

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
SUITE = """
import os
from pathlib import Path

import pytest

RUNS = Path(__file__).parent / "runs"
with RUNS.open("a") as file:
    file.write("x")


def test_passes(): ...


def test_fails():
    assert [] == [1]


def test_raises():
    {}["name"]


def test_ends_the_process():
    os.kill(os.getpid(), 9)


@pytest.mark.skip
def test_skipped(): ...


def test_goes_on(): ...
"""


def test_what_is_documented_stands_on_its_page():
    for row in peers.DOCUMENTED:
        assert set(row["suites"]) <= set(peers.SUITES)
        assert set(row["found"]) == {"raised", "page", "says"}
        text = (ROOT / row["found"]["page"]).read_text(encoding="utf-8")
        assert " ".join(row["found"]["says"].split()) in " ".join(text.split())


def test_each_suite_has_its_files_and_its_row_on_the_page():
    page = (ROOT / "docs/dev/testing.md").read_text(encoding="utf-8")
    for name, suite in peers.SUITES.items():
        assert f"`{name}`" in page
        assert suite.get("sdist", "safetensors") in peers.VERSIONS
        assert "stand_in" not in suite or (peers.HERE / f"stand_ins/{suite['stand_in']}.py").is_file()
        assert "own" not in suite or all((peers.HERE / "own" / path).is_file() for path in suite["tests"])


def test_the_archives_have_the_versions_that_the_suites_run_with():
    locked = "".join((ROOT / path).read_text() for path in ("requirements.txt", "tests/peers/packages.txt"))
    found = dict(re.findall(r"^([\w-]+)==(\S+) ", locked, re.MULTILINE))
    assert {name: found.get(name, version) for name, version in peers.VERSIONS.items()} == peers.VERSIONS
    assert set(peers.VERSIONS) - set(found) == {"mosaicml-streaming"}  # which is not installed


def test_a_failure_is_documented_or_as_plain_by_its_error_too(monkeypatch):
    row = {"suites": ["one"], "tests": ["test_a*"], "found": {"raised": "KeyError: *"}}
    monkeypatch.setattr(peers, "DOCUMENTED", [row])

    def kind(name="one", test="f.py::test_ab", raised="KeyError", plain=None):
        plain = {"outcome": "failed", "raised": plain} if plain else {"outcome": "passed"}
        end = {"outcome": "failed", "raised": raised, "message": f"{raised}: 'name'"}
        return peers.kind_of(name, test, end, plain)

    assert kind() == "documented"
    assert kind(name="two") == kind(test="f.py::test_b") == kind(raised="IndexError") == "neither"
    assert kind(name="two", plain="KeyError") == "as plain"
    assert kind(name="two", plain="IndexError") == "neither"
    assert peers.kind_of("one", "f.py::test_ab", {"outcome": "passed"}, {"outcome": "failed"}) == "passed"


def test_a_run_goes_on_behind_a_test_that_ended_the_process_and_is_not_repeated(tmp_path, monkeypatch, capsys):
    (tmp_path / "suite.py").write_text(SUITE)
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "unpack", lambda name, work: tmp_path)
    suite = {"name": "suite", "sdist": "suite", "tests": ["suite.py"]}
    for _ in range(2):
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        ends = peers.run(suite, "plain", work)
        assert {test.rpartition("_")[2]: (end["outcome"], end.get("raised")) for test, end in ends.items()} == {
            "passes": ("passed", None),
            "fails": ("failed", "AssertionError"),
            "raises": ("failed", "KeyError"),
            "process": ("failed", "Died"),
            "skipped": ("skipped", None),
            "on": ("passed", None),
        }
    assert (tmp_path / "runs").read_text() == "xx"  # once more after the fourth test, and no more
    assert "6 tests ended in an earlier run" in capsys.readouterr().out
    suite["tests"] = ["absent.py"]
    with pytest.raises(peers.SuiteError, match="got status 4"):
        peers.run(suite, "plain", work)
