"""A pool of threads that share the work of one native call with its caller.

The caller works too: a call makes progress however long its workers wait for the interpreter's lock, and never waits
for a worker that has not begun.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from array import array
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

from fastrack._crypto.cobblestone import CHUNK_SIZE
from fastrack._crypto.library import Unit, load
from fastrack._util import trace
from fastrack._util.fork import after_fork

# The counters of a kernel, as indexes of 64-bit words on cache lines of their own.
NEXT, BAD, DONE = 0, 8, 16
COUNTER_WORDS = 24
NONE_BAD = (1 << 63) - 1
_NEW_COUNTERS = array("q", [NONE_BAD if word == BAD else 0 for word in range(COUNTER_WORDS)])

DRAIN = Unit("fastrack._crypto.jit", "build_drain")
PARALLEL_THRESHOLD = 2 * 1024 * 1024 // CHUNK_SIZE  # chunks that one thread finishes before another has woken up
_HUGE_PAGE = 2 * 1024 * 1024 // CHUNK_SIZE  # with grains this long two threads never touch one fresh huge page


def run(
    kernel: Callable[..., None],
    arguments: tuple[Any, ...],
    count: int,
    threads: int,
    keepalive: object,
    *,
    threshold: int = PARALLEL_THRESHOLD,
) -> int | None:
    """Process `count` chunks on up to `threads` threads, and return the number of the first bad chunk, or None.

    `keepalive` owns the memory that the kernel's addresses point into; it lives until the last thread has left the
    kernel. One more thread takes part for every `threshold` chunks.
    """
    drain = load(DRAIN).drain  # first, as it must not fail later
    counters = new_counters()
    address = counters.buffer_info()[0]
    workers = min(threads - 1, count // threshold)
    grain_size = _grain_size(count, workers + 1)

    # No thread may read or write the caller's memory after this function has ended, however it ends. The counters alone
    # decide that: futures of the pool may be late or lost, and a late worker finds no grain left. The kernel itself
    # waits for the other threads, since a return to the interpreter may cost a whole switch interval of its lock.
    try:
        if workers:
            start(lambda: kernel(*arguments, grain_size, address, False), workers, (keepalive, counters))
        kernel(*arguments, grain_size, address, True)
    except BaseException:
        drain(address, grain_size, count)
        raise
    bad = counters[BAD]
    return None if bad == NONE_BAD else bad


def new_counters() -> array[int]:
    """Return counters with no grain taken and no bad chunk."""
    return array("q", _NEW_COUNTERS)


def start(work: Callable[[], None], workers: int, keepalive: object) -> None:
    """Submit `work` to so many threads of the pool, on other CPUs than that of the calling thread.

    `keepalive` lives until the last of them has ended. Fewer run where no more threads can be started.
    """
    if not workers:
        return
    others = _other_cpus()
    timeline = trace.current()
    span = "" if timeline is None else timeline.current_span

    def worker(_keepalive: object = keepalive) -> None:  # the default argument holds a reference
        if others:
            with suppress(OSError):  # a sandbox may forbid it
                os.sched_setaffinity(0, others)
        with timeline.helping(span) if timeline is not None and span else nullcontext():
            work()

    try:
        for _ in range(workers):
            _pool().submit(worker)
    except RuntimeError:
        pass  # no more threads can be started, or the interpreter is shutting down


def default_threads() -> int:
    """Return the number of CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _other_cpus() -> AbstractSet[int]:
    """Return the CPUs that this thread may use except its current one; the empty set where the system cannot tell.

    A scheduler prefers to wake a thread on the CPU of the thread that woke it. With the other CPUs busy it may leave it
    there, and the two would share one CPU.
    """
    return frozenset() if _current_cpu is None else os.sched_getaffinity(0) - {_current_cpu()}


def _grain_size(count: int, threads: int) -> int:
    """Return the number of chunks that a thread takes at a time: whole huge pages, or an eighth of a fair share."""
    share = count // threads
    return _HUGE_PAGE if share >= 8 * _HUGE_PAGE else max(1, share // 8)


_current_cpu = getattr(ctypes.PyDLL(None), "sched_getcpu", None) if sys.platform == "linux" else None
_executor: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def _pool() -> ThreadPoolExecutor:
    global _executor  # noqa: PLW0603
    if _executor is None:
        with _lock:
            if _executor is None:
                _executor = _new_pool()
    return _executor


def _new_pool() -> ThreadPoolExecutor:
    """Return a pool with one thread.

    A signal handler that raises while a pool starts its first thread leaves one that no pool knows and that ends only
    with the pool: the interpreter would wait for it forever when it exits.
    """
    pool = ThreadPoolExecutor(max(32, default_threads()), thread_name_prefix="fastrack")
    try:
        pool.submit(int)
    except BaseException:
        pool.shutdown(wait=False)
        raise
    return pool


def _reset_pool() -> None:
    """Drop the pool in a forked child, which has none of its parent's threads; the next call starts another."""
    global _executor, _lock  # noqa: PLW0603
    _executor = None
    _lock = threading.Lock()


after_fork(_reset_pool)
