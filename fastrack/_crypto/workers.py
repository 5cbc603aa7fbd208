"""Threads that help with one native call.

The caller works too, so that a run goes on however long its helpers wait for the interpreter, and nobody waits for a
helper that came too late to find work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from fastrack._crypto.cobblestone import CHUNK_SIZE
from fastrack._util import trace as timeline
from fastrack._util.fork import after_fork

_ALONE = 2 * 1024 * 1024 // CHUNK_SIZE  # runs shorter than this are done before a helper wakes up
_HUGE_PAGE = 2 * 1024 * 1024 // CHUNK_SIZE  # tickets this long keep two threads from touching one fresh huge page


def run(
    kernel: Callable[..., None],
    arguments: tuple[Any, ...],
    count: int,
    threads: int,
    kept: object,
    *,
    alone: int = _ALONE,
) -> int | None:
    """Work `count` chunks on up to `threads` threads; the number of the first bad one, or None.

    `kept` is what the kernel's addresses point into: it lives until the last thread has left the kernel. For every
    `alone` chunks one more thread helps.
    """
    from fastrack._crypto import jit as kernels

    board = kernels.new_board()
    place = int(board.__array_interface__["data"][0])
    helpers = min(threads - 1, count // alone)
    ticket = _ticket(count, helpers + 1)

    # When this is over, nobody reads or writes what belongs to the caller, whatever happened. The board is what counts:
    # the pool's futures may be late, or lost, and a helper that comes late finds no ticket. The kernel itself waits for
    # the others, since every return to the interpreter may cost a busy one's whole turn.
    try:
        start(lambda: kernel(*arguments, ticket, place, False), helpers, (kept, board))
        kernel(*arguments, ticket, place, True)
    except BaseException:
        kernels.settle(place, ticket, count)
        raise
    bad = int(board[kernels.BAD])
    return None if bad == kernels.ALL_GOOD else bad


def start(work: Callable[[], None], helpers: int, kept: object) -> None:
    """Have other threads call `work`, on other CPUs than this thread's, as soon as they get to it.

    `kept` lives until the last of them is done. Fewer threads help where no more can be had.
    """
    if not helpers:
        return
    others = _other_cpus()
    wanted = timeline.current()
    doing = "" if wanted is None else wanted.doing

    def help_out(_keepalive: object = kept) -> None:  # the function holds its default argument
        if others:
            with suppress(OSError):  # a sandbox may not allow it
                os.sched_setaffinity(0, others)
        with wanted.helping(doing) if wanted is not None and doing else nullcontext():
            work()

    try:
        for _ in range(helpers):
            _pool().submit(help_out)
    except RuntimeError:
        pass  # no more threads to be had, or the interpreter is shutting down


def default_threads() -> int:
    """As many as the CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _other_cpus() -> AbstractSet[int]:
    """The CPUs that this thread may run on but for the one it is on; none where that cannot be said.

    A scheduler likes to wake a thread where its waker runs. If something else keeps the other CPUs busy it may leave it
    there, and the two would share one CPU.
    """
    return frozenset() if _current_cpu is None else os.sched_getaffinity(0) - {_current_cpu()}


def _ticket(count: int, threads: int) -> int:
    """Chunks a thread takes at a time: whole huge pages if there are plenty, else an eighth of a fair share."""
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
                _executor = ThreadPoolExecutor(max(32, default_threads()), thread_name_prefix="fastrack")
    return _executor


def _forget_threads() -> None:
    """A forked child has none of its parent's threads: it starts its own when it needs them."""
    global _executor, _lock  # noqa: PLW0603
    _executor = None
    _lock = threading.Lock()


after_fork(_forget_threads)


def source_digest(*more: Path) -> str:
    """Return a digest of the files that compiled functions are made of.

    To see whether a function kept on disk is still good, numba looks only at its own file and at what it closes over.
    So compiled functions close over this digest of the others: those of the engine, and `more`.
    """
    paths = [Path(__file__).with_name(name) for name in ("llvm.py", "gcm_ir.py", "jit.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in (*paths, *more))).hexdigest()[:16]
