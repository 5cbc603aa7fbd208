"""Workloads: three ways to feed a model, compute that is modelled or measured, and what is said of both."""

import json

import numpy as np
import pytest
from helpers.commands import invoke

from fastrack._bench import endpoints, measure

pytest.importorskip("fastrack_bench")

from fastrack.errors import FormatError
from fastrack_bench import workloads
from fastrack_bench.cli import workloads as command
from fastrack_bench.workloads import BOUNCE, CASES, DIRECT, PLAIN, WAYS, Case, compute_seconds

SMALL = (Case("GPT-2", "inference", 1), Case("GPT-2", "training", 8))


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(workloads, "CASES", SMALL)
    monkeypatch.setattr(workloads, "_MOST", 3)


def measured(cases=SMALL, **options):
    arguments = {"device": "cpu", "bits": 256, "repeat": 2, "of_compute": workloads.MODELLED, **options}
    return workloads.measure_workloads(cases, compute=workloads.modelled_compute("h100"), **arguments)


def test_the_bytes_of_a_case_are_those_of_its_tensors():
    assert Case("ResNet-50", "inference", 8).inputs == {"pixel_values": 8 * 3 * 224 * 224 * 4}
    assert Case("ResNet-50", "inference", 8).result == 8 * 1000 * 4
    assert Case("ViT-B", "training", 8).inputs == {"pixel_values": 8 * 602_112, "labels": 64}
    assert Case("GPT-2", "inference", 64).inputs == {"input_ids": 65_536, "attention_mask": 65_536}
    assert Case("GPT-2", "inference", 64).result == 64 * 50_257 * 4
    assert Case("GPT-2", "training", 8).result == 0
    uses = {(case.mode, case.batch) for case in CASES}
    assert uses == {("inference", 1), ("inference", 8), ("inference", 64), ("training", 8)}
    assert len(CASES) == 12


@pytest.mark.usefixtures("few")
def test_each_case_is_measured_in_each_way():
    rows = measured()
    assert [(row.model, row.mode, row.way) for row in rows] == [
        ("GPT-2", mode, way) for mode in ("inference", "training") for way in WAYS
    ]
    for row in rows:
        assert row.step == pytest.approx(row.transfer + row.compute)
        assert row.share == pytest.approx(row.transfer / row.step)
        assert row.runs == 6
        assert (row.removed is None) == (row.way != DIRECT)
    plain, bounce, direct = rows[:3]
    assert plain.over_plain == 1
    assert direct.removed == pytest.approx((bounce.step - direct.step) / (bounce.step - plain.step))


def test_the_ratio_of_equals_is_of_two_halves():
    times = {f"{way}{again}": measure.Times([seconds]) for way, again, seconds in
             [(PLAIN, "", 1), (PLAIN, workloads.AGAIN, 2), (BOUNCE, "", 3), (BOUNCE, workloads.AGAIN, 3),
              (DIRECT, "", 2), (DIRECT, workloads.AGAIN, 2)]}  # fmt: skip
    plain, bounce, direct = workloads._rows(SMALL[0], times, measure.Times([1.0, 3.0]), workloads.MEASURED)
    assert plain.again == pytest.approx((1 + 1) / (2 + 3))
    assert bounce.again == pytest.approx((3 + 1) / (3 + 3))
    assert (plain.compute, plain.transfer) == (2, 1.5)
    assert direct.removed == pytest.approx(1 - 0.5 / 1.5)
    modelled = workloads._rows(SMALL[0], times, measure.Times([1.0]), workloads.MODELLED)
    assert modelled[1].again == 1


def test_a_way_that_delivers_other_bytes_is_found(monkeypatch):
    monkeypatch.setattr(workloads._Moves, "bounced", lambda self: None)
    with (
        pytest.raises(RuntimeError, match="'bounce' delivered other bytes"),
        workloads.open_ways(SMALL[1], device="cpu", bits=256),
    ):
        pass


def test_a_result_that_comes_back_as_other_bytes_is_found(monkeypatch):
    monkeypatch.setattr(endpoints.CpuEndpoint, "get", lambda end: np.zeros_like(end.array))
    with (
        pytest.raises(RuntimeError, match="'plain' delivered other bytes"),
        workloads.open_ways(SMALL[0], device="cpu", bits=256),
    ):
        pass


def test_modelled_compute_is_that_of_operations_or_of_launches():
    assert compute_seconds("h100", Case("ResNet-50", "inference", 1)) == pytest.approx(175 * 4e-6)
    assert compute_seconds("h100", Case("ResNet-50", "inference", 64)) == pytest.approx(64 * 8.18e9 / (0.18 * 989e12))
    found = compute_seconds("h100", Case("ViT-B", "inference", 64))
    assert found == pytest.approx(64 * 33.7e9 / (0.4 * 989e12))
    training, request = (compute_seconds("h100", Case("ViT-B", mode, 64)) for mode in ("training", "inference"))
    assert training == pytest.approx(3 * request)
    with pytest.raises(FormatError, match="expected h100, got 'h900'"):
        workloads.modelled_compute("h900")


@pytest.mark.usefixtures("few")
def test_the_command_says_what_is_modelled(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "80")
    files = f"--json '{tmp_path / 'out.json'}' --picture '{tmp_path / 'out.png'}'"
    done = invoke(f"bench --workloads --compute h100 --repeat 1 {files}")
    assert done.exit_code == 0
    said = " ".join(done.stdout.split())
    assert "MODELLED, not measured" in said
    assert "GPT-2, inference, 1" in said
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if str(tmp_path) not in line)
    document = json.loads((tmp_path / "out.json").read_text())
    assert {row["of_compute"] for row in document["workloads"]} == {"modelled"}
    assert document["settings"]["compute"] == "h100"
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_what_does_not_go_together_is_refused():
    for options, hint in (
        ("--compute h100", "--compute"),
        ("--workloads --size 1", "--size"),
        ("--workloads --toll all", "--collectives or --toll"),
        ("--workloads --timeline x.json", "--timeline"),
    ):
        done = invoke(f"bench {options}")
        assert done.exit_code == 2, options
        assert hint in done.stderr, options
    assert "expected h100" in invoke("bench --workloads --compute b900").stderr


def test_without_transformers_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "transformers" else object())
    said = invoke("bench --workloads").stderr
    assert "pip install transformers" in said
    assert "--compute h100" in said


def test_operations_are_those_that_torch_counts():
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5")
    from torch.utils.flop_counter import FlopCounterMode

    from fastrack_bench import compute, toll

    for name in workloads.MODELS:
        case = Case(name, "inference", 1)
        run = compute._request(compute._build(name), compute._sample(case))
        with FlopCounterMode(display=False) as counter:
            run()
        expected = toll.load_data()["workloads"][name]["operations"]
        assert counter.get_total_flops() == pytest.approx(expected, rel=0.01), name
