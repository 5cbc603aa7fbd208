"""Measure single kernels that have little to do, by the device's clock."""

import os

from bench.gpu.launches import GOOD, ByteRuns, Launches
from bench.gpu.timing import Row, interleave
from fastrack._crypto.cobblestone import CHUNK_SIZE, NONCE_SIZE, ciphertext_size

_BITS = 256


def measure(gpu, plan, say):
    """Yield rows of a kernel that opens one chunk, some, and two for every multiprocessor."""
    launches = Launches(gpu)
    content = ByteRuns(gpu).prepare(os.urandom(_BITS // 8), os.urandom(NONCE_SIZE)).data
    state, word = gpu.memory(content.size), gpu.memory(8)
    launches.put(state.pointer, content)
    launches.put(word.pointer, GOOD.to_bytes(8, "little"))
    for chunks in (1, 64, 2 * gpu.driver.multiprocessors):
        size = chunks * CHUNK_SIZE
        say(f"    {chunks} chunks")
        plain, sealed, target = gpu.memory(size), gpu.memory(ciphertext_size(size)), gpu.memory(size)
        gpu.fill(plain.pointer, 0x5A, size, launches.stream)
        launches.seal(_BITS, chunks, state.pointer, plain.pointer, sealed.pointer, 0, chunks, size)
        where = (state.pointer, sealed.pointer, target.pointer, 0, chunks, size, word.pointer)

        def job(chunks=chunks, where=where):
            launches.open(_BITS, chunks, *where)

        runs = {f"open_{_BITS}": lambda _, job=job: _time(gpu, launches, job)}
        runs |= {"nothing": lambda _: _time(gpu, launches, lambda: None)}
        for name, times in interleave(runs, plan).items():
            yield Row("single kernels", name, size, times, {"chunks": chunks})


def _time(gpu, launches, job):
    before = gpu.stamp(launches.stream)
    job()
    after = gpu.stamp(launches.stream)
    launches.wait()
    return gpu.elapsed(before, after)
