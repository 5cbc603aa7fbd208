"""The native call that opens many messages: a table of jobs, which all threads work through chunk by chunk.

Each thread expands the key of a message on its own stack when it comes to the message, and overwrites it at the end, so
that no key schedule outlives the call.
"""

from __future__ import annotations

from typing import Any

from fastrack._crypto import base
from fastrack._crypto.isa import SCHEDULE_SIZE
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE
from fastrack_native import kernels_chunks
from fastrack_native.compiler import compiled
from fastrack_native.intrinsics import at, fetch_add, fetch_min
from fastrack_native.kernels_chunks import BAD_OFFSET, Counters, _call, wipe

_schedule = kernels_chunks.memory_on_stack(SCHEDULE_SIZE)


def build_jobs(*isa: object) -> dict[str, Any]:
    """Return `open_jobs` of the `InstructionSet` of these fields: `(table, jobs, count, grain, counters)`.

    `table` is the address of so many jobs, and `count` the number of their chunks. Bad chunks are counted through all
    jobs.
    """
    variant = "/".join(map(str, isa))

    open_ranges = kernels_chunks.build_ranges(variant)

    @compiled
    def open_jobs(table: int, jobs: int, count: int, grain: int, counters: Counters) -> None:
        schedule, buffer = _schedule(), kernels_chunks.chunk_buffer()
        current = -1
        done = 0
        while True:
            start = fetch_add(counters, 1) * grain
            if start >= count:
                break
            stop = min(start + grain, count)
            done += stop - start
            job = _find(table, jobs, start)
            while start < stop:
                following = count if job + 1 == jobs else at(table, (job + 1) * base.WORDS + base.FIRST)
                end = min(stop, following)
                if start == end:  # a job without chunks
                    job += 1
                    continue
                row = table + job * base.WORDS * 8
                bits, source, target = at(row, base.BITS), at(row, base.SOURCE), at(row, base.TARGET)
                size, chunks = at(row, base.SIZE), at(row, base.CHUNKS)
                if job != current:
                    _call(variant, "expand_key", bits, (schedule, at(row, base.KEY)))
                    current = job
                first = at(row, base.FIRST)
                index = start - first
                if chunks in (base.WHOLE, base.SEALS, base.WIDENS):
                    dst, remaining = target + index * CHUNK_SIZE, size - index * CHUNK_SIZE
                    if chunks == base.WHOLE:
                        src = source + index * SEALED_CHUNK_SIZE
                        bad = _call(variant, "open", bits, (schedule, src, dst, index, end - start, remaining))
                    elif chunks == base.WIDENS:
                        src, dst = source + index * SEALED_CHUNK_SIZE, dst + index * CHUNK_SIZE
                        run = index, end - start, remaining, buffer, at(row, base.STARTS)
                        bad = _call(variant, "widen", bits, (schedule, src, dst, *run))
                    else:
                        work = schedule, source + index * CHUNK_SIZE, dst, index, end - start, remaining, buffer
                        bad = _call(variant, "reencrypt", bits, work)
                    if bad < end - start:
                        fetch_min(counters + BAD_OFFSET, start + bad)
                else:
                    starts, rows = at(row, base.STARTS), at(row, base.RANGES)
                    for entry in range(index, index + end - start):
                        chunk, after = at(chunks, entry), at(chunks, min(entry + 1, following - first - 1))
                        low, high = at(starts, entry), at(starts, entry + 1)
                        if not open_ranges(bits, schedule, source, target, chunk, after, size, rows, low, high, buffer):
                            fetch_min(counters + BAD_OFFSET, start + entry - index)
                start = end
                job += 1
        if done:
            wipe(buffer, SEALED_CHUNK_SIZE)
            wipe(schedule, SCHEDULE_SIZE)
            kernels_chunks.wipe_stack()

    return {"open_jobs": open_jobs}


@compiled
def _find(table: int, jobs: int, chunk: int) -> int:
    """Return the job of a chunk: the last that starts there or before."""
    low, high = 0, jobs
    while high - low > 1:
        middle = (low + high) // 2
        if at(table, middle * base.WORDS + base.FIRST) <= chunk:
            low = middle
        else:
            high = middle
    return low
