import json
import re
from dataclasses import replace

import pytest
from helpers import measuring
from helpers.cuda_rig import device_of
from helpers.fake_cuda import FakeDriver
from helpers.host_gpu import standing_in

from fastrack._bench import endpoints, plots, runner, steps
from fastrack._cli import console, measurements
from fastrack._cli.commands.bench import show_ablation, show_speeds
from fastrack._crypto import engine as aead
from fastrack._crypto import workers

QUICK = "bench --size 0.0625 --repeat 1"


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """As many rounds as were asked for, at every size."""
    measuring.shorten(monkeypatch)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of host memory, as cuda:0."""
    driver = FakeDriver("serial")
    driver.confidential = False  # to have times
    with standing_in(monkeypatch, driver, device_of):
        yield


def rows_of(*sizes, p99=None):
    """Rows as a run would give them."""
    return [
        runner.Measured(way, size, step, ("copy", "device opens"), 9, 0.5, (0.4, 0.6), p99, 0.7, 1.5, 4, 2, 1.5, 0.25)
        for way in endpoints.DIRECTIONS
        for size in sizes
        for step in steps.STEPS
    ]


# What is measured.


def test_every_step_is_measured_in_both_directions(cli):
    said = cli(f"{QUICK} --size 0.125 --wide").stdout
    for direction in endpoints.DIRECTIONS:
        assert f"{direction}, cpu\n" in said
    for size in ("64 KiB", "128 KiB"):
        assert said.count(f"{size}   bounce") == 2
    for step in steps.STEPS:
        assert len(re.findall(rf" {re.escape(step)} +1 +\d", said)) == 4
        assert said.count(f"  {step}: ") == 2
    assert "the device is host memory" in said
    assert "ESTIMATED" in said


@pytest.mark.parametrize("bits", [128, 256])
def test_figures_are_given_to_a_program(cli, folder, bits):
    said = cli(f"{QUICK} --bits {bits} --json out.json").stdout
    assert "JSON: out.json" in said
    document = json.loads((folder / "out.json").read_text())
    assert document["settings"]["bits"] == bits
    assert document["settings"]["sizes_mib"] == [0.0625]
    engine = aead.get_engine()
    assert document["machine"]["cpu"]["threads"] == workers.default_threads()
    assert (document["settings"]["engine"], document["settings"]["threads"]) == (engine.name, engine.threads)
    assert document["software"]["fastrack"]
    assert [(row["direction"], row["step"]) for row in document["ablation"]] == [
        (way, step) for way in endpoints.DIRECTIONS for step in steps.STEPS
    ]
    for row in document["ablation"]:
        assert row["size"] == 65536
        assert row["p99"] is None
        assert row["gbps"] == pytest.approx(65536 / row["seconds"] / 1e9)


def test_a_document_on_stdout_stands_there_alone(cli):
    done = cli(f"{QUICK} --json -")
    assert done.stderr == ""
    assert len(json.loads(done.stdout)["ablation"]) == 2 * len(steps.STEPS)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_measured_with_a_word_on_what_stands_for_a_chain(cli, folder):
    said = cli(f"{QUICK} --device cuda:0 --json out.json --timeline when.json").stdout
    assert {"kernels", "uploads", "downloads"} <= events_of(folder / "when.json")[1]
    assert "to_host, cuda:0\n" in said
    assert "one thread block on the GPU" in said
    document = json.loads((folder / "out.json").read_text())
    assert document["settings"]["device"] == "cuda:0"
    assert "graphics" in document["machine"]
    assert len(document["ablation"]) == 2 * len(steps.STEPS)


def test_without_a_gpu_the_command_says_what_to_do(cli):
    said = cli.error(f"{QUICK} --device cuda:0")
    assert said == "error: cuda:0 needs a GPU of NVIDIA, got no NVIDIA driver: install one, or use device='cpu'\n"


def test_a_device_that_is_none_is_refused(cli):
    assert cli.error(f"{QUICK} --device tpu") == "error: no such device: 'tpu'; expected 'cpu' or 'cuda:N'\n"
    document = json.loads(cli(f"{QUICK} --device tpu --json -", status=1).stdout)
    assert document["error"]["type"] == "DeviceError"
    said = cli.error(f"{QUICK} --device tpu --json out.json")  # stdout is for people then
    assert said == "error: no such device: 'tpu'; expected 'cpu' or 'cuda:N'\n"


# How it is shown.


def test_a_narrow_terminal_breaks_no_words_with_all_columns(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = cli(f"{QUICK} --wide").stdout
    assert all(f" {step} " in said for step in steps.STEPS)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_table_of_speeds_fits_in_forty_columns_and_never_takes_more_than_eighty(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    show_speeds(rows_of(1 << 16, 1 << 30), "cpu", measurements.narrow_console())
    said = capsys.readouterr().out
    assert all(len(line) <= min(columns, 80) for line in said.splitlines())
    assert {"authentication", "bounce", "overlap"} <= set(said.split())
    text = " ".join(said.split())
    for direction in endpoints.DIRECTIONS:
        assert f"{direction}, cpu " in text
    assert text.count("500.0 2.0 25 %") == 2 * 2 * len(steps.STEPS)
    assert text.count(" 64 KiB ") == text.count(" 1 GiB ") == 2
    for name, meaning in steps.MEANINGS.items():
        assert f"{name}: {meaning}" in text


def test_more_than_the_speed_of_a_copy_is_explained(capsys):
    for faster in (False, True):
        rows = [replace(row, of_copy=1.12) if faster else row for row in rows_of(1 << 16)]
        show_speeds(rows, "cpu", measurements.narrow_console())
        assert ("the machine did other work" in " ".join(capsys.readouterr().out.split())) is faster


def test_speeds_are_told_with_where_the_rest_is(cli):
    said = cli(QUICK).stdout
    assert "More columns: --wide. All figures: --json." in said
    assert "CPU" not in said
    assert cli(f"{QUICK} --quiet --json out.json").stdout == ""


def test_progress_names_the_measurement_and_the_path_in_a_line():
    told = []
    runner.ablate([1 / 16, 1 / 8], repeat=2, progress=told.append)
    assert told[0] == "to_device 0.0625 MiB, 1 of 4, making random data"
    assert told[-1] == "to_host 0.125 MiB, 4 of 4, round 2/2: plain copy"
    assert len(told) == 4 * (2 + 2 * len(steps.STEPS))
    assert max(map(len, told)) < 68  # with a spinner and a verb in front, in 80 columns


def test_a_p99_that_is_not_known_is_a_dash(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    for p99, shown in ((None, "-"), (0.01, "10.000")):
        show_ablation(rows_of(1 << 20, p99=p99), "cpu", console.stdout())
        (line, *_) = [line for line in capsys.readouterr().out.splitlines() if "+ direct   " in line]
        assert " ".join(line.split()) == f"+ direct 9 0.00 500.0 {shown} 700.0 1.500 4 2.00 1.50 25 % 4.00"


@pytest.mark.slow
def test_figures_are_drawn_and_a_timeline_is_a_trace_of_each_kind_of_transfer(cli, folder):
    said = cli(f"{QUICK} --picture chart.png --timeline when.json").stdout
    assert "Picture: chart.png" in said
    assert (folder / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "Timeline: when.json" in said
    names, _ = events_of(folder / "when.json")
    assert (names.count("to_device"), names.count("to_host")) == (2, 1)


@pytest.mark.parametrize("sizes", [(1,), (1 << 16, 1 << 20, 1 << 24, 1 << 28, 1 << 30)])
@pytest.mark.slow
def test_a_chart_takes_any_number_of_sizes_and_losses(folder, sizes):
    for losses in ([], [2.0, 1.0, 0.5]):
        plots.draw_ablation(rows_of(*sizes), "cpu", folder / "chart.svg", losses=losses)
        text = (folder / "chart.svg").read_text()
        assert text.count("2.0x") == 2 * len(sizes) * len(steps.STEPS)
        assert ("Loss, on sealed and on plain data alike" in text) is bool(losses)


def test_a_chart_without_matplotlib_says_what_to_install(cli, hide):
    hide("matplotlib")
    assert cli.error(f"{QUICK} --picture chart.png") == (
        "error: matplotlib is not installed: pip install 'fastrack-io[demo]'\n"
    )


@pytest.mark.parametrize("command", [QUICK, "demo"])
def test_a_chart_of_an_unknown_kind_is_refused_at_once(cli, command):
    assert "chart.xyz: expected a suffix that matplotlib supports" in cli.error(f"{command} --picture chart.xyz")
    assert cli.names() == []


def events_of(path):
    """The spans of a trace by name, and the names of its threads and streams."""
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    return names, {event["args"]["name"] for event in events if event["name"] == "thread_name"}


@pytest.mark.parametrize(
    "option", ["--picture nowhere/chart.png", "--timeline nowhere/out.json", "--json nowhere/out.json"]
)
def test_results_need_a_directory_that_is_there(cli, option):
    assert "nowhere: no such directory" in "".join(cli(f"{QUICK} {option}", status=1).output)


def test_a_size_beyond_one_call_of_openssl_is_refused(cli):
    assert "2047" in cli("bench --size 2048", status=2).stderr
