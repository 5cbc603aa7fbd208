from __future__ import annotations

import sys

import pytest

from fastrack.cli.bench import draw_rows, show_figures
from fastrack.cli.console import stdout
from fastrack.errors import FastrackError
from fastrack.figures import Figure
from fastrack.measure import Row

QUICK = "bench --size 0.0625 --repeat 1"


def test_the_paths_are_measured_side_by_side(cli):
    said = cli(f"{QUICK} --size 0.125").stdout
    assert "64 KiB" in said
    assert "128 KiB" in said
    for path in ("plain copy", "bounce", "parallel bounce", "direct"):
        assert said.count(f"  {path}  ") == 2


@pytest.mark.parametrize("bits", [128, 256])
def test_figures_are_given_to_a_program(cli, bits):
    document = cli.json(f"{QUICK} --bits {bits}")
    assert document["bits"] == bits
    assert document["machine"]["cpu"]["threads"] >= 1
    rows = {row["path"]: row for row in document["rows"]}
    assert rows["bounce"]["over_bounce"] == 1
    assert rows["plain copy"]["over_bounce"] is None
    assert rows["direct"]["size"] == 65536
    assert rows["direct"]["gbps"] == pytest.approx(65536 / rows["direct"]["seconds"] / 1e9)


def test_figures_are_drawn(cli, folder):
    assert "Picture: chart.png" in cli(f"{QUICK} --picture chart.png").stdout
    assert (folder / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_without_matplotlib_says_what_to_install(cli, monkeypatch):
    monkeypatch.setattr("fastrack.cli.bench.find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    assert cli.error(f"{QUICK} --picture chart.png") == (
        "error: matplotlib is not installed: pip install 'fastrack[demo]'\n"
    )


def test_a_chart_of_an_unknown_kind_is_refused(folder):
    with pytest.raises(FastrackError, match=r"chart\.xyz.*not supported"):
        draw_rows([Row(1, "direct", 1.0, 1.0, None, None)], folder / "chart.xyz")


def test_a_chart_needs_a_directory_that_is_there(cli):
    assert "nowhere: no such directory" in cli.error(f"{QUICK} --picture nowhere/chart.png")


@pytest.mark.slow
def test_without_a_size_the_promised_figures_come_too(cli, monkeypatch):
    monkeypatch.setattr("fastrack.cli.bench.SIZES", (0.0625,))
    assert "promised" not in cli.json(QUICK)
    figures = cli.json("bench --repeat 1")["promised"]
    assert len({figure["name"] for figure in figures}) == 11
    for figure in figures:
        value, reach = figure["value"], figure["reach"]
        assert figure["is_met"] == (value <= reach if figure["at_most"] else value >= reach)


def test_a_missed_figure_is_called_so(capsys):
    show_figures([Figure("speed", 1.0, "x", 2.0), Figure("time", 1.0, "ms", 2.0, at_most=True)], stdout())
    speed, time = capsys.readouterr().out.splitlines()[-2:]
    assert "MISSED" in speed
    assert "MISSED" not in time
