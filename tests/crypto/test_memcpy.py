"""Copies of ciphertext, on several threads: all of it, nothing else, and nowhere else."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.buffers import Fenced
from helpers.cases import each
from helpers.forking import in_forked_child
from helpers.reference import noise
from helpers.stub_cuda import StubCuda
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrack._crypto import memcpy
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.native import Native
from fastrack.format import SEALED_CHUNK_SIZE

MIB = 1 << 20
THREADS = [1, 2, 4]


class ByLists:
    """The same copies by a list of commands for a device."""

    def run(self, name, threads, *operands):
        libcuda, commands = StubCuda(), Commands()
        getattr(commands, name)(*operands)
        assert Native(libcuda.functions, 99).run(commands, threads=threads)[0] == 0

    def copy(self, target, source, threads):
        self.run("copy", threads, target, source)

    def pack(self, target, source, numbers, threads):
        self.run("pack", threads, target, source, numbers)


each_way = pytest.mark.parametrize("way", [memcpy, ByLists()], ids=["at once", "by lists"])


def chunks_of(*numbers):
    return np.array(numbers, np.int64)


def side_by_side(source, numbers):
    return b"".join(source[number * SEALED_CHUNK_SIZE :][:SEALED_CHUNK_SIZE].tobytes() for number in numbers)


@each_way
@each("threads", THREADS)
@each("size", [0, 1, SEALED_CHUNK_SIZE, 2 * MIB - 1, 2 * MIB, 5 * MIB + 7, 40 * MIB + 1])
@pytest.mark.slow
def test_a_run_is_copied(size, threads, way):
    plain = noise(size)
    source, target = Fenced.holding(plain, 3), Fenced(size, 17)
    way.copy(target.data, source.data, threads)
    assert np.array_equal(target.data, plain)
    assert target.stands


@each("threads", THREADS)
@each("count", [1, 3, 300, 2500])
@pytest.mark.slow
def test_chunks_are_packed(count, threads):
    source = noise((count - 1) * SEALED_CHUNK_SIZE + 1000)
    numbers = np.flatnonzero(np.random.default_rng(count).random(count) < 0.6)
    numbers = np.union1d(numbers, [count - 1])
    target = Fenced((numbers.size - 1) * SEALED_CHUNK_SIZE + 1000, 17)
    ByLists().pack(target.data, source, numbers, threads)
    assert target.data.tobytes() == side_by_side(source, numbers.tolist())
    assert target.stands


@settings(deadline=None)
@given(count=st.integers(1, 30), last=st.integers(1, SEALED_CHUNK_SIZE), data=st.data())
def test_chunks_are_packed_in_the_order_given(count, last, data):
    source = noise((count - 1) * SEALED_CHUNK_SIZE + last)
    numbers = [] if count == 1 else data.draw(st.lists(st.integers(0, count - 2), max_size=20))
    if data.draw(st.booleans()):
        numbers.append(count - 1)
    expected = side_by_side(source, numbers)
    target = Fenced(len(expected), 5)
    ByLists().pack(target.data, source, chunks_of(*numbers), 2)
    assert target.data.tobytes() == expected
    assert target.stands


@each(
    ("target", "source"),
    [
        (np.zeros(9, np.uint8), np.zeros(10, np.uint8)),
        (np.zeros(10, np.uint8), np.zeros(9, np.uint8)),
        (np.zeros(5, np.uint16), np.zeros(10, np.uint8)),
        (np.zeros(20, np.uint8)[::2], np.zeros(10, np.uint8)),
        (np.zeros(10, np.uint8), np.zeros((2, 5), np.uint8)),
        (np.frombuffer(bytes(10), np.uint8), np.zeros(10, np.uint8)),
    ],
)
def test_buffers_that_do_not_fit_are_refused(target, source):
    for threads in (1, 2):
        with pytest.raises(ValueError, match="buffer"):
            memcpy.copy(target, source, threads)


def test_threads_copy_side_by_side():
    source = noise(600 * SEALED_CHUNK_SIZE)

    def work(_):
        copied = np.zeros_like(source)
        memcpy.copy(copied, source, 4)
        return np.array_equal(copied, source)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))


def test_a_forked_child_copies():
    source, target = noise(8 * MIB), np.zeros(8 * MIB, np.uint8)
    memcpy.copy(target, source, 4)
    target.fill(0)

    def child():
        memcpy.copy(target, source, 4)
        return np.array_equal(target, source)

    assert in_forked_child(child)
    assert not target.any()
