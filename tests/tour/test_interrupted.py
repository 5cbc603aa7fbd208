"""Visits that are interrupted, late or in the way: one receipt each, no attempt lost, nothing left behind."""

import os
import stat
import threading
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from helpers.tour_rig import Rig

from fastrack import AuthenticationError, ClosedError, GrantError, RollbackError
from fastrack.tour import _visit


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path, order=("ada", "ada"))


def receipts(rig):
    return [receipt for _, receipt in rig.desks["ada"].receipts()]


def test_a_visit_that_is_interrupted_when_its_folder_is_whole_has_one_receipt(rig, monkeypatch):
    """Another receipt, of a visit that was broken off, would make its holder refuse the chain for good."""
    sync = os.fsync

    def interrupt(descriptor):
        sync(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) and (rig.folder / "v1").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.visit(0)
    monkeypatch.undo()
    chain = rig.visit(1)
    assert receipts(rig) == [visit.receipt for visit in chain.visits]


def test_a_folder_in_the_way_costs_no_attempt(rig):
    rig.visit(0)
    with pytest.raises(FileExistsError):
        rig.visit(0)
    assert rig.visit(1).visits[0].delegation.attempt == 1


@pytest.mark.parametrize("error", [ConnectionError, RollbackError, RuntimeError])
def test_a_receipt_that_its_holder_does_not_take_is_told_and_the_model_is_there(rig, error, caplog):
    class Deaf:
        def ask(self, step, body=b""):
            if step == "end":
                raise error("not now")
            return rig.desks["ada"].ask(step, body)

    rig.visit(0, holder_desk=Deaf())
    assert "sending the receipt of visit 0 to its holder failed: not now" in caplog.text
    chain = rig.visit(1)
    assert receipts(rig) == [visit.receipt for visit in chain.visits]


def test_a_visit_that_ends_too_late_tells_its_holder_that_it_was_broken_off(tmp_path):
    def slow(state, shards):
        next(shards)
        rig.moment += timedelta(minutes=11)
        return state

    rig = Rig(tmp_path, order=("ada",), train=slow)
    with pytest.raises(AuthenticationError, match="expected an end by"):
        rig.visit(0)
    [(consent, receipt)] = rig.desks["ada"].receipts()
    assert receipt.after is None
    assert receipt.ended > consent.expires
    assert (receipt.chunks, receipt.scrubbed) == (1, 64)


def test_a_clock_that_is_set_back_loses_no_visit(rig, monkeypatch):
    seconds = iter(range(60, 0, -1))
    monkeypatch.setattr(rig, "clock", lambda: rig.moment + timedelta(seconds=next(seconds)))
    rig.visit(0)
    assert receipts(rig)[0].started == receipts(rig)[0].ended


def test_the_keys_of_a_visit_that_its_holder_refuses_are_wiped(rig, monkeypatch):
    unlocked, unlock = [], _visit._unlock

    def unlock_and_keep(*given, **limits):
        unlocked.extend(unlock(*given, **limits))
        return unlocked

    monkeypatch.setattr(_visit, "_unlock", unlock_and_keep)
    monkeypatch.setattr(rig.desks["ada"], "name", "ben")
    with pytest.raises(RollbackError, match="expected a turn of ben"):
        rig.visit(0)
    assert [key.is_wiped for key in unlocked] == [True, True]


def test_a_buffer_is_scrubbed_though_another_thread_still_asks_for_a_shard(tmp_path, monkeypatch):
    kept, asked, left = [], threading.Event(), threading.Event()
    load = _visit.load_file

    def load_late(path):
        if threading.current_thread() is not threading.main_thread():
            asked.set()
            left.wait(30)
        return load(path)

    def leave(state, shards):
        def ask():
            with suppress(ClosedError, GrantError):  # the keys were wiped meanwhile
                next(shards)

        kept.append(next(shards)["x"])
        threads.append(threading.Thread(target=ask))
        threads[0].start()
        asked.wait(30)
        return state

    threads = []
    rig = Rig(tmp_path, order=("ada",), train=leave)
    monkeypatch.setattr(_visit, "load_file", load_late)
    with pytest.raises(ValueError, match="already executing"):
        rig.visit(0, data=2 * [rig.data("ada")])
    left.set()
    threads[0].join(30)
    assert torch.count_nonzero(kept[0]) == 0
