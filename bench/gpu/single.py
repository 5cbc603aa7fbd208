"""Measure single kernels that have little to do, by the device's clock."""

import os

from bench.gpu.launches import GOOD, ByteRuns, Launches
from bench.gpu.timing import on_device, rows
from fastrack.format import CHUNK_SIZE, NONCE_SIZE, ciphertext_size

_BITS = 256


def measure(gpu, plan):
    """Yield rows of a kernel that opens one chunk, some, and two for every multiprocessor."""
    launches = Launches(gpu)
    content = ByteRuns(gpu).prepare(os.urandom(_BITS // 8), os.urandom(NONCE_SIZE)).data
    state, word = gpu.memory(content.size), gpu.memory(8)
    launches.put(state.pointer, content)
    launches.put(word.pointer, GOOD.to_bytes(8, "little"))
    for chunks in (1, 64, 2 * gpu.driver.multiprocessors):
        size = chunks * CHUNK_SIZE
        print(f"    {chunks} chunks")
        plain, sealed, target = gpu.memory(size), gpu.memory(ciphertext_size(size)), gpu.memory(size)
        gpu.fill(plain.pointer, 0x5A, size, launches.stream)
        launches.seal(_BITS, chunks, state.pointer, plain.pointer, sealed.pointer, 0, chunks, size)
        where = (state.pointer, sealed.pointer, target.pointer, 0, chunks, size, word.pointer)

        def job(chunks=chunks, where=where):
            launches.open(_BITS, chunks, *where)

        jobs = {f"open_{_BITS}": job, "nothing": lambda: None}
        runs = {name: lambda _, job=job: on_device(gpu, launches.stream, [job]) for name, job in jobs.items()}
        yield from rows("single kernels", size, runs, plan, chunks=chunks)
