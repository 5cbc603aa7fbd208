"""Documents of one address are judged one at a time, so that others need not wait for them."""

import asyncio
import os
import threading
import time
from contextlib import suppress

from fastrack._service.handlers import Handlers
from fastrack._service.limits import Quota, RateLimit

CROWD, NEIGHBOUR, OTHER = "2001:db8::1", "2001:db8::2", "192.0.2.1"  # the first two are of one network


def make_handlers():
    return Handlers(RateLimit(1e9, 1 << 30), Quota(1, 1), None, body_seconds=1)


def test_an_address_has_one_thread_and_others_do_not_wait_for_it():
    asyncio.run(crowd())


async def crowd():
    handlers, begun, going_on = make_handlers(), [], threading.Event()

    def judge(number):
        begun.append(number)
        going_on.wait(60)

    waiting = [asyncio.create_task(handlers.judge(address, judge, 1)) for address in (CROWD, CROWD, NEIGHBOUR)]
    await until(lambda: begun)
    assert await handlers.judge(OTHER, lambda: "judged") == "judged"
    assert await handlers.work(lambda: "worked") == "worked"
    assert begun == [1]
    going_on.set()
    await asyncio.gather(*waiting)
    assert begun == [1, 1, 1]
    del waiting
    await until(lambda: not handlers._turns)  # nothing is kept of an address that rests no longer


async def until(condition):
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError


def test_an_address_does_not_rest_for_the_time_that_it_waited_for_others(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    asyncio.run(wait_for_others())


async def wait_for_others():
    handlers, begun, going_on, rests = make_handlers(), [], threading.Event(), []

    def judge():
        begun.append(time.monotonic())
        going_on.wait(60)

    others = [asyncio.create_task(handlers.judge(address, judge)) for address in (CROWD, OTHER)]
    await until(lambda: len(begun) == 2)  # as many as there are threads
    waiting = asyncio.create_task(handlers.judge("198.51.100.1", lambda: "judged"))
    await asyncio.sleep(0.3)
    loop = asyncio.get_running_loop()
    later, loop.call_later = loop.call_later, lambda delay, action: rests.append(delay) or later(0, action)
    going_on.set()
    assert await waiting == "judged"
    await asyncio.gather(*others)
    assert min(rests) < max(rests) / 2  # that of those that held the threads


def test_an_address_rests_for_four_times_as_long_as_its_document_took_though_that_was_refused():
    asyncio.run(rest())


async def rest():
    handlers, begins = make_handlers(), []

    def judge():
        begins.append(time.monotonic())
        time.sleep(0.03)
        raise ValueError

    for _ in range(2):
        with suppress(ValueError):
            await handlers.judge(CROWD, judge)
    assert begins[1] - begins[0] >= 0.15
