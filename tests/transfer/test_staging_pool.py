"""The pool gives each buffer to one transfer at a time, once the device is done with it, and keeps to its depth."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from helpers.forking import in_forked_child
from helpers.staged import StagedSlot

from fastrack import DeviceError
from fastrack._transfer.staging import StagingPool


class StagingBuffer(StagedSlot):
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


def release(pool, slots):
    for slot in slots:
        pool.release(slot)


def test_slots_are_made_when_first_needed_and_used_again(host):
    pool = StagingPool(host, 100, 3)
    assert not host.made
    for _ in range(5):
        slot = pool.acquire(block=True)
        assert slot.memory.size == 100
        pool.release(slot)
    assert len(host.made) == 1


def test_the_one_that_came_back_last_is_dealt_first(host):
    pool = StagingPool(host, 10, 3)
    slots = acquire(pool, 3)
    release(pool, slots)
    assert acquire(pool, 3) == slots[::-1]


def test_one_that_the_device_is_busy_with_is_passed_over(host):
    pool = StagingPool(host, 10, 3)
    first, second, third = slots = acquire(pool, 3)
    release(pool, slots)
    third.mark_in_use()
    assert acquire(pool) == [second]
    assert acquire(pool) == [first]
    third.give_back()
    assert acquire(pool) == [third]


def test_while_the_device_is_busy_with_all_another_is_made(host):
    pool = StagingPool(host, 10, 2)
    (first,) = acquire(pool)
    first.mark_in_use()
    pool.release(first)
    (second,) = acquire(pool)
    assert second is not first


@pytest.mark.parametrize("block", [True, False])
def test_while_the_device_is_busy_with_all_there_may_be_the_first_to_come_back_is_dealt(host, block):
    pool = StagingPool(host, 10, 2)
    first, second = acquire(pool, 2)
    first.mark_in_use()
    second.mark_in_use()
    release(pool, [second, first])
    assert pool.acquire(block=block) is second


def test_a_slot_that_cannot_be_made_takes_no_place(host):
    pool = StagingPool(host, 10, 1)
    host.staging_buffer, slot = None, host.staging_buffer
    for _ in range(3):
        with pytest.raises(TypeError):
            pool.acquire(block=False)
    host.staging_buffer = slot
    assert acquire(pool)[0].memory.size == 10


def test_a_caller_that_waits_may_make_the_slot_that_another_could_not(host):
    pool = StagingPool(host, 10, 1)
    making, go_on = threading.Event(), threading.Event()
    slot = host.staging_buffer

    def fail(_):
        making.set()
        assert go_on.wait(60)
        host.staging_buffer = slot
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
    pool = StagingPool(host, 10, 2)
    slots = acquire(pool, 2)
    assert pool.acquire(block=False) is None
    pool.release(slots[0])
    assert pool.acquire(block=False) is slots[0]


def test_a_caller_that_blocks_waits_when_all_are_taken(host):
    pool = StagingPool(host, 10, 2)
    taken, worst = [], []  # whose methods are atomic
    gate = threading.Barrier(8)

    def borrow():
        gate.wait()
        for _ in range(50):
            slot = pool.acquire(block=True)
            taken.append(slot)
            worst.append(len(taken))
            taken.remove(slot)
            pool.release(slot)

    with ThreadPoolExecutor(8) as executor:
        for borrowing in [executor.submit(borrow) for _ in range(8)]:
            borrowing.result(60)
    assert 1 <= max(worst) <= 2
    assert len(host.made) <= 2


def test_a_slot_may_be_given_to_another_ring(host):
    one, other = StagingPool(host, 10, 1), StagingPool(host, 10, 1)
    assert one.detach() is None
    (slot,) = acquire(one)
    assert one.detach() is None
    one.release(slot)
    assert one.detach() is slot
    other.attach()
    other.release(slot)
    assert acquire(other) == [slot]
    assert acquire(one) != [slot]


def test_where_there_is_no_memory_for_another_slot_those_there_are_have_to_do(host):
    pool = StagingPool(host, 10, 3)
    (slot,) = acquire(pool)
    host.staging_buffer = Mock(side_effect=DeviceError("no memory left"))
    assert pool.acquire(block=False) is None
    pool.release(slot)
    assert acquire(pool) == [slot]
    with pytest.raises(DeviceError):
        StagingPool(host, 10, 3).acquire(block=True)


def test_closing_waits_for_every_slot_and_wipes_it(host):
    pool = StagingPool(host, 10, 2)
    slots = acquire(pool, 2)
    slots[0].mark_in_use()
    release(pool, slots)
    with ThreadPoolExecutor(1) as executor:
        closing = executor.submit(pool.close)
        with pytest.raises(TimeoutError):
            closing.result(0.05)
        slots[0].give_back()
        closing.result(60)
    assert not any(slot.memory.any() for slot in slots)


def test_closing_wipes_what_it_can(host):
    pool = StagingPool(host, 10, 3)
    slots = acquire(pool, 3)
    release(pool, slots)
    slots[1].wipe = None
    with pytest.raises(TypeError):
        pool.close()
    assert [bool(slot.memory.any()) for slot in slots] == [False, True, False]


def test_a_slot_that_is_taken_at_closing_is_wiped_when_it_comes_back(host):
    pool = StagingPool(host, 10, 2)
    (slot,) = acquire(pool)
    pool.close()
    assert slot.memory.any()
    pool.release(slot)
    assert not slot.memory.any()
    assert pool.acquire(block=False) is not slot


def test_a_forked_child_makes_slots_of_its_own(host):
    pool = StagingPool(host, 10, 2)
    slots = acquire(pool, 2)
    slots[0].mark_in_use()
    pool.release(slots[0])

    def child():
        pool.reset_after_fork()
        mine = acquire(pool, 2)
        return not {*map(id, mine)} & {*map(id, slots)} and pool.acquire(block=False) is None

    assert in_forked_child(child)
