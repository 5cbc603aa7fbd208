"""Worker threads that share the work of one native call with its caller.

The caller works too, and never waits for a worker that has not begun. The workers wait in native code, where they need
neither the interpreter nor its lock: `kernels_threads` has what they do, and how callers and they agree.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable
from typing import Any

from fastrack._util import trace
from fastrack._util.cpus import usable_cpus
from fastrack._util.fork import after_fork
from fastrack.format import CHUNK_SIZE

# The counters of a kernel, as indexes of 64-bit words on cache lines of their own.
NEXT, BAD = 0, 8
COUNTER_WORDS = 16
NONE_BAD = (1 << 63) - 1

# The layout of a box, in words, and its states. `NONE` is zero, as new memory is.
STATE, OWNER, ENTRY, THREAD, START, STOP, AWAKE, STAYS = range(8)
MUTEX, CONDITION, MASK, ARGUMENTS = 8, 16, 24, 40
WORDS = 16  # of arguments: a role, and those of the kernel
CALLER, WORKER = 0, 1  # the roles
BOX_SIZE = 8 * (ARGUMENTS + WORDS)
SHARED, STREAK, CALLING = 8, 9, 10  # words before the first box: when work was shared, how often in a row, its thread
NONE, FREE, CLAIMED, POSTED, RUNNING, DONE = range(6)

PARALLEL_THRESHOLD = (512 << 10) // CHUNK_SIZE  # chunks for each thread that is awake
WAKING_THRESHOLD = (2 << 20) // CHUNK_SIZE  # chunks that one thread finishes before another has woken up
_HUGE_PAGE = 2 * 1024 * 1024 // CHUNK_SIZE  # with grains this long two threads never touch one fresh huge page


def run(
    kernel: Callable[..., int],
    arguments: tuple[Any, ...],
    count: int,
    threads: int,
    *,
    threshold: int = PARALLEL_THRESHOLD,
    waking_threshold: int = WAKING_THRESHOLD,
) -> int | None:
    """Process `count` chunks on up to `threads` threads, and return the number of the first bad chunk, or None.

    One more thread takes part for every `threshold` chunks, if it is awake, and is woken for every `waking_threshold`.
    """
    workers = min(threads - 1, count // threshold)
    fair = count // (workers + 1)
    # A thread takes whole huge pages at a time, or an eighth of a fair share.
    grain = _HUGE_PAGE if fair >= 8 * _HUGE_PAGE else max(1, fair // 8)
    bad = share(kernel, (*arguments, grain), workers, count // waking_threshold)
    return None if bad == NONE_BAD else bad


def share(kernel: Callable[..., int], arguments: tuple[Any, ...], workers: int, wakes: int) -> int:
    """Call a kernel on this thread and at most so many workers, and return the counter `BAD` after it.

    At most `wakes` workers are woken, or one in a streak of such calls.
    No thread uses the memory that the arguments point into after this has ended, however it ends.
    """
    timeline = trace.active if workers > 0 else None
    if timeline is None:
        return kernel(*arguments, workers, wakes, _boxes, 0)
    spans = array("q", bytes(8 * (1 + 3 * workers)))
    bad = kernel(*arguments, workers, wakes, _boxes, spans.buffer_info()[0])
    for row in range(1, 1 + 3 * spans[0], 3):
        timeline.add_worker(*spans[row : row + 3])
    return bad


def default_threads() -> int:
    """Return the number of CPUs that this process may run on, by its affinity and the quota of its control groups."""
    return usable_cpus()


def _new_boxes(count: int) -> int:
    """Return the address of so many boxes without a thread, behind one that has their number.

    It is never given back, as threads use it until the process ends.
    """
    allocate = ctypes.pythonapi.PyMem_RawCalloc
    allocate.argtypes, allocate.restype = (ctypes.c_size_t, ctypes.c_size_t), ctypes.c_void_p
    memory = allocate(count + 2, BOX_SIZE)
    if memory is None:
        raise MemoryError("no memory for the work of threads")
    boxes = int(memory) + -int(memory) % 64
    ctypes.c_int64.from_address(boxes).value = count
    return boxes


def _reset_boxes() -> None:
    """Forget the threads in a forked child, which has none of them; the next call starts others."""
    ctypes.memset(_boxes + 8, 0, (_COUNT + 1) * BOX_SIZE - 8)


_COUNT = max(32, os.cpu_count() or 1)
_boxes = _new_boxes(_COUNT)
after_fork(_reset_boxes)
