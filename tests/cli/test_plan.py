import json

import numpy as np
import pytest
from helpers.profiles import GRID, STAGES, document

import fastrack
from fastrack._cli import machine

pytest.importorskip("fastrack_bench")

from fastrack_bench.prediction import gather
from fastrack_bench.prediction.profiles import Row, Stage
from fastrack_bench.prediction.sources import UNVALIDATED

PROFILE = "--profile machine.json"


@pytest.fixture(autouse=True)
def _measured(folder):
    (folder / "machine.json").write_text(json.dumps(document(STAGES)))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("transfer --size 64MiB", ["to_device of 64 MiB", "to_device, 2 threads", "6.73 ms"]),
        ("transfer --elements 16M --dtype bfloat16 --threads 1", ["to_device of 30.5 MiB", "with 2 threads"]),
        ("transfer --size 1MiB --stage save", ["save of 1 MiB"]),
        ("epoch --samples 25600 --row 1KiB --batch 256 --compute 0.01", ["100 batches", "compute", "--overlap"]),
        (
            "epoch --samples 33 --row 1024 --batch 8 --pattern contiguous --overlap 1",
            ["5 batches", "contiguous rows, DataLoader, 1024"],
        ),
        ("epoch --samples 99 --row 1024 --batch 8 --without-loader", ["13 batches", "random rows, 1024"]),
        ("checkpoint --size 1GiB --notice 30s --mean-between 4h", ["fits in a notice", "by daly", "restarting"]),
        (
            "collective --model GPT-2\\ small --compute 0.8 --ranks 4",
            ["474.7 MiB by 4 ranks in 13 buckets", "with 2 ranks"],
        ),
        ("collective --size 100MiB", ["in 4 buckets of 25 MiB"]),
        ("load --elements 100M", ["load 190.7 MiB in 1 file", "the disk", "with files in the page cache"]),
        ("load --size 100MiB --cached", ["load, 2 threads"]),
    ],
)
def test_each_job_is_told_and_given_to_a_program(cli, line, told):
    said = cli(f"plan {line} {PROFILE}").stdout
    for text in (*told, "on Synthetic, 2 threads", "bottleneck: ", "machine.json is of another machine"):
        assert text in said
    document = json.loads(cli(f"plan {line} {PROFILE} --json").stdout)
    (plan,) = document["plans"]
    assert plan["job"] in said
    assert 0 < plan["seconds"]["low"] <= plan["seconds"]["least"] <= plan["seconds"]["most"] <= plan["seconds"]["high"]


def test_published_figures_are_labelled_wherever_they_are_told(cli):
    for line in ("transfer --size 64MiB", "collective --size 100MiB", "load --size 1GiB --cached"):
        said = cli(f"plan {line} --published all").stdout
        assert UNVALIDATED in said
        assert "by source: " in said
    (plan,) = json.loads(cli("plan transfer --size 64MiB --published driver --json").stdout)["plans"]
    assert plan["label"] == UNVALIDATED
    rows = cli("plan epoch --samples 99 --row 1KiB --batch 9 --threads 4 --published all").stdout
    assert "threads" not in rows
    both = cli(f"plan transfer --size 64MiB --published all {PROFILE}").stdout
    assert both.index("on Synthetic") < both.index(UNVALIDATED)


@pytest.mark.parametrize(
    ("line", "status", "told"),
    [
        ("transfer --size 5GiB", 1, "four times past what was measured"),
        ("transfer --size 64MB", 2, "expected a size as 4096, 64MiB or 1.5GiB, got '64MB'"),
        ("transfer", 2, "or --elements"),
        ("transfer --size 1MiB --elements 7B", 2, "or --elements"),
        ("transfer --elements 7X", 2, "expected a number as 7B"),
        ("transfer --elements 7M --dtype int3", 2, "expected a name as float32"),
        ("transfer --size 1MiB --threads 3", 1, "got to_device, 3 threads"),
        ("transfer --size 1MiB --trace machine.json", 1, "trace: expected JSON"),
        ("epoch --samples 1 --row 1KiB --batch 9 --overlap 1 --trace t.json", 2, "without --trace"),
        ("checkpoint --size 1GiB --mean-between 1s", 1, "leave time to work"),
        ("checkpoint --size 1GiB --notice soon", 2, "expected a period"),
        ("collective --size 900GiB --bucket-cap-mb 0.01", 1, "at most 1,000,000, got 92,160,000"),
        ("collective --model GPT-5", 2, "expected one of GPT-2 small"),
        ("load . --size 1MiB", 2, "without MODEL"),
        ("load .", 2, "expected files named .safetensors"),
    ],
)
def test_what_cannot_be_planned_is_refused(cli, line, status, told):
    said = cli(f"plan {line} {PROFILE}", status=status).stderr
    assert told in said
    assert said.count("\n") == 1


def test_an_interval_that_nothing_was_measured_for_is_said_to_be_assumed(cli, folder):
    (folder / "few.json").write_text(json.dumps(document(STAGES, GRID[:3])))
    assert " us, assumed" in " ".join(cli("plan transfer --size 64KiB --profile few.json").stdout.split())
    assert " us, assumed" not in cli(f"plan transfer --size 64KiB {PROFILE}").stdout


def test_without_a_source_nothing_is_planned(cli):
    assert "`fastrack plan measure`" in cli("plan transfer --size 1MiB", status=2).stderr
    assert "goes with --profile" in cli("plan transfer --size 1MiB --published all --picture a.png", status=2).stderr


def test_a_trace_is_no_profile(cli, folder):
    (folder / "t.json").write_text('{"traceEvents": []}')
    assert "expected a profile, got a trace" in cli("plan validate t.json", status=1).stderr


def test_a_folder_is_loaded_file_by_file_and_tensor_by_tensor(cli, folder):
    (folder / "model").mkdir()
    key = fastrack.Key.generate()
    for number in range(3):
        content = {f"{name}": np.zeros(1 << (20 if name else 3), np.uint8) for name in range(number + 1)}
        fastrack.save_file(content, folder / "model" / f"{number}.safetensors", key=key)  # the first is tiny
    (folder / "model" / "config.json").write_text("{}")
    said = cli(f"plan load model {PROFILE}").stdout
    assert "load 3 MiB in 3 files" in said
    assert "3 messages more" in said
    assert "in 1 file\n" in cli(f"plan load model/0.safetensors {PROFILE}").stdout
    assert "5 messages more" in cli(f"plan load model --tensors 8 {PROFILE}").stdout
    (folder / "model" / "3.safetensors").write_bytes(bytes(1 << 20))
    assert "3.safetensors: " in cli(f"plan load model {PROFILE}", status=1).stderr


def test_a_trace_names_the_step(cli, folder):
    spans = [("to_device", 0, 100), ("source", 0, 80), ("open", 60, 40)]
    events = [{"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1} for name, ts, dur in spans]
    (folder / "t.json").write_text(json.dumps({"traceEvents": events}))
    said = cli(f"plan transfer --size 64MiB {PROFILE} --trace t.json").stdout
    assert "bottleneck: to_device: source" in said
    assert "overlapped by 17%: source 67%, open 33%" in " ".join(said.split())
    assert (
        "a trace with to_host; it has to_device"
        in cli(f"plan transfer --size 64MiB --stage to_host {PROFILE} --trace t.json", status=2).stderr
    )
    other = cli(f'plan transfer --size 64MiB --stage "to_device, plain tensor" {PROFILE} --trace t.json', status=2)
    assert "a trace with to_device, plain tensor; it has to_device" in other.stderr
    epoch = f"plan epoch --samples 99 --row 1024 --batch 9 {PROFILE} --trace t.json"
    assert "does not tell what is hidden" in cli(f"{epoch} --compute 0.1", status=2).stderr
    cli(epoch)


@pytest.mark.slow
def test_a_picture_shows_what_was_measured_and_planned(cli, folder):
    pytest.importorskip("matplotlib")
    said = cli(f"plan epoch --samples 900 --row 2KiB --batch 90 {PROFILE} --picture plan.svg").stdout
    assert "Picture: plan.svg" in said
    drawn = (folder / "plan.svg").read_text()
    assert drawn.startswith("<?xml")
    cli(f"plan transfer --size 3MiB {PROFILE} --published all --picture plan.png")
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_validation_prints_errors_beside_noise_and_the_baseline(cli):
    said = cli("plan validate machine.json --later machine.json").stdout
    assert "machine.json: Synthetic, 2 threads, cpu; left out" in " ".join(said.split())
    for column in ("error %", "bytes/bw %", "noise %", "covers", "width"):
        assert column in said
    found = json.loads(cli("plan validate machine.json --json").stdout)["validation"]
    assert next(iter(found.values()))[0]["error"] == pytest.approx([0, 0], abs=1e-9)


def test_measure_writes_a_profile_that_is_planned_from(cli, folder, monkeypatch):
    rows = [Row(Stage("to_device", 2), size, (1e-3, 1e-3, 1e-3)) for size in GRID]
    asked = {}
    monkeypatch.setattr(gather, "measure_stages", lambda folder, **options: asked.update(options) or rows)
    said = cli("plan measure here.json --largest 2GiB --rounds 3 --ranks 2 --ranks 4").stdout
    assert (asked["largest"], asked["rounds"], asked["ranks"]) == (2 << 30, 3, (2, 4))
    assert "Profile: here.json" in said
    assert "load, from disk was not measured" in said
    written = json.loads((folder / "here.json").read_text())
    assert written["machine"]["caches"] == machine.read_caches()
    assert '"seconds": [0.001, 0.001, 0.001]' in (folder / "here.json").read_text()
    assert "1.00 ms" in cli("plan transfer --size 1MiB --profile here.json").stdout
    assert "exists already" in cli("plan measure here.json", status=1).stderr


def test_caches_are_read_as_the_kernel_lists_them(tmp_path):
    for index, (size, kind) in enumerate(
        [("32K", "Data"), ("32K", "Instruction"), ("1024K", "Unified"), ("x", "Data")]
    ):
        path = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        path.mkdir(parents=True)
        (path / "size").write_text(f"{size}\n")
        (path / "type").write_text(f"{kind}\n")
    assert machine.read_caches(tmp_path) == [32 << 10, 1 << 20]
    assert machine.read_caches(tmp_path / "none") is None
