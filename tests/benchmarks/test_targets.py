"""The path table has every path at every size, and its ratios are those of its times."""

import json

import pytest

pytest.importorskip("bench.targets", reason="the tests run without the benchmarks")

from bench import targets
from bench.metric import Metric
from bench.targets import BOUNCE, COPY, measure_paths


def test_every_path_is_measured_at_every_size():
    bits, said = 128, []
    rows = measure_paths([0.25, 1], bits=bits, repeat=2, say=said.append)
    assert said == ["0.25 MiB", "1 MiB"]
    paths = [row.path for row in rows if row.size == 1 << 18]
    assert paths == [row.path for row in rows if row.size == 1 << 20]
    assert {COPY, BOUNCE, "parallel bounce", "pyca Cobblestone", "direct, one thread", "direct"} <= set(paths)


def test_ratios_follow_from_times():
    rows = {row.path: row for row in measure_paths([1], repeat=2)}
    direct, bounce, copy = rows["direct"], rows[BOUNCE], rows[COPY]
    assert direct.over_bounce == pytest.approx(bounce.seconds / direct.seconds)
    assert direct.of_copy == pytest.approx(copy.seconds / direct.seconds)
    assert direct.gbps == pytest.approx((1 << 20) / direct.seconds / 1e9)
    assert copy.over_bounce is None


@pytest.mark.slow
def test_the_command_checks_every_target(tmp_path, capsys):
    code = targets.main(["--size", "0.25", "--repeat", "1", "--json", str(tmp_path / "out.json")])
    document = json.loads((tmp_path / "out.json").read_text())
    metrics = document["promised"]
    assert len({metric["name"] for metric in metrics}) == len(metrics) == 15
    for metric in metrics:
        value, target = metric["value"], metric["reach"]
        assert metric["is_met"] == (value <= target if metric["at_most"] else value >= target)
    assert code == (not all(metric["is_met"] for metric in metrics))
    said = capsys.readouterr().out
    assert said.count("MISSED") == sum(not metric["is_met"] for metric in metrics)
    assert (said.count("by bench_"), said.count("not yet measured")) == (3, 4)


def test_a_metric_knows_its_target():
    for value, at_most, is_met in ((1.0, False, False), (1.0, True, True), (None, True, None)):
        assert Metric("speed", value, "x", 2.0, at_most=at_most).is_met is is_met
