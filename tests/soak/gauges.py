"""Gauges of a process's resources, and the check that all were given back."""

import ctypes
import gc
import os
import re
import threading
import time
from pathlib import Path
from typing import NamedTuple

GROWTH = 64 << 20  # bytes that the resident size may grow by after the warm-up
POOL = 32  # worker threads of native calls, which come when they are first needed, and stay
_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
PATIENCE = 20  # seconds for processes and threads to go


class Gauges(NamedTuple):
    """Resources held when no thread of the soak runs. Worker threads of native calls are counted apart."""

    resident: int
    threads: int
    pool: int
    native: int
    files: int
    children: int
    shared: int


def give_back_arrays():
    """Have malloc map every array on its own, so that what is freed is gone, and not part of a heap with holes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 18)


def read():
    """Read the resources that the process holds now, garbage collected and free memory given back."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    tasks = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    threads, pool = threading.active_count(), tasks.count("fastrack\n")
    status = Path("/proc/self/status").read_text()
    return Gauges(
        resident=int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024,
        threads=threads,
        pool=pool,
        native=len(tasks) - threads - pool,
        files=len(list(Path("/proc/self/fd").iterdir())),
        children=_descendants(os.getpid()),
        shared=sum(_is_ours(path) for path in Path("/dev/shm").iterdir()),
    )


def settled(before):
    """The gauges once they are back to those before, or after some patience; and what is not."""
    deadline = time.monotonic() + PATIENCE
    while (problems := _grown(before, now := read())) and time.monotonic() < deadline:
        time.sleep(0.2)
    return now, problems


def _grown(before, now):
    problems = [
        f"{what}: {getattr(before, what)} before, {getattr(now, what)} now"
        for what in ("threads", "native", "files", "children", "shared")
        if getattr(now, what) > getattr(before, what)
    ]
    if now.pool > POOL:
        problems.append(f"{now.pool} threads in the pool")
    if now.resident > before.resident + GROWTH:
        problems.append(f"resident: {before.resident >> 20} MiB before, {now.resident >> 20} MiB now")
    return problems


def _descendants(process):
    count = 0
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:  # it has just ended
            continue
        count += len(children) + sum(_descendants(child) for child in children)
    return count


def _is_ours(path):
    """Return whether torch or multiprocessing keeps it there; other programs may come and go."""
    return path.name.startswith(("torch_", "psm_", "sem.mp-")) and path.owner() == Path("/proc/self").owner()
