"""The modelled toll: torch's buckets, a virtual clock, and figures that say what they are."""

import datetime as dt
import json

import pytest
from helpers.commands import invoke

from fastrack._bench import toll

CAPS = (0.05, 1, 5, 24, 25, 26, 100, 1000)


def gradients():
    torch = pytest.importorskip("torch")
    from fastrack._bench.models import SPECS

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
    from fastrack._bench.models import TransformerSpec

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
    assert all(toll.kinds_of("transfers", name) <= {"published", "derived"} for name in data["transfers"])


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
    assert {row["row"] for row in rows} == {"transfer", "training", "figure"}


REFUSED = {"--toll other": "one of", "--bucket-cap-mb 25": "--toll", "--toll all --picture x.png": "--picture"}


@pytest.mark.parametrize("options", REFUSED)
def test_options_that_do_not_go_together_are_refused(options):
    done = invoke(["bench", *options.split()])
    assert done.exit_code == 2
    assert REFUSED[options] in done.stderr
