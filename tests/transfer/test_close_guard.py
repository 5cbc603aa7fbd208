"""A guard lets callers in until it is closed, and closing waits for those inside."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.forking import in_forked_child

from fastrack import ClosedError
from fastrack._transfer.channel import CloseGuard


def test_callers_enter_until_it_is_closed_which_happens_once():
    guard = CloseGuard("too late")
    for _ in range(3):
        with guard, guard:
            assert guard.is_open
    assert [guard.close_and_drain(), guard.close_and_drain()] == [True, False]
    assert not guard.is_open
    with pytest.raises(ClosedError, match="too late"), guard:
        pass


def test_a_caller_that_raises_has_left():
    guard = CloseGuard("too late")
    with pytest.raises(ZeroDivisionError), guard:
        raise ZeroDivisionError
    assert guard.close_and_drain()


def test_closing_waits_for_all_callers_inside():
    guard = CloseGuard("too late")
    inside, leave = threading.Barrier(4), [threading.Event() for _ in range(3)]

    def call(number):
        with guard:
            inside.wait(60)
            assert leave[number].wait(60)

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, number) for number in range(3)]
        inside.wait(60)
        closing = pool.submit(guard.close_and_drain)
        for number in range(3):
            with pytest.raises(TimeoutError):
                closing.result(0.02)
            leave[number].set()
            calls[number].result(60)
        assert closing.result(60)


def test_a_forked_child_does_not_wait_for_callers_of_its_parent():
    guard = CloseGuard("too late")
    with guard:
        assert in_forked_child(guard.close_and_drain)
    assert guard.is_open
