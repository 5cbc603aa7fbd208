"""`trace`: what it writes down, and what it must not disturb."""

import json
import os
import threading
import time
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from helpers import file_systems
from helpers.cuda_rig import sized, within
from helpers.fake_cuda import MODES, FakeDriver
from helpers.forking import in_forked_child
from helpers.host_gpu import standing_in
from helpers.staged import staged_channel
from helpers.tampering import tampered
from helpers.trace_processor import open_trace

import fastrack
from fastrack import AuthenticationError, Channel, DeviceError, Key
from fastrack._crypto import workers
from fastrack._transfer import timeline, trace_file
from fastrack._util import trace
from fastrack.format import CHUNK_SIZE, HEADER_SIZE, SEALED_CHUNK_SIZE

KEY = Key.from_bytes(bytes(range(32)))
PLAIN = np.random.default_rng(0).integers(0, 256, 40 * CHUNK_SIZE + 5, np.uint8)
SEALED = fastrack.seal(PLAIN, KEY, name="images")


SmallDevice = sized(most=4, first=1)


def traced(path, action):
    with fastrack.trace(path):
        action()
    return spans_of(path)


def spans_of(path):
    """The spans of a trace, each with the names of its process and thread, in the order of their starts."""
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    names = {(e["name"], e["tid"]): e["args"].get("name") for e in trace["traceEvents"] if e["ph"] == "M"}
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    for span in spans:
        span["process"], span["thread"] = (names[f"{kind}_name", span["tid"]] for kind in ("process", "thread"))
        span["stop"] = round(span["ts"] + span["dur"], 3)
    return sorted(spans, key=lambda span: (span["ts"], -span["dur"]))


def mine(spans):
    return [span for span in spans if span["thread"] == threading.current_thread().name]


def names(spans):
    return [span["name"] for span in spans]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "timeline.json"


@pytest.fixture
def opened():
    with Channel("cpu", keys=KEY) as channel:
        yield channel


def test_a_sealed_tensor_is_opened_where_it_lies(opened, path):
    spans = mine(traced(path, lambda: opened.to_device(SEALED, framework="numpy")))
    assert names(spans) == ["to_device", "prepare", "open", "release"]
    assert spans[0]["args"] == {"bytes": PLAIN.nbytes, "tensor": "images"}
    assert spans[2]["args"] == {"chunk": 0, "sealed": SEALED.chunks.size}


def test_a_plain_tensor_is_shown_slab_by_slab(path):
    with staged_channel(keys=KEY) as staged:
        whole, *parts = mine(traced(path, lambda: staged.to_device(PLAIN)))
    sources = [span["args"]["sealed"] for span in parts if span["name"] == "source"]
    assert len(sources) > 4
    assert sum(sources) == SEALED.chunks.size
    assert names([whole, parts[0]]) == ["to_device", "prepare"]
    assert names(parts[1:-1]) == ["wait", "source", "submit"] * len(sources)
    assert whole["ts"] <= parts[0]["ts"]
    assert parts[-1]["stop"] <= whole["stop"]
    assert all(a["stop"] <= b["ts"] for a, b in pairwise(parts))


def test_what_leaves_a_device_is_shown(opened, path):
    spans = mine(traced(path, lambda: opened.to_host(PLAIN, name="back")))
    assert names(spans) == ["to_host", "prepare", "seal", "release"]
    assert spans[0]["args"] == {"bytes": PLAIN.nbytes, "tensor": "back"}


def test_the_spans_of_a_transfer_add_up_to_it(opened, path):
    plain = np.zeros(64 << 20, np.uint8)
    sealed, shares = fastrack.seal(plain, KEY), []
    for _ in range(5):  # a run that was interrupted between two spans may try again
        whole, *parts = mine(traced(path, lambda: opened.to_device(sealed, out=plain)))
        shares.append(sum(span["dur"] for span in parts) / whole["dur"])
    assert 0.95 <= max(shares) <= 1 + 1e-9


@pytest.mark.slow
def test_perfetto_reads_the_trace_of_256_mib(opened, path):
    plain = np.zeros(256 << 20, np.uint8)
    sealed, shares = fastrack.seal(plain, KEY), []
    children = """
        select whole.dur as whole, sum(part.dur) as parts, count(*) as count
        from slice whole join slice part on part.parent_id = whole.id where whole.name = 'to_device'
    """
    for _ in range(3):
        with fastrack.trace(path):
            start = time.perf_counter_ns()
            opened.to_device(sealed, out=plain)
            wall = time.perf_counter_ns() - start
        with open_trace(path) as processor:
            assert processor.errors() == {}
            (found,) = processor.query(children)
            threads = {row["name"] for row in processor.query("select name from thread")}
        assert found["count"] == 3
        assert threads >= {"MainThread"}
        shares.append(found["parts"] / wall)
    assert 0.95 <= max(shares) <= 1 + 1e-9


def test_threads_that_help_have_rows_of_their_own(path, monkeypatch):
    monkeypatch.setattr(workers.run, "__kwdefaults__", dict.fromkeys(workers.run.__kwdefaults__, 1))
    with Channel("cpu", keys=KEY, threads=2) as opened:
        if opened._engine.name == "openssl":
            pytest.skip("this engine has no helpers")
        others: list = []
        for _ in range(2000):  # one who comes too late finds nothing to do
            spans = traced(path, lambda: opened.to_device(SEALED, framework="numpy"))
            others += [span for span in spans if span["thread"].startswith("fastrack_")]
            if others:
                break
    assert {span["name"] for span in others} == {"open"}


def test_each_thread_has_a_row(opened, path):
    def work():
        threads = [threading.Thread(target=opened.to_device, args=(PLAIN,), name=f"user {n}") for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    spans = [span for span in traced(path, work) if span["name"] == "to_device"]
    assert {span["thread"] for span in spans} == {"user 0", "user 1", "user 2"}
    assert len({span["tid"] for span in spans}) == 3


@pytest.fixture(params=MODES)
def gpu(request, monkeypatch):
    with standing_in(monkeypatch, FakeDriver(request.param), SmallDevice) as driver:
        opened = Channel("cuda:0", keys=KEY)
        yield driver, opened
        within(60, opened.close)


def test_a_gpu_has_a_row_for_each_stream(gpu, path):
    driver, opened = gpu
    spans = traced(path, lambda: opened.to_device(SEALED, framework="cupy"))
    rows = {(span["process"], span["thread"]) for span in spans}
    filled = [span["args"]["chunk"] for span in spans if span["name"] == "source"]
    assert names(spans).count("submit") == names(spans).count("issue") == len(filled)
    if driver.confidential:  # where events have no true times
        assert rows == {("host", "MainThread")}
        return
    assert rows == {("host", "MainThread"), ("cuda:0", "uploads"), ("cuda:0", "kernels")}
    copies, opens = (
        {span["args"]["chunk"]: span for span in spans if span["process"] == "cuda:0" and span["name"] == name}
        for name in ("copy", "open")
    )
    assert list(copies) == list(opens) == filled
    assert all(copies[chunk]["stop"] <= opens[chunk]["ts"] for chunk in copies)


def test_a_gpu_that_seals_is_shown(gpu, path):
    driver, opened = gpu
    x = opened.to_device(PLAIN)
    spans = traced(path, lambda: opened.to_host(x))
    seals, copies = (
        [span["args"]["chunk"] for span in spans if span["process"] == "cuda:0" and span["name"] == name]
        for name in ("seal", "copy")
    )
    assert seals == copies
    assert (len(seals) > 4) is not driver.confidential
    assert {span["thread"] for span in spans if span["name"] == "copy"} <= {"downloads"}


def test_a_transfer_that_was_not_waited_for_is_shown_all_the_same(gpu, path):
    driver, opened = gpu
    kept = []
    spans = traced(path, lambda: kept.append(opened.to_device(SEALED, framework="cupy", non_blocking=True)))
    assert np.array_equal(driver.read(kept.pop()), PLAIN)
    copies = 0 if driver.confidential else names(spans).count("source")
    assert (names(spans).count("copy"), names(spans).count("source") > 4) == (copies, True)


def test_a_device_whose_clock_runs_backwards_has_no_times(gpu, path, monkeypatch):
    driver, opened = gpu
    elapsed = driver.elapsed
    monkeypatch.setattr(driver, "elapsed", lambda *events: -1 - abs(elapsed(*events)))
    spans = traced(path, lambda: opened.to_device(SEALED, framework="cupy"))
    assert {span["process"] for span in spans} == {"host"}


def test_two_channels_to_one_gpu_have_rows_of_their_own(gpu, path):
    driver, opened = gpu
    with Channel("cuda:0", keys=KEY) as other:

        def move():
            kept = [each.to_device(SEALED, framework="cupy") for each in (opened, other, opened)]
            assert np.array_equal(driver.read(kept[1]), PLAIN)

        spans = [span for span in traced(path, move) if span["process"] == "cuda:0"]
    for row in {span["tid"] for span in spans}:
        assert all(a["stop"] <= b["ts"] for a, b in pairwise(span for span in spans if span["tid"] == row))
    assert len({span["tid"] for span in spans}) == (0 if driver.confidential else 4)


@pytest.mark.parametrize("gpu", ["lazy"], indirect=True)
def test_a_gpu_that_fails_loses_spans_and_says_so(gpu, path):
    driver, opened = gpu
    with fastrack.trace(path):
        opened.to_device(SEALED, framework="cupy")
        driver.fail_at(1, sticky=True)
    assert json.loads(path.read_text())["otherData"]["lost"] == 2 * names(spans_of(path)).count("submit") > 4
    driver.fail_at(None)


@pytest.mark.parametrize("number", range(3, 60, 3))
@pytest.mark.slow
def test_a_fault_under_a_trace_is_told_as_without(gpu, path, number):
    driver, opened = gpu
    moved = []
    driver.fail_at(number)
    with suppress(DeviceError), fastrack.trace(path):
        moved.append(opened.to_device(SEALED, framework="cupy"))
    driver.fail_at(None)
    assert all(np.array_equal(driver.read(x), PLAIN) for x in moved)
    assert spans_of(path)


def test_nothing_is_timed_while_no_trace_is_taken(gpu, path):
    driver, opened = gpu
    opened.to_device(SEALED, framework="cupy")
    assert trace.active is None
    assert driver.calls["elapsed"] == 0
    traced(path, lambda: opened.to_device(SEALED, framework="cupy"))
    assert (driver.calls["elapsed"] > 0) is not driver.confidential


def test_the_trace_of_a_block_that_fails_is_written(opened, path):
    with pytest.raises(AuthenticationError, match="chunk 7"), fastrack.trace(path):
        opened.to_device(tampered(SEALED, HEADER_SIZE + 7 * SEALED_CHUNK_SIZE), framework="numpy")
    assert names(mine(spans_of(path))) == ["to_device", "prepare", "open", "release"]
    assert trace.active is None


def test_there_is_one_trace_at_a_time(opened, path, tmp_path):
    with fastrack.trace(path):
        with pytest.raises(RuntimeError, match="already") as refusal, fastrack.trace(tmp_path / "other.json"):
            pass
        assert not hasattr(refusal.value, "__notes__")
        opened.to_device(PLAIN)
    assert spans_of(path)
    assert list(tmp_path.iterdir()) == [path]
    assert names(mine(traced(path, lambda: opened.to_device(PLAIN))))[0] == "to_device"  # and another one after it


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_done(tmp_path):
    done = []
    with pytest.raises(FileNotFoundError, match="make it first"), fastrack.trace(tmp_path / "no" / "trace.json"):
        done.append(1)
    with pytest.raises(OSError, match="name another"), fastrack.trace(tmp_path):
        done.append(1)
    assert not done
    assert trace.active is None


def test_an_error_of_the_block_is_told_before_one_of_its_trace(path):
    with file_systems.full(), pytest.raises(KeyError) as failure, fastrack.trace(path):
        raise KeyError
    assert "free some space" in failure.value.__notes__[0]
    with file_systems.full(), pytest.raises(OSError, match="free some space"), fastrack.trace(path):
        pass


def test_a_trace_that_is_being_written_ends_no_other(path, tmp_path, monkeypatch):
    dumps, inner = json.dumps, []

    def slow(*arguments, **options):
        monkeypatch.setattr(json, "dumps", dumps)
        begun = fastrack.trace(tmp_path / "other.json")
        begun.__enter__()
        inner.append(begun)
        return dumps(*arguments, **options)

    monkeypatch.setattr(json, "dumps", slow)
    with fastrack.trace(path):
        pass
    assert trace.active is not None
    inner[0].__exit__(None, None, None)
    assert trace.active is None
    assert sorted(tmp_path.iterdir()) == [tmp_path / "other.json", path]


@pytest.mark.slow
def test_what_is_no_transfer_has_no_spans(opened, path):
    plain = np.zeros(8 << 20, np.uint8)

    def work():
        opened.to_device(SEALED, framework="numpy")
        fastrack.unseal(fastrack.seal(plain, KEY), KEY)

    spans = [span for span in traced(path, work) if span["thread"] != threading.current_thread().name]
    assert all(span["name"] == "open" for span in spans)
    assert sum(span["dur"] for span in spans) <= mine(spans_of(path))[0]["dur"]


def test_a_trace_of_nothing_is_a_trace(path):
    assert traced(path, lambda: None) == []


def test_what_a_span_says_survives_a_name_that_json_must_escape(opened, path):
    sealed = fastrack.seal(PLAIN, KEY, name='a "name"\n\u2028 \U0001f512')
    assert mine(traced(path, lambda: opened.to_device(sealed)))[0]["args"]["tensor"] == sealed.name


def test_a_forked_child_traces_nothing_and_writes_nothing(path):
    with fastrack.trace(path):
        assert in_forked_child(lambda: trace.active is None)
        assert in_forked_child(lambda: fork_leaves_the_block(path.with_name("child.json")))
    assert list(path.parent.iterdir()) == [path]


def fork_leaves_the_block(path):
    reading, writing = os.pipe()
    with fastrack.trace(path):
        child = os.fork()
        if child:
            os.waitpid(child, 0)  # before anything is written here
    if child == 0:  # left the block of its parent
        os.write(writing, b"x" if path.exists() else b"-")
        os._exit(0)
    found = os.read(reading, 1) == b"-"
    path.unlink()
    return found


def test_spans_that_come_after_the_end_do_no_harm():
    with timeline.recording() as kept:
        pass
    kept.add("late", kept.zero, kept.zero + 5, {})
    assert [span.name for span in trace_file.spans_of(kept)] == ["late"]
