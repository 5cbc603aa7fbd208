"""Schedules of rollback, fork, swap and omission: none is accepted, and what is right always is."""

import os

import pytest
from helpers import rollbacks
from helpers.cases import each

from fastrack._sets import anchor, entries

SCHEDULES = int(os.environ.get("FASTRACK_SCHEDULES", "200"))


def run_many(count):
    accepted = 0
    for seed in range(count):
        try:
            accepted += rollbacks.run(seed)
        except rollbacks.Violation as error:
            error.add_note(f"seed {seed}")
            raise
    return accepted


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "count", [10, pytest.param(60, marks=pytest.mark.slow), pytest.param(SCHEDULES, marks=pytest.mark.nightly)]
)
def test_no_schedule_makes_a_reader_go_back(count):
    assert run_many(count) > count  # the reader opens something in most of them


@each(
    ("kind", "method", "fault"),
    [
        pytest.param(anchor._State, "require_before", lambda *_: None, id="any version"),
        pytest.param(entries.SealedEntry, "check", lambda *_: None, id="any sealed file"),
        pytest.param(entries.PlainEntry, "check", lambda *_: None, id="any other file"),
        pytest.param(anchor.Anchor, "advance", lambda _: None, id="an anchor that does not move"),
    ],
)
@pytest.mark.slow
def test_the_schedules_tell_of_a_check_that_is_left_out(monkeypatch, kind, method, fault):
    monkeypatch.setattr(kind, method, fault)
    with pytest.raises(rollbacks.Violation):
        run_many(100)
