"""A door lets people in until it is shut, and is not shut behind them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.forking import in_forked_child

from fastrack import ClosedError
from fastrack._util.guard import Door


def test_it_can_be_entered_until_it_is_shut():
    door = Door("too late")
    for _ in range(3):
        with door, door:
            assert door.is_open
    assert door.shut()
    assert not door.is_open
    with pytest.raises(ClosedError, match="too late"), door:
        pass


def test_it_is_shut_once():
    door = Door("too late")
    assert [door.shut(), door.shut()] == [True, False]


def test_whoever_leaves_with_an_error_has_left():
    door = Door("too late")
    with pytest.raises(ZeroDivisionError), door:
        raise ZeroDivisionError
    assert door.shut()


def test_shutting_it_waits_for_all_who_are_inside():
    door = Door("too late")
    inside, leave = threading.Barrier(4), [threading.Event() for _ in range(3)]

    def visit(number):
        with door:
            inside.wait(60)
            assert leave[number].wait(60)

    with ThreadPoolExecutor(4) as pool:
        visits = [pool.submit(visit, number) for number in range(3)]
        inside.wait(60)
        shutting = pool.submit(door.shut)
        for number in range(3):
            with pytest.raises(TimeoutError):
                shutting.result(0.02)
            leave[number].set()
            visits[number].result(60)
        assert shutting.result(60)


def test_a_forked_child_does_not_wait_for_those_it_lost():
    door = Door("too late")
    with door:
        assert in_forked_child(door.shut)
    assert door.is_open
