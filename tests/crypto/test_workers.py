"""Worker threads: each chunk is done once, by threads that have let go of the caller's memory when its call ends."""

import ctypes
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.boxes import MAX, all_boxes, native_threads, replace_boxes, unserved
from helpers.cases import each
from helpers.forking import in_forked_child
from helpers.native_code import build, needs_compiler
from helpers.processes import run_python

from fastrack._crypto import native, workers

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason="there is no native extension"),
    pytest.mark.slow,  # to compile the kernels takes seconds
]
needs_cpus = pytest.mark.skipif(workers.default_threads() < 2, reason="there is one CPU")


@pytest.fixture(scope="module")
def kernels():
    """Kernels that count what they do: `count_chunks`, at the end of a nap for each grain, and `know_roles`."""
    needs_compiler()
    from fastrack_native.compiler import compiled
    from fastrack_native.intrinsics import fetch_add, fetch_min, load, sleep

    @compiled
    def count_chunks(count: "int", log: "int", nap: "int", bad: "int", grain: "int", counters: "Counters") -> "None":  # noqa: F821
        while True:
            start = fetch_add(counters, 1) * grain
            if start >= count:
                break
            if nap > 0:
                sleep(nap)
            for chunk in range(start, min(start + grain, count)):
                fetch_add(log + 8 * chunk, 1)
                if chunk >= bad:
                    fetch_min(counters + 64, chunk)

    @compiled
    def know_roles(role: "Role", roles: "int", all: "int", counters: "Counters") -> "None":  # noqa: A002, ARG001, F821
        """Count the callers and the workers, and wait for so many of both."""
        fetch_add(roles + 8 * role, 1)
        while load(roles) + load(roles + 8) < all:
            sleep(100)

    return build({"count_chunks": count_chunks, "know_roles": know_roles})


class Log:
    """The number of times that each chunk was done."""

    def __init__(self, count):
        self.counts = np.zeros(count + 1, np.int64)

    @property
    def address(self):
        return self.counts.ctypes.data

    @property
    def is_right(self):
        return (self.counts[:-1] == 1).all() and self.counts[-1] == 0


@pytest.fixture
def run(kernels):
    """Returns whether each chunk was done once, and the first bad one."""

    def run(count, threads, *, nap=0, bad=workers.NONE_BAD, threshold=1):
        log = Log(count)
        arguments, options = (count, log.address, nap, bad), {"threshold": threshold, "waking_threshold": 1}
        found = workers.run(kernels.count_chunks, arguments, count, threads, **options)
        return log.is_right, found

    return run


@each("threads", [1, 2, 3, 16, 64])
@each("count", [0, 1, 2, 31, 1000, 2**20])
def test_every_chunk_is_done_once(run, count, threads):
    for threshold in (1, 32):
        assert run(count, threads, threshold=threshold) == (True, None)
        assert run(count, threads, bad=count // 2, threshold=threshold) == (True, count // 2 if count else None)


def test_there_are_no_more_threads_than_cpus_to_run_on():
    assert len(os.sched_getaffinity(0)) >= workers.default_threads() >= 1


@needs_cpus
@pytest.mark.parametrize("threads", [2, 5])
def test_work_is_shared_with_so_many_threads(kernels, threads):
    """The kernel returns only when all are there."""
    roles = np.zeros(2, np.int64)
    workers.share(kernels.know_roles, (roles.ctypes.data, threads), threads - 1, threads - 1)
    assert roles.tolist() == [1, threads - 1]


def test_a_call_of_one_thread_looks_into_no_box(kernels, monkeypatch):
    replace_boxes(monkeypatch, 0)
    roles = np.zeros(2, np.int64)
    workers.share(kernels.know_roles, (roles.ctypes.data, 1), 0, 0)
    assert roles.tolist() == [1, 0]


# Boxes.


@needs_cpus
def test_a_worker_that_has_not_begun_is_not_waited_for_and_finds_nothing(run, monkeypatch):
    boxes = replace_boxes(monkeypatch, unserved(3))
    assert run(1000, 4) == (True, None)
    assert all(box[workers.ENTRY] for box in all_boxes(boxes))
    assert {(box.state, box[workers.OWNER]) for box in all_boxes(boxes)} == {(workers.FREE, 0)}


@each("state", [workers.CLAIMED, workers.POSTED, workers.RUNNING, workers.DONE])
def test_a_caller_that_finds_no_box_works_alone_and_touches_none(run, monkeypatch, state):
    boxes = replace_boxes(monkeypatch, unserved(3, state))
    assert run(1000, 4) == (True, None)
    assert {(box.state, box[workers.ENTRY]) for box in all_boxes(boxes)} == {(state, 0)}


@needs_cpus
def test_a_caller_waits_until_its_worker_is_done(kernels, monkeypatch):
    """Play the worker: the work begins before the caller's own ends, and ends a while after."""
    boxes, roles, ended = replace_boxes(monkeypatch, unserved(1)), np.zeros(2, np.int64), threading.Event()
    (box,) = all_boxes(boxes)

    def call():
        workers.share(kernels.know_roles, (roles.ctypes.data, 2), 1, 1)
        ended.set()

    caller = threading.Thread(target=call)
    caller.start()
    while box.state != workers.POSTED:
        time.sleep(0.001)
    assert box[workers.ARGUMENTS] == workers.WORKER
    assert box[workers.ARGUMENTS + 1] == roles.ctypes.data
    box[workers.STATE] = workers.RUNNING  # the caller does not compare and swap it before it sees a second thread
    roles[1] = 1
    assert not ended.wait(0.2)
    box[workers.STATE] = workers.DONE
    assert ended.wait(20)
    caller.join()
    assert box.state == workers.FREE


@needs_cpus
@each(
    ("awake", "recent", "other", "streak", "wakes", "asked"),
    [
        ([], False, False, 9, 0, []),
        ([], False, False, 9, 2, [0, 1]),
        ([], True, False, 2, 0, []),
        ([], True, False, 3, 0, [0]),
        ([], True, False, 3, 2, [0, 1]),
        ([1, 3], True, False, 0, 0, [1, 3]),
        ([1, 3], True, False, 3, 0, [0, 1, 3]),
        ([1, 2, 3], True, False, 9, 0, [1, 2, 3]),
        ([1, 2, 3], True, True, 9, 0, []),
        ([1, 3], True, True, 9, 1, [0, 1, 3]),
        ([0, 1, 2, 3], False, False, 0, 1, [0, 1, 2]),
    ],
)
def test_workers_that_are_awake_are_asked_first_and_others_if_that_pays(
    kernels, monkeypatch, awake, recent, other, streak, wakes, asked
):
    boxes, roles = replace_boxes(monkeypatch, unserved(4)), np.zeros(2, np.int64)
    for number in awake:
        all_boxes(boxes)[number][workers.AWAKE] = 1
    words = workers.SHARED, workers.STREAK, workers.CALLING
    last, calls, caller = (ctypes.c_int64.from_address(boxes + 8 * word) for word in words)
    caller.value = threading.get_ident() + other
    last.value, calls.value = time.perf_counter_ns() + 10**12 if recent else -(10**12), streak
    workers.share(kernels.know_roles, (roles.ctypes.data, 1), 3, wakes)
    assert [number for number, box in enumerate(all_boxes(boxes)) if box[workers.ENTRY]] == asked
    assert 0 < last.value <= time.perf_counter_ns()
    assert calls.value == (streak + 1 if recent and not other else 0)
    assert caller.value == threading.get_ident()


@needs_cpus
def test_workers_stay_awake_for_a_streak_of_one_thread(kernels, monkeypatch):
    def call():
        roles = np.zeros(2, np.int64)
        workers.share(kernels.know_roles, (roles.ctypes.data, 2), 1, 1)
        return all_boxes(boxes)[0][workers.AWAKE]

    boxes = replace_boxes(monkeypatch, workers._new_boxes(1))
    last = ctypes.c_int64.from_address(boxes + 8 * workers.SHARED)
    last.value = -(10**12)
    assert call() == 0

    def call_again():
        last.value = time.perf_counter_ns() + 10**9
        return call()

    assert any(call_again() for _ in range(100))  # on a busy machine a worker may sleep again before one looks
    deadline = time.monotonic() + 20
    while all_boxes(boxes)[0][workers.AWAKE]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    last.value = time.perf_counter_ns() + 10**9
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(call).result() == 0


@needs_cpus
def test_a_box_is_used_again(run):
    for _ in range(100):
        assert run(100, 3) == (True, None)
    states = [box.state for box in all_boxes()]
    assert set(states) <= {workers.NONE, workers.FREE}
    assert run(100, 3, nap=100) == (True, None)
    assert [box.state for box in all_boxes()] == states


def test_the_parts_of_a_box_do_not_overlap():
    one_word = [workers.STATE, workers.OWNER, workers.ENTRY, workers.THREAD, workers.START, workers.STOP]
    one_word += [workers.AWAKE, workers.STAYS]
    places = [*one_word, workers.MUTEX, workers.CONDITION, workers.MASK, workers.ARGUMENTS]
    sizes = [1, 1, 1, 1, 1, 1, 1, 1, 8, 8, 16, workers.WORDS]
    for place, size, after in zip(places, sizes, [*places[1:], workers.BOX_SIZE // 8], strict=True):
        assert place + size <= after
    assert workers._boxes % 64 == workers.BOX_SIZE % 64 == 0


# Many callers, and interruptions.


@each("threads", [2, 5, 40])
def test_many_callers_at_once(run, threads):
    """Compete for boxes with 16 threads, with more workers than there may be."""

    def call(number):
        source = random.Random(number)
        answers = set()
        for _ in range(60):
            count = source.randrange(200)
            answers.add(run(count, threads, nap=source.choice([0, 0, 0, 50])))
        return answers

    with ThreadPoolExecutor(16) as pool:
        assert set().union(*pool.map(call, range(16))) == {(True, None)}
    assert {box.state for box in all_boxes()} <= {workers.NONE, workers.FREE}


def test_interrupts_at_any_moment_leave_no_thread_in_the_callers_memory(kernels):
    """Raise between any two instructions of Python: afterwards no count changes any more, and all boxes are free."""
    source = random.Random(1)
    interrupted, watched = 0, []

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for turn in range(3000):
            log = Log(64)
            arguments = 64, log.address, source.choice([0, 0, 20]), workers.NONE_BAD
            try:
                signal.setitimer(signal.ITIMER_REAL, source.uniform(1e-6, 1.5e-4))
                workers.run(kernels.count_chunks, arguments, 64, 4, threshold=1, waking_threshold=1)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert {box.state for box in all_boxes()[:4]} <= {workers.NONE, workers.FREE}, turn
            assert log.is_right or not log.counts.any(), turn
            watched.append((log, log.counts.copy()))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 100
    assert all((log.counts == counts).all() for log, counts in watched)


def test_forks_in_the_middle_of_calls(run):
    """The parent's calls go on, and each child has workers of its own."""
    over = threading.Event()

    def call():
        answers = set()
        while not over.is_set():
            answers.add(run(100, 4, nap=20))
        return answers

    def in_child():
        alone = {box.state for box in all_boxes()} == {workers.NONE}
        return alone, {run(100, 4, nap=20) for _ in range(20)}

    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(call) for _ in range(3)]
        try:
            assert [in_forked_child(in_child) for _ in range(10)] == [(True, {(True, None)})] * 10
        finally:
            over.set()
        assert [call.result() for call in calls] == [{(True, None)}] * 3


def test_a_fork_that_python_knows_nothing_of(run):
    """A child has boxes then whose threads are not there, and works alone."""
    assert run(100, 4, nap=100) == (True, None)
    boxes = ctypes.string_at(workers._boxes, workers.BOX_SIZE * (MAX + 1))

    def in_child():
        ctypes.memmove(workers._boxes, boxes, len(boxes))
        return run(100, 4, nap=100), {box.state for box in all_boxes()}

    answer, states = in_forked_child(in_child)
    assert answer == (True, None)
    assert states <= {workers.NONE, workers.FREE}


# CPUs and limits.


@needs_cpus
def test_workers_leave_the_callers_cpu_to_the_caller(kernels):
    allowed, before = os.sched_getaffinity(0), native_threads()

    def work():
        mine = {box[workers.STATE] for box in all_boxes()} == {workers.NONE}
        cpu = min(allowed)
        os.sched_setaffinity(0, {cpu, max(allowed)})
        roles, seen = np.zeros(2, np.int64), []
        for _ in range(20):
            roles[:] = 0
            workers.share(kernels.know_roles, (roles.ctypes.data, 2), 1, 1)
            (worker,) = native_threads() - {threading.get_native_id()}
            seen.append(os.sched_getaffinity(worker))
        return mine, seen, cpu

    mine, seen, cpu = in_forked_child(work)
    assert mine
    assert all(len(cpus) == 1 and cpus < {cpu, max(allowed)} for cpus in seen)
    assert os.sched_getaffinity(0) == allowed
    assert native_threads() == before


@needs_cpus
def test_workers_take_no_signals_but_faults_and_have_a_name(kernels):
    def work():
        roles = np.zeros(2, np.int64)
        workers.share(kernels.know_roles, (roles.ctypes.data, 2), 1, 1)
        (worker,) = native_threads() - {threading.get_native_id()}
        status = Path(f"/proc/self/task/{worker}/status").read_text()
        return dict(line.split(":\t", 1) for line in status.splitlines()), signal.pthread_sigmask(signal.SIG_BLOCK, [])

    status, mine = in_forked_child(work)
    blocked = {number for number in signal.valid_signals() if int(status["SigBlk"], 16) >> number - 1 & 1}
    left = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGKILL, signal.SIGSTOP}
    assert signal.valid_signals() - blocked == left
    assert mine == signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert status["Name"] == "fastrack"


def test_a_thread_with_one_cpu_has_no_workers(run):
    def work():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return run(1000, 4), {box.state for box in all_boxes()}

    assert in_forked_child(work) == ((True, None), {workers.NONE})


# Ends of processes.

ENDS = """
import atexit, threading, sys, os, signal, time
import numpy as np
from fastrack._crypto import cobblestone, engine as engines

engine = engines.get_engine(threads=4)
schedule = engine.expand_key(cobblestone.MessageKey.raw(bytes(32), bytes(12)))
plain = np.zeros(64 << 20, np.uint8)
sealed = np.empty(plain.size + 16 * 4097, np.uint8)
seal = lambda: engine.seal_run(schedule, plain, sealed, 0)
small = lambda: engine.seal_run(schedule, plain[:8 << 20], sealed[:(8 << 20) + 16 * 513], 0)
def keep_sealing():
    while True:
        seal()
"""


@pytest.mark.parametrize(
    ("end", "printed"),
    [
        ("small()", ""),
        ("small(); time.sleep(0.2)", ""),
        ("threading.Thread(target=keep_sealing, daemon=True).start(); time.sleep(0.05)", ""),
        ("threading.Thread(target=seal).start()", ""),
        ("atexit.register(lambda: print(small()))", "None\n"),
        ("small(); os._exit(0)", ""),
    ],
    ids=["at once", "parked", "at work for a daemon", "at work", "at exit", "without an exit"],
)
def test_a_process_ends(end, printed):
    assert run_python(ENDS + end) == printed


def test_where_no_thread_can_be_started_the_caller_works_alone():
    code = (
        ENDS
        + """
import hashlib, pathlib, resource
engines.get_engine(threads=1).seal_run(schedule, plain, sealed, 0)
whole = hashlib.sha256(sealed).digest()
sealed[:] = 0
size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20),) * 2)  # less than a stack
seal()
print(hashlib.sha256(sealed).digest() == whole, set(os.listdir("/proc/self/task")) == {str(os.getpid())})
"""
    )
    single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    assert run_python(code, **single) == "True True\n"


def test_many_processes_end_while_their_workers_are_awake():
    """Fork them, and let each end as an interpreter does, and not by `os._exit`."""
    code = (
        ENDS
        + """
plain, sealed = plain[:2 << 20], sealed[:(2 << 20) + 16 * 129]
for turn in range(30):
    child = os.fork()
    if child == 0:
        for _ in range(turn % 8):
            seal()
        sys.exit(7)
    assert os.waitpid(child, 0)[1] == 7 << 8, turn
"""
    )
    assert run_python(code) == ""


def test_an_interrupted_process_ends():
    code = ENDS + "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
    code += "try:\n    keep_sealing()\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    assert run_python(code) == "interrupted\n"
