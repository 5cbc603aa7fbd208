"""Many threads, forks, a process that exits: an engine gives the same answers, and no thread waits forever."""

import ctypes
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import reference
from helpers.buffers import as_array
from helpers.forking import in_forked_child
from helpers.processes import run_python
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, noise
from helpers.runs import Runs, flip

from fastrack._crypto import workers
from fastrack._crypto.workers import default_threads

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def test_sixteen_threads_share_an_engine(make_engine):
    engine = make_engine(4)

    def work(number):
        key, first = bytes([number]) * (16 if number % 2 else 32), number * 2**33
        plain = noise(CHUNK_SIZE * (5 * number + 40) + number, seed=number).tobytes()
        runs = Runs(engine, key)
        sealed = runs.seal(plain, first)
        answers = [sealed == reference.seal(key, bytes(12), plain, first)]
        for turn in range(5):
            answers.append(runs.open(sealed, first) == (None, plain))
            bad, _ = runs.open(flip(sealed, 8 * SEALED_CHUNK_SIZE * turn), first)
            answers.append(bad == first + turn)
            answers.append(runs.open(sealed, first + 1) == (first + 1, bytes(len(plain))))
        return all(answers)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == [True] * 16


# Forks


@needs_fork
def test_a_forked_child_starts_its_own_threads(make_engine):
    runs = Runs(make_engine(4), bytes(32))
    plain = noise(8 * 1024**2).tobytes()
    sealed = runs.seal(plain)
    assert runs.open(sealed) == (None, plain)
    altered = flip(sealed, 8 * SEALED_CHUNK_SIZE * 300)

    def work():
        right = runs.open(sealed) == (None, plain) and runs.open(altered)[0] == 300
        helped = any(thread.name.startswith("fastrack") for thread in threading.enumerate())
        return right and helped == (runs.engine.threads > 1)

    assert [in_forked_child(work) for _ in range(3)] == [True] * 3
    assert runs.open(sealed) == (None, plain)


@pytest.mark.slow
@needs_fork
def test_a_child_forked_in_the_middle_of_a_run_is_right_too(make_engine):
    runs = Runs(make_engine(4), bytes(32))
    plain = noise(8 * 1024**2).tobytes()
    sealed = runs.seal(plain)
    over = threading.Event()

    def keep_opening():
        answers = [runs.open(sealed) == (None, plain)]
        while not over.is_set():
            answers.append(runs.open(sealed) == (None, plain))
        return all(answers)

    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(keep_opening)
        try:
            in_children = [in_forked_child(lambda: runs.open(sealed) == (None, plain)) for _ in range(5)]
        finally:
            over.set()
    assert in_children == [True] * 5
    assert here.result()


def test_a_run_while_the_interpreter_exits_is_done_by_the_caller_alone():
    code = """
import atexit
import numpy as np
from fastrack._crypto.engine import get_engine
from fastrack._crypto.cobblestone import MessageKey

opener = get_engine(threads=4)
schedule = opener.expand_key(MessageKey.raw(bytes(32), bytes(12)))
plain = np.arange(8 * 1024**2, dtype=np.uint8)
sealed = np.empty(plain.size + 16 * 512, np.uint8)
opener.seal_run(schedule, plain, sealed, 0)

@atexit.register
def last():
    out = np.empty_like(plain)
    print(opener.open_run(schedule, sealed, out, 0), (out == plain).all())
"""
    assert run_python(code) == "None True\n"


# The worker pool


def test_there_are_as_many_threads_as_cpus_to_run_on():
    assert default_threads() >= 1
    if hasattr(os, "sched_getaffinity"):
        assert default_threads() == len(os.sched_getaffinity(0))


class Stub:
    """A kernel in Python. It draws tickets as the native ones do; `at_work` is called with the ticket it holds."""

    def __init__(self, count, at_work=lambda ticket: None):
        self.count = count
        self.at_work = at_work
        self.lock = threading.Lock()
        self.drawn, self.crowd = [], []

    def __call__(self, grain, place, wait):
        counters = (ctypes.c_int64 * workers.COUNTER_WORDS).from_address(place)
        self.crowd.append(threading.current_thread())
        while True:
            with self.lock:
                ticket = counters[workers.NEXT]
                counters[workers.NEXT] += 1
            start = ticket * grain
            if start >= self.count:
                break
            self.at_work(ticket)
            stop = min(start + grain, self.count)
            self.drawn.append((start, stop))
            with self.lock:
                counters[workers.DONE] += stop - start
        while wait and counters[workers.DONE] < self.count:
            time.sleep(0.001)


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 1000, 5000, 2**20])
def test_the_workers_cover_every_chunk_once(count, threads):
    kernel = Stub(count)
    assert workers.run(kernel, (), count, threads, keepalive=("buffers",)) is None
    drawn = sorted(kernel.drawn)
    assert [start for start, _ in drawn] == [0, *(stop for _, stop in drawn)][: len(drawn)]
    assert (drawn[-1][1] if drawn else 0) == count
    assert kernel.crowd.count(threading.current_thread()) == 1
    assert len(kernel.crowd) <= min(threads, count // 32 + 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_run_that_fails_ends_after_its_helpers(error):
    """Fail on the calling thread before it draws a ticket, once a helper holds one."""
    caller, helping = threading.current_thread(), threading.Event()

    def at_work(_):
        helping.set()
        time.sleep(0.2)

    def without_a_caller(*operands):
        if threading.current_thread() is caller:
            helping.wait(10)
            raise error
        kernel(*operands)

    kernel = Stub(1000, at_work)
    with pytest.raises(error):
        workers.run(without_a_caller, (), 1000, 4, keepalive=("buffers",))
    held = len(kernel.drawn)
    assert held >= 1
    time.sleep(0.4)
    assert len(kernel.drawn) == held


class Executor:
    """A pool whose `submit` fails at its n-th call, after it has taken the work, as the real one may."""

    def __init__(self, fails_at, error):
        self.calls, self.fails_at, self.error = 0, fails_at, error
        self.threads = []

    def submit(self, work):
        self.calls += 1
        thread = threading.Thread(target=work)
        self.threads.append(thread)
        thread.start()
        if self.calls == self.fails_at:
            raise self.error


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_helpers_that_the_pool_lost_are_waited_for(monkeypatch, fails_at):
    pool = Executor(fails_at, RuntimeError("can't start new thread"))
    monkeypatch.setattr(workers, "_pool", lambda: pool)
    caller = threading.current_thread()
    kernel = Stub(1000, lambda _: time.sleep(0 if threading.current_thread() is caller else 0.1))
    assert workers.run(kernel, (), 1000, 4, keepalive=("buffers",)) is None
    assert sum(stop - start for start, stop in kernel.drawn) == 1000
    for thread in pool.threads:
        thread.join()
    assert pool.calls == fails_at


@pytest.mark.parametrize("fails_at", [1, 2])
def test_an_interrupt_while_helpers_are_called_leaves_none_at_work(monkeypatch, fails_at):
    pool = Executor(fails_at, KeyboardInterrupt())
    monkeypatch.setattr(workers, "_pool", lambda: pool)
    kernel = Stub(1000, lambda _: time.sleep(0.05))
    with pytest.raises(KeyboardInterrupt):
        workers.run(kernel, (), 1000, 4, keepalive=("buffers",))
    held = list(kernel.drawn)
    for thread in pool.threads:
        thread.join()
    assert kernel.drawn == held
    assert len(held) < 1000


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not say which CPUs a thread may use")
@pytest.mark.skipif(default_threads() < 2, reason="there is one CPU")
def test_helpers_leave_the_callers_cpu_to_the_caller():
    allowed, caller, seen = os.sched_getaffinity(0), threading.current_thread(), []

    def at_work(_):
        if threading.current_thread() is not caller:
            seen.append(os.sched_getaffinity(0))
        time.sleep(0.01)

    workers.run(Stub(1000, at_work), (), 1000, 2, keepalive=("buffers",))
    assert seen
    assert all(len(cpus) == len(allowed) - 1 and cpus < allowed for cpus in seen)
    assert os.sched_getaffinity(0) == allowed


def test_a_helper_that_comes_late_finds_nothing_to_do(monkeypatch):
    late = []

    class Late:
        def submit(self, work):
            late.append(work)

    monkeypatch.setattr(workers, "_pool", Late)
    kernel = Stub(1000)
    assert workers.run(kernel, (), 1000, 4, keepalive=("buffers",)) is None
    drawn = list(kernel.drawn)
    for work in late:
        thread = threading.Thread(target=work)  # on one of its own, as it chooses its CPUs
        thread.start()
        thread.join()
    assert len(late) == 3
    assert kernel.drawn == drawn


def test_a_caller_waits_for_a_helper_that_is_still_at_work(make_engine):
    # More threads than CPUs, and a last ticket that anyone may hold when the caller runs out of work.
    runs = Runs(make_engine(32), bytes(16))
    plain = noise(600 * CHUNK_SIZE).tobytes()
    sealed = as_array(runs.seal(plain))
    out = np.empty(len(plain), np.uint8)
    for _ in range(30):
        out.fill(0)
        assert runs.engine.open_run(runs.schedule, sealed, out, 0) is None
        assert out.tobytes() == plain


INTERRUPTED = """
import threading
from fastrack._crypto import workers

start = threading.Thread.start

def interrupted(self):
    start(self)
    raise KeyboardInterrupt

threading.Thread.start = interrupted
try:
    workers.start(lambda: None, 1, None)
except KeyboardInterrupt:
    threading.Thread.start = start
workers.start(lambda: print("worked", flush=True), 1, None)
"""


def test_a_process_ends_although_the_start_of_its_first_worker_was_interrupted():
    assert run_python(INTERRUPTED) == "worked\n"
