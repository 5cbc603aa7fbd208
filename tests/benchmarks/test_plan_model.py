"""Predictions on machines whose times are known: exact where they are lines, and honest where they vary or end."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from helpers.profiles import CACHES, GRID, MACHINE, MIB, STAGES, document, line, points, profile

pytest.importorskip("fastrack_bench")

from fastrack_bench import toll
from fastrack_bench.prediction import jobs as plan
from fastrack_bench.prediction.curves import Curve, Estimate, OutOfReachError
from fastrack_bench.prediction.profiles import Point, Profile, Stage, parse_profile
from fastrack_bench.prediction.sources import UNVALIDATED, Measured, Published, by_machine
from fastrack_bench.prediction.traces import parse_trace
from fastrack_bench.prediction.validation import leave_out, leave_out_rows, predict_later, reach_past
from fastrack_bench.revocations import Revocations

RESULTS = Path(__file__).parents[2] / "bench/results"
STAGE = Stage("to_device", 2)
LINE = line(20e-6, 10e9)
SOURCE = Measured(MACHINE, (profile(STAGES, runs=3),))


def curve(seconds=LINE, sizes=GRID, caches=CACHES, **options):
    return Curve(STAGE, points(seconds, sizes, **options), caches)


# A stage by its size.


def test_a_line_is_predicted_exactly_within_and_four_times_past_what_was_measured():
    for size in (GRID[0], 20_000, 3 * MIB, GRID[-1], GRID[0] / 4, 4 * GRID[-1]):
        assert curve().at(size).values == pytest.approx([LINE(size)] * 4)


def test_each_interval_between_neighbours_has_its_own_line():
    bent = curve(lambda size: LINE(size) if size <= 2 * MIB else LINE(2 * MIB) + (size - 2 * MIB) / 1e9)
    assert bent.seconds(1.5 * MIB) == pytest.approx(LINE(1.5 * MIB))
    assert bent.seconds(3 * MIB) == pytest.approx(LINE(2 * MIB) + MIB / 1e9)


def test_the_largest_cache_ends_a_line_at_half_its_bytes():
    def seconds(size):
        return LINE(size) if size <= 16 * MIB else LINE(16 * MIB) + (size - 16 * MIB) / 1e9

    cached = curve(seconds, sizes=[size for size in GRID if size != 16 * MIB])
    for size in (12 * MIB, 16 * MIB, 24 * MIB):
        assert cached.seconds(size) == pytest.approx(seconds(size))
    assert replace(cached, caches=()).seconds(16 * MIB) > 2 * seconds(16 * MIB)


def test_noise_does_not_make_a_larger_message_quicker_than_what_was_measured():
    falling = Curve(STAGE, (Point(MIB, (2.0,) * 3), Point(2 * MIB, (1.0,) * 3)), ())
    assert falling.seconds(8 * MIB) == 1.0
    assert falling.seconds(MIB / 4) == 2.0
    rising = Curve(STAGE, (Point(MIB, (1.0,) * 3), Point(2 * MIB, (9.0,) * 3)), ())
    assert rising.seconds(MIB / 4) == 0.25  # not below zero


def test_what_is_farther_than_four_times_is_refused_with_what_to_measure():
    for size in (GRID[0] / 4.01, GRID[-1] * 4.01):
        with pytest.raises(OutOfReachError, match=r"expected 4 KiB to 4 GiB.* `fastrack plan measure --largest`"):
            curve().at(size)


def test_a_gap_with_an_edge_of_a_cache_needs_points_on_both_sides():
    wide = curve(sizes=(256 << 10, 16 * MIB))
    with pytest.raises(OutOfReachError, match=r"edge of a cache.* got 256 KiB and 16 MiB"):
        replace(wide, caches=(2 * MIB,)).at(4 * MIB)
    assert replace(wide, caches=(128 << 10, 64 * MIB)).at(4 * MIB).most == pytest.approx(LINE(4 * MIB))
    near = curve(sizes=(256 << 10, MIB // 2, 8 * MIB, 16 * MIB), caches=(2 * MIB, 64 * MIB))
    assert near.at(4 * MIB).most == pytest.approx(LINE(4 * MIB))
    near.at(8 * MIB)  # was measured itself
    wide.at(16 * MIB)


@pytest.mark.parametrize("last", [6 * MIB, 8 * MIB, 16 * MIB])
def test_no_edge_of_a_cache_is_passed_beyond_the_ends(last):
    """The largest cache, of 32 MiB, is full of a message of 16 MiB and its copy."""
    ends = curve(sizes=(2 * MIB, last))
    if last < 8 * MIB:
        ends.at(2 * last)
    for size in (16 * MIB + (last == 16 * MIB), 24 * MIB, 2 * last + (4 * MIB), 4 * last, MIB - 1):
        with pytest.raises(OutOfReachError, match="edge of a cache"):
            ends.at(size)


def test_without_sizes_of_caches_an_edge_may_be_in_each_wide_gap():
    curve(sizes=(MIB, 4 * MIB), caches=None).at(2 * MIB)
    with pytest.raises(OutOfReachError, match="no sizes of caches"):
        curve(sizes=(MIB, 5 * MIB), caches=None).at(2 * MIB)


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_nine_of_ten_runs_are_within_the_interval(noise):
    covered = []
    for seed in range(12):
        before, after = curve(noise=noise, seed=seed), curve(noise=noise, seed=1000 + seed)
        for point in after.points[1:-1]:
            found = before.at(point.size)
            covered += [found.low <= run <= found.high for run in point.runs]
    assert 0.87 <= sum(covered) / len(covered) <= 0.99


def test_an_interval_has_what_its_size_would_have_been_off():
    bump = curve(lambda size: LINE(size) * (1.3 if size == MIB else 1.0))
    assert bump.at(MIB).high > 1.2 * bump.at(MIB).most


def test_the_interval_widens_past_the_ends():
    """By how far off such predictions are from a part of the sizes."""
    before = curve(noise=0.05)
    assert before.spread(GRID[-1])[1] < 1.3
    bent = curve(lambda size: LINE(size) * (1 + size / GRID[-1]), caches=())
    inside, past = bent.at(GRID[-1] / 2), bent.at(4 * GRID[-1])
    assert past.high / past.most > 1.4 * inside.high / inside.most
    assert past.low <= LINE(4 * GRID[-1]) * 5 <= 1.5 * past.high


def test_an_interval_without_enough_points_is_wide_and_said_to_be_assumed():
    found = curve(sizes=(MIB, 2 * MIB, 4 * MIB)).at(1.5 * MIB)
    assert found.high / found.low == pytest.approx(4)
    measured = curve(sizes=(MIB, 2 * MIB, 4 * MIB, 8 * MIB)).at(1.5 * MIB)
    assert not measured.is_assumed
    for made in (found, found.times(2), measured + found, found.over(measured), measured.between(found)):
        assert made.is_assumed
    assert plan.Epoch(9, 9, 9, 1.0, overlap=0.5).seconds(found).is_assumed


def test_the_middle_of_one_source_is_its_estimate():
    values = [number * 1e-4 for number in range(1, 500)]
    assert [Estimate.exact(value).middle for value in values] == values


# Sources.


def test_profiles_that_differ_give_a_range():
    slow = profile({stage: lambda size, each=each: 2 * each(size) for stage, each in STAGES.items()}, source="two.json")
    (both,) = by_machine([SOURCE.profiles[0], slow])
    found = plan.plan_by_each(both, lambda source: plan.plan_transfer(source, "to_device", MIB, 2))
    assert found.seconds.values == pytest.approx([LINE(MIB), LINE(MIB), 2 * LINE(MIB), 2 * LINE(MIB)])
    assert dict(found.sources) == pytest.approx({"one.json": LINE(MIB), "two.json": 2 * LINE(MIB)})
    assert [each["name"] for each in found.as_dict()["sources"]] == ["one.json", "two.json"]


def test_machines_are_kept_apart():
    same = {"caches": None, "features": ("aes",)}  # not known of the other
    for change, groups in (
        ({"threads": 4}, 2),
        ({"caches": (1,)}, 2),
        ({"cpu": "x"}, 2),
        ({"device": "x"}, 2),
        (same, 1),
    ):
        other = Profile("two.json", replace(MACHINE, **change), SOURCE.profiles[0].stages)
        assert len(by_machine([SOURCE.profiles[0], other])) == groups, change
    vaes = replace(MACHINE, features=("aes", "vaes"))
    assert not vaes.may_be(replace(MACHINE, features=("aes",)))


def test_only_measured_numbers_of_threads_and_ranks_are_predicted():
    with pytest.raises(OutOfReachError, match="to_device, 1 thread; to_device, 2 threads; got to_device, 3 threads"):
        plan.plan_transfer(SOURCE, "to_device", MIB, 3)
    with pytest.raises(OutOfReachError, match=r"'to_hots'; it has .*"):
        plan.plan_transfer(SOURCE, "to_hots", MIB, 2)
    with pytest.raises(OutOfReachError, match="got all-reduce, sealed, 3 ranks"):
        plan.plan_collective(SOURCE, [MIB], "sealed", 3, 25)


def test_rows_between_sizes_that_were_measured_have_times_between():
    low, high = (SOURCE.rows("random rows", 2, row, 256).most for row in (1024, 4096))
    assert SOURCE.rows("random rows", 2, 2560, 256).most == pytest.approx((low + high) / 2)
    assert SOURCE.rows("random rows", 2, 16384, 256).most == SOURCE.at(Stage("random rows", 2, 4096), 4 * MIB).most
    assert SOURCE.rows("random rows", 2, 256, 256).most == pytest.approx(low)  # as many chunks
    for row in (255, 16385):
        with pytest.raises(OutOfReachError, match="expected rows of 256 to 16384 bytes"):
            SOURCE.rows("random rows", 2, row, 256)


def test_published_figures_give_ranges_that_say_they_are_not_validated():
    published = Published.of(["all"])
    found = plan.plan_by_each(published, lambda source: plan.plan_transfer(source, "to_device", 38_535_168, 0))
    assert found.label == UNVALIDATED
    by_path = {row.path: row.seconds for row in toll.transfers([38_535_168])}
    assert (found.seconds.least, found.seconds.most) == (min(by_path.values()), max(by_path.values()))
    assert {name.removesuffix(" (transfer)") for name, _ in found.sources} == set(by_path)
    ring = plan.plan_collective(Published.of(["exchange"]), [100 * MIB], "sealed", 4, 25)
    assert ring.seconds.most == pytest.approx(4 * 6 * toll.line("hops", "exchange")(25 * MIB / 4))
    with pytest.raises(OutOfReachError, match="no published figure"):
        plan.plan_checkpoint(published, MIB, 0)
    with pytest.raises(OutOfReachError, match="expected one of all, driver"):
        Published.of(["drivers"])


def test_published_figures_are_taken_for_nothing_that_they_are_not_about():
    published = Published.of(["all"])
    for way in ("plain", "gloo", "banana"):
        with pytest.raises(OutOfReachError, match="a transfer to a GPU or all-reduce, sealed"):
            plan.plan_collective(published, [MIB], way, 2, 25)
    assert "fitted" not in published.hops  # to one paper, which published no such hop
    assert Published.of(["fitted"]).hops == ("fitted",)
    with pytest.raises(OutOfReachError, match=r"no published figure is about anything else.*--cached"):
        plan.plan_load(published, [MIB], 0)
    plan.plan_load(published, [MIB], 0, is_cold=False)
    epoch = plan.plan_epoch(published, plan.Epoch(99, 1024, 9, 0.0))
    assert epoch.parts[0].name.endswith("the copy to the GPU, without gathering")
    assert "how far they hold is not known" in epoch.notes[-1]
    for name, stage, told in (
        ("exchange", "to_device", r"name of a transfer, one of driver, .*; got exchange, a hop"),
        ("driver", "all-reduce, sealed", r"name of a hop, one of exchange, .*; got driver, a transfer"),
    ):
        with pytest.raises(OutOfReachError, match=told):
            Published.of([name]).at(Stage(stage, ranks=2), MIB)


# Jobs.


def test_transfers_name_the_threads_and_the_sizes_that_would_help():
    found = plan.plan_transfer(SOURCE, "to_device", 64 << 10, 1, count=100)
    assert found.seconds.most == pytest.approx(100 * line(20e-6, 5e9)(64 << 10))
    moves = {move.name: move.seconds.most for move in found.moves}
    assert moves["2 threads"] == pytest.approx(100 * LINE(64 << 10))
    assert moves["one message of 6.2 MiB"] == pytest.approx(line(20e-6, 5e9)(100 * (64 << 10)))
    assert [move.of for move in found.moves] == sorted(move.of for move in found.moves)
    sealed = plan.plan_transfer(SOURCE, "to_device, plain tensor", MIB, 2)
    assert [move.name for move in sealed.moves] == ["sealed before, by its owner"]
    assert plan.plan_transfer(SOURCE, "to_device", 2 << 30, 2, count=4).moves == ()  # out of reach, or of no use


def test_an_epoch_is_the_sum_or_the_longer_of_data_and_compute():
    data = line(50e-6, 1e9)(256 * 1024)
    epoch = plan.Epoch(25_600, 1024, 256, 0.001, threads=2)
    times = {
        overlap: plan.plan_epoch(SOURCE, replace(epoch, overlap=overlap)).seconds.most for overlap in (0.0, 0.5, 1.0)
    }
    assert times[0.0] == pytest.approx(100 * (data + 0.001))
    assert times[1.0] == pytest.approx(data + 100 * 0.001)
    assert times[0.5] == pytest.approx((times[0.0] + times[1.0]) / 2)
    unknown = plan.plan_epoch(SOURCE, epoch)
    assert (unknown.seconds.least, unknown.seconds.most) == pytest.approx((times[1.0], times[0.0]))
    assert unknown.notes[0].endswith("--overlap or --trace tells")
    assert unknown.bottleneck == "compute"
    quick = plan.plan_epoch(SOURCE, replace(epoch, compute=1e-5, overlap=1.0))
    assert quick.seconds.most == pytest.approx(100 * data + 1e-5)
    assert quick.bottleneck.startswith("random rows")
    assert {move.name for move in quick.moves} >= {"contiguous rows"}
    loaded = plan.plan_epoch(SOURCE, replace(epoch, pattern="random rows, DataLoader", compute=0.0, overlap=0.0))
    assert loaded.seconds.most == pytest.approx(100 * (data + 30e-6))
    assert {move.name for move in loaded.moves} >= {"contiguous rows", "rows taken without a DataLoader"}
    assert "batches fetched while a step goes on" not in {move.name for move in quick.moves}


def test_a_checkpoint_is_held_against_a_notice_and_a_rate_of_revocations():
    noisy = Measured(MACHINE, (profile(STAGES, noise=0.2),))
    took = noisy.at(Stage("save", 2), 512 * MIB)
    for notice, word in ((1.01 * took.high, "fits"), (took.middle, "may not fit"), (0.99 * took.low, "does not fit")):
        assert f" {word} in a notice" in plan.plan_checkpoint(noisy, 512 * MIB, 2, notice=notice).notes[0]
    quick, likely, slow = plan.schedules(noisy, 512 * MIB, 2, 3600.0, 60.0)
    assert quick.save < likely.save < slow.save
    assert likely.save == pytest.approx(took.middle)
    model = Revocations(3600.0, likely.save, likely.restart)
    assert likely.restart == pytest.approx(60 + noisy.at(Stage("load, from disk", 2), 512 * MIB).middle)
    assert (likely.young, likely.daly, likely.best) == (model.young(), model.daly(), model.best())
    assert likely.costs["best"] == model.at(model.best())
    for mean in (1.0, 1e-3):
        with pytest.raises(OutOfReachError, match="leave time to work"):
            plan.schedules(noisy, 512 * MIB, 2, mean, 60.0)


def test_buckets_are_sent_beside_a_backward_pass_as_on_the_clock_of_the_toll():
    training = toll.Training("some", [3_000_000, 5_000_000, 9_000_000, 1_000_000], 0.3, 0.0)
    sizes = [4 * count for count in training.gradients]
    for compute in (0.0, 0.02, 0.2):
        found = plan.plan_collective(SOURCE, sizes, "sealed", 2, 25, compute=compute, overlap=1.0)
        timed = replace(training, passes=1.5 * compute)  # two thirds of which are the backward pass
        clock = toll.run(timed, 2, toll.Line(1e-3 / 2, 2 / 1e9 / 2), 25)  # two hops of a half each
        assert found.seconds.most == pytest.approx(clock.end - compute / 2, rel=1e-6)
        serial = plan.plan_collective(SOURCE, sizes, "sealed", 2, 25, compute=compute, overlap=0.0)
        assert serial.seconds.most == pytest.approx(compute + serial.parts[0].seconds.most)
        range_of = plan.plan_collective(SOURCE, sizes, "sealed", 2, 25, compute=compute)
        assert [note.endswith("nothing. --overlap tells") for note in range_of.notes] == [True] * (compute > 0)
        unknown = range_of.seconds
        assert (unknown.least, unknown.most) == pytest.approx((found.seconds.most, serial.seconds.most))
    assert plan.buckets([100 * MIB], 25) == [25 * MIB] * 4


@pytest.mark.skipif(not RESULTS.is_dir(), reason="the tests run without the results")
def test_iterations_are_the_sum_of_compute_and_buckets_where_ranks_share_processors():
    measured = json.loads((RESULTS / "2026-11-22-collectives-cpu-xeon-avx512-2cores.json").read_text())
    whole = parse_profile(measured, "xeon")
    source = Measured(whole.machine, (replace(whole, machine=replace(whole.machine, caches=())),))  # gaps of 5
    sizes = [4 * count for count in toll.Training.of("GPT-2 small").gradients]
    times = {(row["ranks"], row["way"]): row for row in measured["collectives"] if row["subject"] == "GPT-2 small"}
    for (ranks, way), row in times.items():
        if way != "alone":
            alone = times[ranks, "alone"]["quartiles"][0]
            found = plan.plan_collective(source, sizes, way, ranks, 25, compute=alone, overlap=0.0).seconds
            assert found.middle == pytest.approx(row["quartiles"][0], rel=0.1), (ranks, way)


def test_fewer_ranks_and_larger_buckets_are_named_where_they_help():
    found = plan.plan_collective(SOURCE, [1000] * 10_000, "sealed", 4, 0.1)
    assert [move.name for move in found.moves][-1] == "2 ranks"
    assert {"buckets of 50 MiB", "2 ranks"} <= {move.name for move in found.moves}


def test_loading_adds_files_and_tells_the_disk_from_the_rest():
    found = plan.plan_load(SOURCE, [MIB, 512 * MIB], 2)
    cold = line(1e-4, 1e9)
    assert found.seconds.most == pytest.approx(cold(MIB) + cold(512 * MIB))
    assert found.bottleneck == "the disk"
    assert found.moves[0].name == "files in the page cache"
    many = plan.plan_load(SOURCE, [MIB, 512 * MIB], 2, tensors=102)
    assert many.seconds.most == pytest.approx(found.seconds.most + 100 * LINE(16 << 10))
    assert plan.plan_load(SOURCE, [MIB], 2, tensors=100_000).bottleneck == "99999 messages more"
    warm = plan.plan_load(SOURCE, [MIB], 2, is_cold=False)
    assert warm.seconds.most == pytest.approx(line(1e-4, 4e9)(MIB))


# Traces.


def event(name, start, length, track=1):
    return {"ph": "X", "name": name, "ts": start, "dur": length, "pid": 1, "tid": track}


def observed(*events):
    return parse_trace({"traceEvents": [{"ph": "M", "name": "thread_name"}, *events]})["to_device"]


def test_a_trace_tells_steps_that_overlap_from_steps_that_do_not():
    others = event("open", 500, 900), event("all_reduce", 500, 900)
    serial = observed(event("to_device", 0, 100), event("source", 0, 40), event("open", 40, 60), *others)
    assert (serial.overlap, serial.is_overlapped, serial.bottleneck) == (0, False, "open")
    beside = observed(event("to_device", 0, 100), event("source", 0, 90), event("open", 10, 90, 2))
    assert beside.overlap == pytest.approx(1 - 100 / 180)
    assert beside.is_overlapped
    # Two threads in one step are one step.
    threads = observed(event("to_device", 0, 100), event("open", 0, 100), event("open", 0, 100, 2))
    assert (threads.overlap, threads.steps) == (0, {"open": pytest.approx(1e-4)})
    told = plan.plan_transfer(SOURCE, "to_device", MIB, 2, observed=beside)
    assert "overlapped by 44%: source 50%, open 50%" in told.notes[0]
    assert told.bottleneck == "to_device: source"
    assert "one after the other" in plan.plan_transfer(SOURCE, "to_device", MIB, 2, observed=serial).notes[0]


def test_a_trace_of_batches_tells_how_much_of_fetching_is_hidden():
    for pace, overlap in ((130, 0.0), (115, 0.5), (100, 1.0), (90, 1.0), (200, 0.0)):
        batches = observed(*(event("to_device", number * pace, 30) for number in range(5)))
        assert batches.overlap_with(100e-6) == pytest.approx(overlap)
    assert observed(event("to_device", 0, 30)).overlap_with(100e-6) is None
    two_a_step = observed(*(event("to_device", number * 50, 30) for number in range(12)))
    assert two_a_step.overlap_with(100e-6) is None  # no step is quicker than its compute
    slow_start = observed(*(event("to_device", number * 130 + 900 * (number > 0), 30) for number in range(12)))
    assert slow_start.overlap_with(100e-6) == pytest.approx(0)


@pytest.mark.parametrize(("each", "compute", "a_step"), [(5, 20, 2), (15, 10, 2), (5, 20, 3), (5, 20, 7), (30, 90, 2)])
def test_a_trace_of_several_transfers_a_step_does_not_tell_what_is_hidden(each, compute, a_step):
    step = a_step * each + compute
    starts = [number // a_step * step + number % a_step * each for number in range(30)]
    assert observed(*(event("to_device", start, each) for start in starts)).overlap_with(compute / 1e6) is None


def test_spans_of_no_length_are_no_runs():
    runs = observed(event("to_device", 0, 10), event("to_device", 20, 0), event("open", 1, 0), event("open", 1, 2))
    assert (runs.runs, runs.steps) == (1, {"open": pytest.approx(2e-6)})
    with pytest.raises(ValueError, match="no transfer"):
        observed(event("to_device", 0, 0), event("to_device", 10, 0))


# Validation.


def test_lines_are_validated_without_an_error_and_bandwidths_with_one():
    trials = leave_out(SOURCE.profiles[0])
    everything = next(trials.summaries())
    assert everything.error == pytest.approx((0, 0), abs=1e-9)
    assert everything.baseline[1] > 0.5
    assert everything.gap == 4
    noisy = next(leave_out(profile(STAGES, noise=0.1, runs=11)).summaries())
    assert 0.87 <= noisy.covered <= 0.99
    assert 0.02 < noisy.error[0] < 0.1
    assert {trial.gap for trial in leave_out(SOURCE.profiles[0], every=2).trials} == {16}
    later = next(predict_later(SOURCE.profiles[0], SOURCE.profiles[0]).summaries())
    assert later.error == pytest.approx((0, 0), abs=1e-9)


def test_a_size_that_is_left_out_does_not_take_part():
    """Neither in its prediction nor in its interval."""
    whole = profile({STAGE: LINE}, noise=0.1)
    changed = tuple(replace(point, runs=(9.0,) * 9) if point.size == MIB else point for point in whole.stages[STAGE])
    other = replace(whole, stages={STAGE: changed})
    before, after = (next(t for t in leave_out(each).trials if t.size == MIB) for each in (whole, other))
    assert (before.predicted, before.width) == (after.predicted, after.width)
    assert before.measured != after.measured == 9


def test_what_would_be_refused_is_counted_apart():
    trials = leave_out(profile({STAGE: LINE}, sizes=GRID[::3], machine=replace(MACHINE, caches=(512 << 10,))))
    assert {trial.size for trial in trials.refused} == {128 << 10, 1 << 20}  # next to the edge
    assert {trial.size for trial in trials.trials} == {8 << 20, 64 << 20}
    assert {trial.gap for trial in (*trials.trials, *trials.refused)} == {64}
    assert [each.of for each in trials.summaries()][-1] == "refused, as too far"


def test_what_is_four_times_past_is_validated_too():
    trials = reach_past(profile({STAGE: LINE}))
    assert {trial.gap for trial in (*trials.trials, *trials.refused)} == {4}
    assert {trial.size for trial in trials.refused} == {size * MIB for size in (1, 2, 4, 16, 32, 64)}  # past an edge
    assert next(trials.summaries()).error == pytest.approx((0, 0), abs=1e-9)


def test_rows_are_validated_by_the_rows_of_other_sizes():
    stages = {Stage("random rows", 2, row): line(50e-6, 1e9) for row in (512, 1024, 2048, 4096)}
    trials = leave_out_rows(profile(stages, sizes=[row * 256 for row in (512, 1024, 2048, 4096)]))
    assert {trial.stage.row for trial in trials.trials} == {1024, 2048}
    assert next(trials.summaries()).error == pytest.approx((0, 0), abs=1e-9)
    stages[Stage("random rows", 2, 1024)] = line(100e-6, 0.5e9)  # twice as long
    odd = leave_out_rows(profile(stages, sizes=[row * 256 for row in (512, 1024, 2048, 4096)]))
    assert {round(trial.predicted / trial.measured, 3) for trial in odd.trials if trial.stage.row == 1024} == {0.5}


def test_halves_of_the_runs_give_the_floor_of_the_noise():
    trial = leave_out(profile({STAGE: LINE}, runs=12, noise=0.1)).trials[0]
    assert 0 < trial.noise < 0.3
    assert leave_out(profile({STAGE: LINE}, runs=5)).trials[0].noise is None


def test_estimates_add_and_overlap_by_their_ends():
    one, two = Estimate(1, 2, 3, 4), Estimate(2, 2, 2, 2)
    assert (one + two).values == (3, 4, 5, 6)
    assert one.over(two).values == (2, 2, 3, 4)
    assert one.between(two).values == (1, 2, 3, 4)
    assert one.times(2).values == (2, 4, 6, 8)


def test_plans_are_documents():
    found = plan.plan_by_each(SOURCE, lambda source: plan.plan_load(source, [MIB], 2))
    assert json.loads(json.dumps(found.as_dict()))["seconds"] == asdict(found.seconds)
    assert document(STAGES)["plan"]
