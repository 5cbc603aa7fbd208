"""Measure the bounds of a transfer: copies between page-locked memory and the device, and the host's own copy."""

import os

import numpy as np

from bench.gpu.timing import Row, interleave, rows, wall
from fastrack._crypto import memcpy as packing

UP, DOWN, FILL, PIN = "host to device", "device to host", "fill page-locked memory", "allocate page-locked memory"
_PIN = 8 << 20


def measure(gpu, plan):
    """Yield rows of copies by size, of the fill by threads, and of an allocation."""
    size = max(plan.link_sizes)
    stream, locked, there = gpu.driver.stream(high_priority=True), gpu.driver.host(size), gpu.driver.memory(size)
    locked[:] = 7

    def up(count):
        gpu.upload(there.pointer, locked[:count], stream)
        gpu.wait(stream)

    def down(count):
        gpu.download(locked[:count], there.pointer, stream)
        gpu.wait(stream)

    for count in plan.link_sizes:
        runs = {UP: lambda _, n=count: wall(up, n), DOWN: lambda _, n=count: wall(down, n)}
        yield from rows("link", count, runs, plan)
    source = np.full(size, 9, np.uint8)
    cores = len(os.sched_getaffinity(0))
    threads = [count for count in plan.fill_threads if count <= cores]
    print(f"    threads: {threads}")
    runs = {n: lambda _, n=n: wall(packing.copy, locked, source, n) for n in threads}
    yield from (Row("link", FILL, size, times, {"threads": n}) for n, times in interleave(runs, plan).items())
    yield from rows("link", _PIN, {PIN: lambda _: wall(gpu.driver.host, _PIN)}, plan)
