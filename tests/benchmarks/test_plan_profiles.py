"""Profiles and traces that are read: of each kind of result, and nothing that is none."""

import copy
import json
import os
import random
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.profiles import CACHES, GRID, STAGES, document

from fastrack._transfer.trace_file import trace
from fastrack.errors import FormatError

pytest.importorskip("fastrack_bench")

from fastrack_bench.prediction import gather
from fastrack_bench.prediction.profiles import Row, Stage, lower_quartile, parse_profile, read_profile, read_profiles
from fastrack_bench.prediction.traces import read_trace
from fastrack_bench.prediction.validation import leave_out

RESULTS = Path(__file__).parents[2] / "bench/results"
GARBAGE = (None, True, -1, 0, 1e300, 1 << 60, "", "x" * 99, "\x1b[2J", [], {}, [None], {"a": 1}, "1.0")
WORDS_OF_PYTHON = re.compile(
    "indices|NoneType|'(int|str|list|dict|float)'|attribute|iterable|unhash|unpack|not in list"
)
TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "x"}},
        {"ph": "X", "name": "to_device", "ts": 1.0, "dur": 9.0, "pid": 1, "tid": 1, "args": {}},
        {"ph": "X", "name": "open", "ts": 2, "dur": 3, "pid": 1, "tid": 1, "args": {}},
    ]
}


def small():
    return document({Stage("to_device", 2): STAGES[Stage("to_device", 2)]}, GRID[:2])


def of_bench():
    row = {"direction": "to_device", "size": 65536, "step": "+ overlap", "runs": 9, "seconds": 2e-5}
    rows = [row | {"quartiles": [1e-5, 4e-5]}, row | {"quartiles": [1e-5, 4e-5], "step": "+ direct"}]
    reduced = {"subject": "all-reduce", "ranks": 2, "size": 1 << 20, "way": "sealed", "runs": 9, "seconds": 0.002}
    collectives = [reduced | {"quartiles": [0.001, 0.004]}]
    return {"machine": {"cpu": {"model": "x", "threads": 2}}, "ablation": rows, "collectives": collectives}


def leaves(value, path=()):
    yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(each, (*path, key))


def changed(value, path, new):
    """The value with another one at a path, or without it for `leaves`."""
    if not path:
        return new
    value = copy.deepcopy(value)
    at = value
    for key in path[:-1]:
        at = at[key]
    if new is leaves:
        del at[path[-1]]
    else:
        at[path[-1]] = new
    return value


def read(folder, content, reader=read_profile):
    path = folder / "some.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return reader(path)


def refusal(folder, content, reader):
    """The text of the error, None if it was read. Another error than `FormatError` comes through."""
    try:
        read(folder, content, reader)
    except FormatError as error:
        return str(error)
    return None


def test_a_profile_is_read_as_it_was_measured(tmp_path):
    rows = [Row(Stage("save", 2), size, (3.00001, 1.0, 2.0)) for size in (2048, 1024)]
    found = read(tmp_path, small() | {"plan": [row.as_dict() for row in rows]})
    assert found.machine.caches == CACHES
    (points,) = found.stages.values()
    assert [(point.size, point.runs) for point in points] == [(1024, (3.0, 1.0, 2.0)), (2048, (3.0, 1.0, 2.0))]
    assert points[0].seconds == lower_quartile((1.0, 2.0, 3.0)) == 1.5


def test_profiles_of_one_name_are_told_apart_by_their_folders(tmp_path):
    paths = [tmp_path / name for name in ("a/here.json", "b/here.json", "there.json")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(small()))
    assert [profile.source for profile in read_profiles(paths)] == [str(paths[0]), str(paths[1]), "there.json"]


def test_bench_gives_its_lower_quartiles_and_tails_by_them(tmp_path):
    found = read(tmp_path, of_bench())
    assert set(found.stages) == {Stage("to_device", 2), Stage("all-reduce, sealed", ranks=2)}
    (point,) = found.stages[Stage("to_device", 2)]
    assert point.seconds == 1e-5
    assert point.runs[-1] == pytest.approx(2e-5 * 2 ** (1.6449 / 0.6745))
    assert found.machine.caches is None
    content = of_bench()
    content["ablation"][0]["quartiles"] = [3e-5, 4e-5]
    with pytest.raises(FormatError, match="quartiles"):
        read(tmp_path, content)


def test_fewer_than_three_runs_are_no_measurement(tmp_path):
    content = small()
    content["plan"][0]["seconds"] = [1.0, 1.0]
    assert [point.size for points in read(tmp_path, content).stages.values() for point in points] == [GRID[1]]
    for row in content["plan"]:
        row["seconds"] = [1.0]
    with pytest.raises(FormatError, match="at least three runs"):
        read(tmp_path, content)


@pytest.mark.skipif(not RESULTS.is_dir(), reason="the tests run without the results")
def test_results_of_each_machine_are_profiles():
    planned = [path for path in RESULTS.glob("*.json") if "cores" in path.name]
    names = [path.name for path in planned if any(kind in path.name for kind in ("-plan-", "-bench-", "-collectives-"))]
    assert len(names) >= 2
    for name in names:
        assert read_profile(RESULTS / name).stages, name


@pytest.mark.parametrize("make", [small, of_bench])
def test_whatever_a_profile_holds_it_is_read_or_refused(tmp_path, make):
    whole, refused = make(), 0
    for path in leaves(whole):
        for garbage in (*GARBAGE, leaves):
            if path == () and garbage is leaves:
                continue
            said = refusal(tmp_path, changed(whole, path, garbage), lambda path: leave_out(read_profile(path)))
            assert said is None or ("some.json: profile: expected JSON" in said and len(said) < 500)
            assert not WORDS_OF_PYTHON.search(said or "")
            refused += said is not None
    assert refused > 100


def test_whatever_a_trace_holds_it_is_read_or_refused(tmp_path):
    assert read(tmp_path, TRACE, read_trace)["to_device"].seconds == pytest.approx(9e-6)
    for path in leaves(TRACE):
        for garbage in (*GARBAGE, leaves):
            if path == () and garbage is leaves:
                continue
            said = refusal(tmp_path, changed(TRACE, path, garbage), read_trace)
            assert said is None or "some.json: trace: expected JSON" in said
            assert not WORDS_OF_PYTHON.search(said or "")


def test_text_that_is_cut_or_altered_is_refused_or_read(tmp_path):
    whole, chosen = json.dumps(small()), random.Random(0)
    for _ in range(300):
        at = chosen.randrange(len(whole))
        cut = chosen.choice([whole[:at], whole[:at] + chosen.choice('"{}[],:0-e\x00') + whole[at + 1 :]])
        refusal(tmp_path, cut, read_profile)


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(small()).replace('"threads": 2', '"threads": NaN'),
        json.dumps(small()).replace('"row": 0', '"row": 0, "row": 1'),
        json.dumps(small()).replace(f'"size": {GRID[1]}', f'"size": {GRID[0]}'),
        "[" * 100_000,
        '{"machine": ' + "9" * 5000 + "}",
        "\udc80".encode("utf-8", "surrogateescape").decode("latin-1"),
    ],
)
def test_what_is_ambiguous_is_refused(tmp_path, content):
    with pytest.raises(FormatError):
        read(tmp_path, content)


def test_a_trace_is_no_profile(tmp_path):
    with pytest.raises(FormatError, match="--trace"):
        read(tmp_path, TRACE)


def test_a_trace_of_fastrack_is_read(tmp_path):
    from fastrack import Channel, Key, seal

    key = Key.generate()
    sealed = seal(np.zeros(1 << 20, np.uint8), key)
    with Channel("cpu", keys=key) as channel, trace(tmp_path / "t.json"):
        for _ in range(3):
            channel.to_device(sealed, framework="numpy")
    found = read_trace(tmp_path / "t.json")["to_device"]
    assert found.runs == 3
    assert found.bottleneck in found.steps
    assert set(found.steps) >= {"prepare", "open"}
    assert 0 <= found.overlap < 1


# What `fastrack plan measure` measures.


def test_a_folder_in_memory_has_no_disk_to_load_from(tmp_path, monkeypatch):
    device = tmp_path.stat().st_dev
    mounts, number = tmp_path / "mountinfo", f"{os.major(device)}:{os.minor(device)}"
    for kind, of, forgets in (("tmpfs", number, False), ("ext4", number, True), ("tmpfs", "999:9", True)):
        mounts.write_text(f"1 2 {of} / /x rw shared:1 - {kind} none rw\n3 4 999:8 / /y rw - tmpfs none rw\n")
        assert gather.forgets(tmp_path, mounts) == (forgets and hasattr(os, "posix_fadvise"))
    for has_disk in (True, False):
        monkeypatch.setattr(gather, "forgets", lambda _, has_disk=has_disk: has_disk)
        with ExitStack() as stack:
            names = {task.stage.name for task in gather._tasks(stack, [1024], tmp_path)}
        assert names >= {"save", "load"}
        assert ("load, from disk" in names) == has_disk


@pytest.mark.slow
def test_all_stages_are_measured_at_sizes_a_factor_of_two_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "forgets", lambda _: True)
    rows = gather.measure_stages(tmp_path, largest=128 << 10, rounds=3, ranks=())
    found = parse_profile(document({}, ()) | {"plan": [row.as_dict() for row in rows]}, "measured")
    names = {stage.name for stage in found.stages}
    assert names >= {"to_device", "to_host", "save", "load", "load, from disk", "random rows", "contiguous rows"}
    assert {stage.threads for stage in found.stages if stage.name == "to_device"} >= {1}
    for stage, points in found.stages.items():
        sizes = [point.size for point in points]
        assert [size // sizes[0] for size in sizes] == [1 << number for number in range(len(sizes))], stage
        assert min(len(point.runs) for point in points) >= 3
    assert list(tmp_path.iterdir())


def test_collectives_are_measured_with_all_their_runs(monkeypatch):
    def measure(ranks, sizes, **_):
        return [
            SimpleNamespace(way="sealed", ranks=count, size=int(size * 2**20), times=(1.0,) * 6)
            for count in ranks
            for size in sizes
        ]

    module = SimpleNamespace(measure_collectives=measure)
    monkeypatch.setitem(sys.modules, "fastrack_bench.collectives", module)
    monkeypatch.setattr(gather, "find_spec", lambda _: True)
    rows = list(gather._collectives((2, 3), 1 << 20, 3, lambda _: None))
    assert {len(row.seconds) for row in rows} == {12}
    assert {row.size for row in rows} == {65536 << shift for shift in range(5)}
    assert {row.stage.ranks for row in rows} == {2, 3}
