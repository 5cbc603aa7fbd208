"""A ring lends each slot to one transfer at a time, and makes no more than it was told to."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from fastrack.ring import Ring


class Host:
    """A device of which only `staging` is used."""

    def __init__(self):
        self.made = 0

    def staging(self, size):
        self.made += 1
        return np.ones(size, np.uint8)


def test_slots_are_made_when_first_needed_and_used_again():
    host = Host()
    ring = Ring(host, 100, 3)
    assert host.made == 0
    for _ in range(5):
        with ring.slot() as slot:
            assert slot.size == 100
    assert host.made == 1


def test_a_slot_comes_back_after_an_error():
    host = Host()
    ring = Ring(host, 10, 1)
    for _ in range(3):
        with pytest.raises(RuntimeError), ring.slot():
            raise RuntimeError
    assert host.made == 1


def test_a_slot_that_cannot_be_made_takes_no_place():
    host = Host()
    ring = Ring(host, 10, 1)
    host.staging, staging = None, host.staging
    with pytest.raises(TypeError), ring.slot():
        pass
    host.staging = staging
    with ring.slot() as slot:
        assert slot.size == 10


def test_whoever_comes_when_all_are_lent_waits():
    ring = Ring(Host(), 10, 2)
    lent, worst, lock = [0], [0], threading.Lock()
    gate = threading.Barrier(8)

    def borrow():
        gate.wait()
        for _ in range(50):
            with ring.slot():
                with lock:
                    lent[0] += 1
                    worst[0] = max(worst[0], lent[0])
                with lock:
                    lent[0] -= 1

    threads = [threading.Thread(target=borrow) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= worst[0] <= 2


def test_closing_wipes_every_slot():
    ring = Ring(Host(), 10, 2)
    with ring.slot() as first, ring.slot() as second:
        pass
    ring.close()
    assert not first.any()
    assert not second.any()


def test_a_slot_that_is_in_use_at_closing_is_wiped_when_it_comes_back():
    ring = Ring(Host(), 10, 2)
    with ring.slot() as slot:
        ring.close()
        assert slot.any()
    assert not slot.any()
