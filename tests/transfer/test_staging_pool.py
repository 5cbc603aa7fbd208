"""The pool gives each buffer to one transfer at a time, once the device is done with it, and keeps to its depth."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from helpers.forking import in_forked_child
from helpers.staged import StagedBuffer

from fastrack import DeviceError
from fastrack._transfer import staging


class StagingBuffer(StagedBuffer):
    """One that must not be wiped while a device is busy with it."""

    def wipe(self):
        assert self.ready()
        self.memory.fill(0)


class Host:
    """A device of which only `staging_buffer` is used."""

    def __init__(self):
        self.made = []

    def staging_buffer(self, size):
        self.made.append(StagingBuffer(np.ones(size, np.uint8)))
        return self.made[-1]


@pytest.fixture
def host():
    return Host()


def acquire(pool, count=1):
    return [pool.acquire(block=True) for _ in range(count)]


def release(pool, buffers):
    for buffer in buffers:
        pool.release(buffer)


def test_buffers_are_made_when_first_needed_and_used_again(host):
    pool = staging.StagingPool(host, 100, 3)
    assert not host.made
    for _ in range(5):
        buffer = pool.acquire(block=True)
        assert buffer.memory.size == 100
        pool.release(buffer)
    assert len(host.made) == 1


def test_the_one_that_came_back_last_is_given_first(host):
    pool = staging.StagingPool(host, 10, 3)
    buffers = acquire(pool, 3)
    release(pool, buffers)
    assert acquire(pool, 3) == buffers[::-1]


def test_one_that_the_device_is_busy_with_is_passed_over(host):
    pool = staging.StagingPool(host, 10, 3)
    first, second, third = buffers = acquire(pool, 3)
    release(pool, buffers)
    third.mark_in_use()
    assert acquire(pool) == [second]
    assert acquire(pool) == [first]
    third.give_back()
    assert acquire(pool) == [third]


def test_while_the_device_is_busy_with_all_another_is_made(host):
    pool = staging.StagingPool(host, 10, 2)
    (first,) = acquire(pool)
    first.mark_in_use()
    pool.release(first)
    (second,) = acquire(pool)
    assert second is not first


@pytest.mark.parametrize("block", [True, False])
def test_while_the_device_is_busy_with_all_there_may_be_the_first_to_come_back_is_given(host, block):
    pool = staging.StagingPool(host, 10, 2)
    first, second = acquire(pool, 2)
    first.mark_in_use()
    second.mark_in_use()
    release(pool, [second, first])
    assert pool.acquire(block=block) is second


def test_a_buffer_that_cannot_be_made_takes_no_place(host):
    pool = staging.StagingPool(host, 10, 1)
    host.staging_buffer, buffer = None, host.staging_buffer
    for _ in range(3):
        with pytest.raises(TypeError):
            pool.acquire(block=False)
    host.staging_buffer = buffer
    assert acquire(pool)[0].memory.size == 10


def test_a_caller_that_waits_may_make_the_buffer_that_another_could_not(host):
    pool = staging.StagingPool(host, 10, 1)
    making, go_on = threading.Event(), threading.Event()
    buffer = host.staging_buffer

    def fail(_):
        making.set()
        assert go_on.wait(60)
        host.staging_buffer = buffer
        raise MemoryError

    host.staging_buffer = fail
    with ThreadPoolExecutor(2) as executor:
        unlucky = executor.submit(pool.acquire, block=True)
        assert making.wait(60)
        waiting = executor.submit(pool.acquire, block=True)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        go_on.set()
        assert isinstance(unlucky.exception(60), MemoryError)
        assert waiting.result(60) is host.made[0]


def test_a_caller_that_does_not_block_gets_none_when_all_are_taken(host):
    pool = staging.StagingPool(host, 10, 2)
    buffers = acquire(pool, 2)
    assert pool.acquire(block=False) is None
    pool.release(buffers[0])
    assert pool.acquire(block=False) is buffers[0]


def test_a_caller_that_blocks_waits_when_all_are_taken(host):
    pool = staging.StagingPool(host, 10, 2)
    taken, worst = [], []  # whose methods are atomic
    gate = threading.Barrier(8)

    def borrow():
        gate.wait()
        for _ in range(50):
            buffer = pool.acquire(block=True)
            taken.append(buffer)
            worst.append(len(taken))
            taken.remove(buffer)
            pool.release(buffer)

    with ThreadPoolExecutor(8) as executor:
        for borrowing in [executor.submit(borrow) for _ in range(8)]:
            borrowing.result(60)
    assert 1 <= max(worst) <= 2
    assert len(host.made) <= 2


def test_a_buffer_may_be_given_to_another_pool(host):
    one, other = staging.StagingPool(host, 10, 1), staging.StagingPool(host, 10, 1)
    assert one.detach() is None
    (buffer,) = acquire(one)
    assert one.detach() is None
    one.release(buffer)
    assert one.detach() is buffer
    other.attach(buffer)
    other.release(buffer)
    assert acquire(other) == [buffer]
    assert acquire(one) != [buffer]


def test_no_interrupt_keeps_a_place_of_the_pool():
    device = Mock(staging_buffer=lambda size: StagingBuffer(np.ones(size, np.uint8)))
    pool, lines = staging.StagingPool(device, 10, 2), set()

    def interrupt(frame, event, _):
        if frame.f_code.co_filename != staging.__file__:
            return None
        place = (frame.f_code, frame.f_lineno)
        if event == "line" and place not in lines:
            lines.add(place)
            raise KeyboardInterrupt
        return interrupt

    def borrow():
        with staging.BufferLease([pool], 0) as buffers:
            buffers.acquire()
            buffers.acquire()

    before, is_whole = sys.gettrace(), False
    try:
        while not is_whole:
            sys.settrace(interrupt)
            try:
                borrow()
                is_whole = True
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
    finally:
        sys.settrace(before)
    assert len(lines) > 20
    assert len(acquire(pool, 2)) == 2


def test_a_buffer_that_is_lost_meanwhile_ends_the_wait_for_one():
    pool = staging.StagingPool(Mock(staging_buffer=lambda size: StagingBuffer(np.ones(size, np.uint8))), 10, 1)
    buffers = acquire(pool)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(acquire, pool)
        buffers.clear()  # as by an interrupt ahead of its release
        assert len(waiting.result(60)) == 1


def test_where_there_is_no_memory_for_another_buffer_those_there_are_have_to_do(host):
    pool = staging.StagingPool(host, 10, 3)
    (buffer,) = acquire(pool)
    host.staging_buffer = Mock(side_effect=DeviceError("no memory left"))
    assert pool.acquire(block=False) is None
    pool.release(buffer)
    assert acquire(pool) == [buffer]
    with pytest.raises(DeviceError):
        staging.StagingPool(host, 10, 3).acquire(block=True)


def test_closing_waits_for_every_buffer_and_wipes_it(host):
    pool = staging.StagingPool(host, 10, 2)
    buffers = acquire(pool, 2)
    buffers[0].mark_in_use()
    release(pool, buffers)
    with ThreadPoolExecutor(1) as executor:
        closing = executor.submit(pool.close)
        with pytest.raises(TimeoutError):
            closing.result(0.05)
        buffers[0].give_back()
        closing.result(60)
    assert not any(buffer.memory.any() for buffer in buffers)


def test_closing_wipes_what_it_can(host):
    pool = staging.StagingPool(host, 10, 3)
    buffers = acquire(pool, 3)
    release(pool, buffers)
    buffers[1].wipe = None
    with pytest.raises(TypeError):
        pool.close()
    assert [bool(buffer.memory.any()) for buffer in buffers] == [False, True, False]


def test_a_buffer_that_is_taken_at_closing_is_wiped_when_it_comes_back(host):
    pool = staging.StagingPool(host, 10, 2)
    (buffer,) = acquire(pool)
    pool.close()
    assert buffer.memory.any()
    pool.release(buffer)
    assert not buffer.memory.any()
    assert pool.acquire(block=False) is not buffer


def test_a_forked_child_makes_buffers_of_its_own(host):
    pool = staging.StagingPool(host, 10, 2)
    buffers = acquire(pool, 2)
    buffers[0].mark_in_use()
    pool.release(buffers[0])

    def child():
        pool.reset_after_fork()
        mine = acquire(pool, 2)
        return not {*map(id, mine)} & {*map(id, buffers)} and pool.acquire(block=False) is None

    assert in_forked_child(child)
