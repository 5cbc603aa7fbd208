"""The modelled toll: torch's buckets, a virtual clock, and figures that say what they are."""

import datetime as dt
import json
from pathlib import Path

import pytest
from helpers import crossings as counted
from helpers import fake_cuda
from helpers.commands import invoke

pytest.importorskip("fastrack_bench")

from fastrack.format import message_size
from fastrack_bench import crossings, toll

CAPS = (0.05, 1, 5, 24, 25, 26, 100, 1000)


def gradients():
    torch = pytest.importorskip("torch")
    from fastrack_bench.models import SPECS

    with torch.device("meta"):
        made = {spec.name: [each.numel() for each in spec.build().parameters()] for spec in SPECS[:2]}
    return {**made, "GPT-2 XL": toll.Training.of("GPT-2 XL").gradients}


@pytest.mark.parametrize("cap", CAPS)
def test_buckets_are_those_of_torch(cap):
    torch = pytest.importorskip("torch")
    from torch.distributed import _compute_bucket_assignment_by_size as assign

    for name, sizes in gradients().items():
        tensors = [torch.empty(size, device="meta") for size in reversed(sizes)]
        first = 1 if cap == 25 else cap
        found, _ = assign(tensors, [int(first * toll.MIB), int(cap * toll.MIB)])
        assert toll.buckets(sizes, cap) == [sum(tensors[index].nbytes for index in part) for part in found], name


def test_gpt2_xl_has_580_gradients():
    training = toll.Training.of("GPT-2 XL")
    assert (len(training.gradients), sum(training.gradients)) == (580, 1_557_611_200)
    torch = pytest.importorskip("torch")
    from fastrack_bench.models import TransformerSpec

    with torch.device("meta"):
        made = TransformerSpec("GPT-2 XL", 1, 64, 48, 1600, 25).build()
    assert sorted(each.numel() for each in made.parameters()) == sorted(training.gradients)


def test_the_clock_adds_what_cannot_be_hidden():
    training = toll.Training("two", [1000, 3000], 3.0, 0.5)
    assert toll.run(training, 4, toll.Line(0, 0), 1) == (0, 0, 3.5)
    # One bucket, once all gradients are there: 6 hops of a second.
    assert toll.run(training, 4, toll.Line(1, 0), 1) == (3, 3, 9.5)
    # Two: the first after three quarters of the backward pass, in which it begins.
    assert toll.run(training, 2, toll.Line(1, 0), 0.001) == (2, 2, 1 + 2 * 0.75 + 4 + 0.5)
    # Bytes alone: each hop has an n-th, and half of the hops is one of both phases.
    assert toll.run(training, 4, toll.Line(0, 1 / 4000), 1) == (3, 3, 9.5)
    assert toll.run(training, 2, toll.Line(0, 1 / 4000), 1) == (2, 2, 7.5)


def growth(hop):
    """The factor by which the overhead of GPT-2 XL grows from 2 to 4 GPUs."""
    training = toll.Training.of("GPT-2 XL")
    two, four = (
        toll.run(training, ranks, hop, 25).end / toll.run(training, ranks, toll.line("hops", "plain"), 25).end - 1
        for ranks in (2, 4)
    )
    return four / two


@pytest.mark.parametrize("hop", ["set-up", "fitted"])
def test_the_overhead_grows_with_the_number_of_messages_and_not_with_that_of_bytes(hop):
    assert growth(toll.line("hops", hop)) >= 2
    assert growth(toll.line("hops", "host")._replace(message=0)) <= 1.5


def test_the_named_source_gives_the_cost_of_communication_and_others_show_the_range():
    found = {(row.published, row.by): row for row in toll.figures()}
    assert found[33.53, "driver"].off <= 1.1
    assert found[12.69, "driver"].off <= 1.5
    assert [row.verdict for row in found.values() if row.published > 10 and row.by == "driver"] == ["reproduced"] * 2
    others = [row for row in found.values() if row.published in {33.53, 12.69} and row.by != "driver"]
    assert {row.verdict for row in others} == {"range"}
    assert len(others) == 8


def test_what_was_fitted_does_not_count_as_reproduced():
    rows = [row for row in toll.figures() if row.by == "fitted"]
    assert [row.verdict for row in rows] == ["fitted"] * 2
    assert [round(row.off, 3) for row in rows] == [1, 1]
    published = [row for row in toll.figures() if row.published in {41.6, 3.03} and row.by != "fitted"]
    assert {row.verdict for row in published} == {"missed"}


def test_every_parameter_says_where_it_is_from():
    data = toll.load_data()
    for name, each in data["parameters"].items():
        assert each["kind"] in {"published", "derived", "assumed", "fitted"}, name
        assert ({"source", "date"} <= each.keys()) == (each["kind"] in {"published", "derived"}), name
        assert isinstance(each.get("date", dt.date.min), dt.date), name
    used = {part for group in ("transfers", "hops") for each in data[group].values() for part in each["message"]}
    assert "fitted-hop" in used
    for group in ("transfers", "bridges"):
        assert all(toll.kinds_of(group, name) <= {"published", "derived"} for name in data[group])
    assert crossings.parameters() <= data["parameters"].keys()
    assert all({"gpu", "what", "value", "unit", "source", "date"} <= row.fields.keys() for row in crossings.reports())
    assert len({(row.fields["gpu"], row.fields["source"]) for row in crossings.reports()}) >= 12


def test_the_cap_that_a_slowdown_needs_is_the_smallest():
    training, hop = toll.Training.of("GPT-2 XL"), toll.line("hops", "set-up")
    plain = toll.run(training, 4, toll.line("hops", "plain"), 25).end
    cap = toll.cap_for(training, hop, 4, 3.03)
    assert toll.run(training, 4, hop, cap).end / plain <= 3.03 < toll.run(training, 4, hop, cap * 0.9).end / plain
    assert toll.cap_for(training, toll.line("hops", "host"), 4, 3.03) is None


def test_the_command_prints_and_writes_what_is_modelled(tmp_path):
    done = invoke(
        ["bench", "--toll", "all", "--ranks", "4", "--bucket-cap-mb", "25", "--json", f"{tmp_path}/toll.json"]
    )
    assert done.exit_code == 0
    said = done.stdout
    for words in ("MODELLED, not measured", "fitted", "no cap gives 3.03", "870", "DissectCC, ISPASS 2025"):
        assert words in " ".join(said.split()), words
    assert max(len(line) for line in said.splitlines() if not line.startswith("JSON:")) <= 80
    rows = json.loads((tmp_path / "toll.json").read_text())["toll"]
    assert {row["row"] for row in rows} == {"transfer", "training", "figure", "call", "kv", "load", "report"}


# Calls in confidential mode, and loads over several bridges.


@pytest.mark.parametrize("name", crossings.CALLS)
@pytest.mark.slow
def test_the_counts_of_each_call_are_those_of_the_double(name, monkeypatch):
    fake_cuda.install(monkeypatch)
    call = crossings.CALLS[name]
    assert counted.count(name) == (call.before if crossings.BUILT == crossings.BEFORE else call.after)


def test_a_call_costs_its_copies_its_launches_and_its_bytes():
    rows = {(row.call, row.way, row.bridge): row for row in crossings.call_tolls()}
    assert len(rows) == len(crossings.CALLS) * 4 * 4
    before = rows["to_device 4 KiB", crossings.BEFORE, "B200"]
    assert before.seconds == pytest.approx(3 * 6e-6 + 5 * 15.7e-6 + (4160 + 112) / 9.5e9)
    bounce = rows["to_host 1 MiB", crossings.BOUNCE, "B300"]
    assert bounce.seconds == pytest.approx(330e-6 + toll.MIB / 11.307e9 + toll.MIB / 3.36e9)
    assert bounce.over_stock == pytest.approx(bounce.seconds / (330e-6 + toll.MIB / 11.307e9))


def test_kv_blocks_cost_their_copies_their_launches_and_their_bytes():
    rows = {(row.call, row.way, row.bridge): row for row in crossings.kv_tolls()}
    assert len(rows) == 2 * 3 * len(toll.load_data()["bridges"])
    nbytes, sealed = 100 * 2 * toll.MIB, 100 * message_size(2 * toll.MIB)
    assert rows["store", "pieces", "B200"].seconds == pytest.approx(3200 * 6e-6 + nbytes / 9.5e9)
    assert rows["restore", "one copy", "B300"].seconds == pytest.approx(330e-6 + nbytes / 11.307e9)
    assert rows["store", "sealed", "B200"].counts[:4] == (1, 7, 8, 1)
    assert rows["restore", "sealed", "B200"].counts[:4] == (8, 1, 8, 1)
    assert -(-sealed // (32 * toll.MIB)) == 7
    kept = rows["store", "sealed", "B200"]
    assert kept.seconds == pytest.approx(8 * 6e-6 + 9 * 15.7e-6 + (kept.counts.up + sealed) / 9.5e9)


def test_a_price_without_bytes_is_what_the_direct_way_must_save():
    """Bounce decrypts as much in that time as direct pays for its copies and launches."""
    for bridge in toll.load_data()["bridges"]:
        sizes = [crossings.break_even(bridge, way) for way in (crossings.BEFORE, crossings.AFTER)]
        assert sizes[0] > 2 * sizes[1] > 0
        small = crossings.CALLS["to_device 4 KiB"]
        bounced = crossings.price(small.plain._replace(up=int(sizes[0])), bridge, int(sizes[0]))
        direct = crossings.price(small.before._replace(up=int(sizes[0]), down=0), bridge)
        assert direct == pytest.approx(bounced)


def test_contexts_share_the_work_until_the_link_is_full():
    rows = {(row.bridge, row.way, row.contexts): row.seconds for row in crossings.load_tolls()}
    load = toll.load_data()["loads"]["GPT-OSS-120B"]
    assert rows["B300", "small copies", 1] == pytest.approx(load["seconds"], rel=1e-6)
    assert rows["B300", "small copies", 8] == pytest.approx(load["seconds"] / 8, rel=1e-6)
    assert rows["B300", "slabs of 8 MiB", 8] == pytest.approx(load["bytes"] / 55.7e9)
    assert load["bytes"] / load["pooled"] < toll.parameter("link-b300")  # as docs/dev/contexts.md says


def page(name):
    path = Path(__file__).parents[2] / "docs" / name
    if not path.exists():
        pytest.skip("the tests run without the documentation")
    return path.read_text(encoding="utf-8")


def test_the_page_of_contexts_has_what_the_model_says_of_loads():
    loads = {}
    for row in crossings.load_tolls():
        loads.setdefault((row.bridge, row.way, str(row.copies)), []).append(f"{row.seconds:.1f}")
    for row, seconds in loads.items():
        assert f"| {' | '.join([*row, *seconds])} |" in page("dev/contexts.md"), row


@pytest.mark.parametrize("name", ["calls", "kv", "contexts", "reports"])
def test_the_command_prints_each_model_of_bridges(name, tmp_path):
    done = invoke(["bench", "--toll", name, "--json", f"{tmp_path}/toll.json"])
    assert done.exit_code == 0
    assert "modelled" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if not line.startswith("JSON:")) <= 80
    rows = json.loads((tmp_path / "toll.json").read_text())["toll"]
    assert {row["row"] for row in rows} == {name.removesuffix("s").replace("context", "load")}


REFUSED = {
    "--toll other": "one of",
    "--toll calls --size 1": "--toll calls",
    "--bucket-cap-mb 25": "--toll",
    "--toll all --picture x.png": "--picture",
}


@pytest.mark.parametrize("options", REFUSED)
def test_options_that_do_not_go_together_are_refused(options):
    done = invoke(["bench", *options.split()])
    assert done.exit_code == 2
    assert REFUSED[options] in done.stderr
