"""A door lets people in until it is shut, and is not shut behind them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.forking import in_forked_child

from fastrack import ClosedError
from fastrack._util.guard import CloseGuard


def test_it_can_be_entered_until_it_is_shut():
    door = CloseGuard("too late")
    for _ in range(3):
        with door, door:
            assert door.is_open
    assert door.close_and_drain()
    assert not door.is_open
    with pytest.raises(ClosedError, match="too late"), door:
        pass


def test_it_is_shut_once():
    door = CloseGuard("too late")
    assert [door.close_and_drain(), door.close_and_drain()] == [True, False]


def test_whoever_leaves_with_an_error_has_left():
    door = CloseGuard("too late")
    with pytest.raises(ZeroDivisionError), door:
        raise ZeroDivisionError
    assert door.close_and_drain()


def test_shutting_it_waits_for_all_who_are_inside():
    door = CloseGuard("too late")
    inside, leave = threading.Barrier(4), [threading.Event() for _ in range(3)]

    def visit(number):
        with door:
            inside.wait(60)
            assert leave[number].wait(60)

    with ThreadPoolExecutor(4) as pool:
        visits = [pool.submit(visit, number) for number in range(3)]
        inside.wait(60)
        shutting = pool.submit(door.close_and_drain)
        for number in range(3):
            with pytest.raises(TimeoutError):
                shutting.result(0.02)
            leave[number].set()
            visits[number].result(60)
        assert shutting.result(60)


def test_a_forked_child_does_not_wait_for_those_it_lost():
    door = CloseGuard("too late")
    with door:
        assert in_forked_child(door.close_and_drain)
    assert door.is_open
