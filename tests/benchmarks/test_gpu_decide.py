"""Each parameter is chosen by its rule from results that are made up, at the edge of the rule and beside it."""

import json

import pytest
from helpers.cases import each

from bench.gpu import decide
from bench.gpu.link import FILL, UP
from bench.gpu.plan import MIB, size_of

PRESENT = {name: present for name, (_, present, _) in decide.PARAMETERS.items()}


def row(step, path="", size=256 * MIB, gbps=1.0, seconds=1.0, **settings):
    return {"step": step, "path": path, "size": size, "gbps": gbps, "seconds": {"median": seconds}, **settings}


def variants(speeds, size=256 * MIB):
    """Rows of speeds by variant and split."""
    return [
        row("variants", "open", size, gbps, bits=256, variant=variant, split=split)
        for (variant, split), gbps in speeds.items()
    ]


def value_of(name, rows):
    found = decide.decide(rows)[name]
    return found["value"] if found["measured"] else None


def test_what_was_not_measured_stays_as_it_is():
    decisions = decide.decide([])
    assert {name: each["value"] for name, each in decisions.items()} == PRESENT
    assert not any(each["measured"] for each in decisions.values())
    text = decide.table(decisions)
    assert text.count("not measured") == len(PRESENT)
    assert text.endswith("Nothing is to be changed.")


@each(
    ("candidate", "chosen"),
    [(103.0, "clmad"), (102.9, "kernels"), (90.0, "kernels")],
)
def test_a_kernel_has_to_be_faster_by_3_percent(candidate, chosen):
    rows = variants({("kernels", 100): 100.0, ("kernels", 58): 80.0, ("clmad", 58): candidate})
    assert value_of("kernel", rows) == chosen


def test_a_kernel_is_judged_by_the_geometric_mean_of_all_sizes_and_not_by_some():
    small = variants({("kernels", 100): 100.0, ("quick", 100): 400.0, ("half", 100): 900.0}, 8 * MIB)
    large = variants({("kernels", 100): 100.0, ("quick", 100): 26.0})
    assert value_of("kernel", small + large) == "kernels"  # a mean of 102 of quick; half lacks the large size
    large[1]["gbps"] = 27.0
    assert value_of("kernel", small + large) == "quick"


def test_without_the_trees_kernel_nothing_is_chosen():
    assert value_of("kernel", variants({("stagger", 100): 100.0})) is None


@each(("narrow", "chosen"), [(99.0, 58), (98.9, 100), (101.0, 58)])
def test_a_narrow_split_is_taken_within_1_percent_of_the_best(narrow, chosen):
    rows = variants({("kernels", -1): 50.0, ("kernels", 58): narrow, ("kernels", 100): 100.0})
    assert value_of("carve-out", rows) == chosen


@each(
    ("fills", "chosen"),
    [
        ({4: 40, 8: 55, 16: 70}, 8),
        ({4: 40, 8: 54.9, 16: 70}, 16),
        ({4: 40, 8: 54, 16: 50}, 8),  # none is enough: the fastest
    ],
)
def test_threads_are_the_fewest_that_fill_a_tenth_faster_than_the_link(fills, chosen):
    rows = [row("link", FILL, gbps=gbps, threads=count) for count, gbps in fills.items()]
    assert value_of("threads", rows) is None  # without the link nothing is known
    rows += [row("link", UP, gbps=50.0), row("link", UP, MIB, gbps=9.0)]
    assert value_of("threads", rows) == chosen


@each(("eighth", "chosen"), [(60.0, "1/8"), (59.9, "1/4")])
def test_the_share_is_the_smallest_that_opens_a_fifth_faster_than_the_link(eighth, chosen):
    opened = {"1": 400.0, "1/2": 220.0, "1/4": 110.0, "1/8": eighth}
    rows = [row("kernels", "open", gbps=gbps, bits=256, share=share) for share, gbps in opened.items()]
    rows += [row("kernels", "open", gbps=900.0, bits=128, share="1/16")]
    rows += [row("kernels", "open", MIB, gbps=900.0, bits=256, share="1/16")]
    assert value_of("share", rows) is None
    assert value_of("share", [*rows, row("link", UP, gbps=50.0)]) == chosen
    assert value_of("share", [*rows, row("link", UP, gbps=500.0)]) == "1"


def grid(speeds):
    names = {(slab, depth): f"slab {slab * MIB}, depth {depth}" for slab, depth in speeds}
    return [row("sweep beside", beside=names[key], beside_gbps=gbps) for key, gbps in speeds.items()]


@each(
    ("speeds", "slab", "depth"),
    [
        ({(4, 3): 40, (4, 6): 49, (8, 3): 50, (8, 6): 50}, 4, 6),
        ({(4, 3): 40, (4, 6): 48.9, (8, 3): 49, (8, 6): 50}, 8, 3),
        ({(4, 3): 40, (4, 6): 48.9, (8, 3): 48.9, (8, 6): 50}, 8, 6),
    ],
)
def test_the_slab_and_then_the_depth_are_the_smallest_within_2_percent_beside_the_product(speeds, slab, depth):
    rows = [*grid(speeds), row("sweep beside", beside="nothing", beside_gbps=0.0)]
    assert value_of("slab", rows) == slab * MIB
    assert value_of("depth", rows) == depth


@each(("cost", "chosen"), [(1.01, 1), (1.02, 2)])
def test_the_first_slab_is_the_best_for_small_transfers_that_costs_a_large_one_no_more_than_1_percent(cost, chosen):
    times = {1: {1: 1.0}, 4: {1: 2.0, 2: 2.2, 4: 3.0}, 16: {1: 10.0 * cost, 2: 10.0, 4: 10.0}}
    rows = [
        row("sweep", "", size * MIB, seconds=seconds, varied="lead", lead=lead * MIB)
        for size, by_lead in times.items()
        for lead, seconds in by_lead.items()
    ]
    assert value_of("lead", rows) == chosen * MIB
    assert value_of("lead", rows[:1]) is None


@each(("two", "chosen"), [(45.0, 2), (44.9, 3)])
def test_lanes_are_the_fewest_that_leave_an_idle_stream_its_speed(two, chosen):
    rows = [row("lanes", gbps=gbps, lanes=count) for count, gbps in ((1, 5.0), (2, two), (3, 49.0), (4, 50.0))]
    assert value_of("lanes", rows) is None
    assert value_of("lanes", [*rows, row("lanes", gbps=50.0, lanes="nothing")]) == chosen
    assert value_of("lanes", [*rows, row("lanes", gbps=90.0, lanes="nothing")]) == 4


@pytest.fixture
def folder(tmp_path):
    def put(name, stage, date, rows, gpu="H100"):
        document = {"date": date, "stage": stage, "rows": rows, "machine": {"gpu": {"name": gpu}}}
        (tmp_path / f"2026-01-01-gpu-{name}.json").write_text(json.dumps(document))

    put("old", "variants", "2026-01-01", variants({("kernels", 58): 1.0}))
    put("new", "variants", "2026-01-03", variants({("kernels", 100): 100.0, ("kernels", 58): 10.0}))
    put("first", "first", "2026-01-02", [row("link", UP, gbps=50.0), row("link", FILL, gbps=60.0, threads=6)])
    put("other", "figures", "2026-01-02", grid({(1, 2): 50}), gpu="A100")
    return tmp_path


def test_the_newest_results_of_the_newest_gpu_decide_and_lines_to_change_are_named(folder, capsys):
    decide.main([str(folder)])
    text = capsys.readouterr().out
    found = json.loads((folder / decide.FILE).read_text())
    assert sorted(found["from"]) == ["2026-01-01-gpu-first.json", "2026-01-01-gpu-new.json"]
    parameters = found["parameters"]
    assert (parameters["carve-out"]["value"], parameters["carve-out"]["figures"]) == (100, {"100": 100.0, "58": 10.0})
    assert parameters["slab"] == {**parameters["slab"], "measured": False, "value": PRESENT["slab"]}
    assert "within 2 %" in parameters["slab"]["rule"]
    assert max(map(len, text.splitlines())) <= 80
    changed = text.partition("To change:\n")[2]
    assert changed == "  threads 6: MAX_COPIERS in fastrack/_devices/cuda/device.py\n"
    assert f"{size_of(PRESENT['slab'])}  not measured" in text
