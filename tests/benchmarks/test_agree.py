"""Two documents about the same steps are compared by their ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("bench.agree", reason="the tests run without the benchmarks")

from bench.agree import Ratio, Timing, main

TIMES = {"bounce": 10.0, "+ direct": 5.0, "plain copy": 1.0}


@pytest.fixture
def documents(tmp_path):
    """Writes both, with the same times but for what is given, and quartiles so far around them."""

    def write(*, spread=0.01, **changed):
        ours = [
            {
                "direction": "to_host",
                "size": 1 << 20,
                "step": step,
                "seconds": seconds,
                "quartiles": [seconds * (1 - spread), seconds * (1 + spread)],
            }
            for step, seconds in TIMES.items()
        ]
        theirs = []
        for step, seconds in {**TIMES, **changed}.items():
            median = 3 * seconds  # another hour, the same ratios
            stats = {"median": median, "q1": median * (1 - spread), "q3": median * (1 + spread)}
            info = {"direction": "to_host", "size": 1 << 20, "step": step, "GB/s": 1}
            theirs.append({"extra_info": info, "stats": stats})
        theirs.append({"extra_info": {}, "stats": {}})  # of another suite
        paths = tmp_path / "ours.json", tmp_path / "theirs.json"
        for path, document in zip(
            paths, ({"ablation": ours, "settings": {"device": "cpu", "bits": 256}}, {"benchmarks": theirs}), strict=True
        ):
            path.write_text(json.dumps(document))
        return [str(paths[0]), "--suite", str(paths[1])]

    return write


def test_the_same_ratios_agree_whatever_the_times(documents, capsys):
    assert main(documents()) == 0
    said = capsys.readouterr().out
    assert "+ direct                       2.000  2.000    0.200  0.200  agree" in said
    assert "2 of 2 agree" in said


def test_another_ratio_differs(documents, capsys):
    assert main(documents(**{"+ direct": 7.0})) == 1
    said = capsys.readouterr().out
    assert "2.000  1.429    0.200  0.143  DIFFER" in said
    assert "1 of 2 agree" in said


def test_another_ratio_within_the_tolerance_agrees(documents):
    paths = documents(**{"+ direct": 7.0})
    assert main([*paths, "--tolerance", "0.5"]) == 0


def test_another_ratio_within_the_quartiles_agrees(documents):
    assert main(documents(spread=0.15, **{"+ direct": 7.0})) == 0


def test_a_ratio_has_a_range():
    first = {"a": Timing(2.0, 1.0, 4.0), "b": Timing(8.0, 6.0, 9.0)}
    ratio = Ratio.of([first], "a", "b")
    assert (ratio.value, ratio.low, ratio.high) == (4.0, 1.5, 9.0)
    other = {"a": Timing(1.0, 1.0, 1.0), "b": Timing(20.0, 20.0, 20.0)}
    ratio = Ratio.of([first, other], "a", "b")
    assert (ratio.value, ratio.low, ratio.high) == (12.0, 1.5, 20.0)


def test_runs_of_a_machine_that_has_phases_agree_if_both_have_seen_them(documents, tmp_path):
    ours, _, slow = documents(**{"+ direct": 7.0})
    (tmp_path / "slow.json").write_text(Path(slow).read_text())
    ours, _, quick = documents()
    assert main([ours, "--suite", str(tmp_path / "slow.json")]) == 1
    assert main([ours, "--suite", str(tmp_path / "slow.json"), quick]) == 0


def test_documents_without_a_step_in_common_are_told(documents, capsys):
    paths = documents()
    Path(paths[-1]).write_text('{"benchmarks": []}')
    assert main(paths) == 2
    assert "no step in common" in capsys.readouterr().out
