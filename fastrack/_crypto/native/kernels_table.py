"""The native call that opens many messages: a table of jobs, which all threads work through chunk by chunk.

Each thread expands the key of a message on its own stack when it comes to the message, and overwrites it at the end, so
that no key schedule outlives the call.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from fastrack._crypto.cobblestone import CHUNK_SIZE, SEALED_CHUNK_SIZE
from fastrack._crypto.isa import SCHEDULE_SIZE
from fastrack._crypto.job_table import (
    BITS,
    CHUNKS,
    FIRST,
    KEY,
    RANGES,
    SEALS,
    SIZE,
    SOURCE,
    STARTS,
    TARGET,
    WHOLE,
    WORDS,
)
from fastrack._crypto.native import llvm
from fastrack._crypto.native.compiler import compiled
from fastrack._crypto.native.intrinsics import emitted, fetch_add, fetch_min
from fastrack._crypto.native.kernels_chunks import (
    _BAD,
    _ROW_SIZE,
    Counters,
    _buffer,
    _call,
    wipe,
    wipe_stack,
)


def build_jobs(*isa: object) -> dict[str, Any]:
    """Return `open_jobs` of the `InstructionSet` of these fields: `(table, jobs, count, grain, counters)`.

    `table` is the address of so many jobs, and `count` the number of their chunks. Bad chunks are counted through all
    jobs.
    """
    variant = "/".join(map(str, isa))

    @compiled
    def open_jobs(table: int, jobs: int, count: int, grain: int, counters: Counters) -> None:
        schedule, buffer = _schedule(), _buffer()
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
                following = count if job + 1 == jobs else _load(table, (job + 1) * WORDS + FIRST)
                end = min(stop, following)
                if start == end:  # a job without chunks
                    job += 1
                    continue
                row = table + job * WORDS * 8
                bits, source, target = _load(row, BITS), _load(row, SOURCE), _load(row, TARGET)
                size, chunks = _load(row, SIZE), _load(row, CHUNKS)
                if job != current:
                    _call(variant, "expand_key", bits, (schedule, _load(row, KEY)))
                    current = job
                first = _load(row, FIRST)
                index = start - first
                if chunks == WHOLE:
                    src, dst = source + index * SEALED_CHUNK_SIZE, target + index * CHUNK_SIZE
                    remaining = size - index * CHUNK_SIZE
                    bad = _call(variant, "open", bits, (schedule, src, dst, index, end - start, remaining))
                    if bad < end - start:
                        fetch_min(counters + _BAD, start + bad)
                elif chunks == SEALS:
                    src, dst = source + index * CHUNK_SIZE, target + index * CHUNK_SIZE
                    work = schedule, src, dst, index, end - start, size - index * CHUNK_SIZE, buffer
                    bad = _call(variant, "reencrypt", bits, work)
                    if bad < end - start:
                        fetch_min(counters + _BAD, start + bad)
                else:
                    starts, rows = _load(row, STARTS), _load(row, RANGES)
                    for entry in range(index, index + end - start):
                        chunk, after = _load(chunks, entry), _load(chunks, min(entry + 1, following - first - 1))
                        low = _load(starts, entry)
                        ranges = _load(starts, entry + 1) - low
                        src = source + chunk * SEALED_CHUNK_SIZE
                        length = min(CHUNK_SIZE, size - chunk * CHUNK_SIZE)
                        if ranges == 1 and _load(rows, 3 * low + 2) == length:
                            dst = target + _load(rows, 3 * low + 1)
                            good = _call(variant, "open", bits, (schedule, src, dst, chunk, 1, length))
                        else:
                            ahead, place = source + after * SEALED_CHUNK_SIZE, rows + low * _ROW_SIZE
                            part = schedule, src, target, chunk, length, ahead, place, ranges, buffer
                            good = _call(variant, "ranges", bits, part)
                        if good == 0:
                            fetch_min(counters + _BAD, start + entry - index)
                start = end
                job += 1
        if done:
            wipe(buffer, SEALED_CHUNK_SIZE)
            wipe(schedule, SCHEDULE_SIZE)
            wipe_stack()

    return {"open_jobs": open_jobs}


@compiled
def _find(table: int, jobs: int, chunk: int) -> int:
    """Return the job of a chunk: the last that starts there or before."""
    low, high = 0, jobs
    while high - low > 1:
        middle = (low + high) // 2
        if _load(table, middle * WORDS + FIRST) <= chunk:
            low = middle
        else:
            high = middle
    return low


@emitted
def _load(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    """Return the word at an index from an address on."""
    pointer = builder.inttoptr(address, llvm.I64.as_pointer())
    return builder.load(builder.gep(pointer, [index]))


@emitted
def _schedule(builder: ir.IRBuilder) -> ir.Value:
    """Return the address of a key schedule on the stack, valid until the kernel returns."""
    with builder.goto_entry_block():
        schedule = builder.alloca(llvm.I8, SCHEDULE_SIZE)
        schedule.align = 64
    return builder.ptrtoint(schedule, llvm.I64)
