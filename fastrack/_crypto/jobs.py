"""The native call that opens many messages: a table of jobs, which all threads work through chunk by chunk.

Each thread expands the key of a message on its own stack when it comes to the message, and overwrites it at the end, so
that no key schedule outlives the call. Importing this module imports numba, which takes a third of a second.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir

from fastrack._crypto import gcm_ir, llvm
from fastrack._crypto.cobblestone import CHUNK_SIZE, SEALED_CHUNK_SIZE
from fastrack._crypto.forms import Form
from fastrack._crypto.jit import (
    _BAD,
    _DONE,
    _call,
    _wipe,
    compiled,
    copy_bytes,
    emitted,
    fetch_add,
    fetch_min,
    source_digest,
    wait_until_done,
    wipe_stack,
)
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


@cache
def build(form: Form) -> Any:
    """Return the kernel `(table, jobs, count, grain, counters, wait)` of a form, built once in a process.

    `table` is the address of so many jobs, and `count` the number of their chunks. Bad chunks are counted through all
    jobs.
    """
    variant = "/".join(map(str, (*form, source_digest(Path(__file__).with_name("job_table.py")))))

    # One function, since numba would not find a closure over compiled functions in its cache.
    @compiled
    def open_jobs(table: int, jobs: int, count: int, grain: int, counters: int, wait: bool) -> None:
        schedule, scratch = _schedule(), _scratch()
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
                end = stop if job + 1 == jobs else min(stop, _load(table, (job + 1) * WORDS + FIRST))
                if start == end:  # a job without chunks
                    job += 1
                    continue
                row = table + job * WORDS * 8
                bits, source, target = _load(row, BITS), _load(row, SOURCE), _load(row, TARGET)
                size, chunks = _load(row, SIZE), _load(row, CHUNKS)
                if job != current:
                    _call(variant, "expand_key", bits, (schedule, _load(row, KEY)))
                    current = job
                index = start - _load(row, FIRST)
                if chunks == WHOLE:
                    src, dst = source + index * SEALED_CHUNK_SIZE, target + index * CHUNK_SIZE
                    remaining = size - index * CHUNK_SIZE
                    bad = _call(variant, "open", bits, (schedule, src, dst, index, end - start, remaining))
                    if bad < end - start:
                        fetch_min(counters + _BAD, start + bad)
                elif chunks == SEALS:
                    for chunk in range(index, index + end - start):
                        src, dst = source + chunk * CHUNK_SIZE, target + chunk * CHUNK_SIZE
                        length = min(CHUNK_SIZE, size - chunk * CHUNK_SIZE)
                        _call(variant, "seal", bits, (schedule, src, scratch, chunk, 1, length))
                        if _call(variant, "open", bits, (schedule, scratch, dst, chunk, 1, length)) == 0:
                            fetch_min(counters + _BAD, start + chunk - index)
                else:
                    starts, ranges = _load(row, STARTS), _load(row, RANGES)
                    for entry in range(index, index + end - start):
                        chunk = _load(chunks, entry)
                        low, high = _load(starts, entry), _load(starts, entry + 1)
                        src = source + chunk * SEALED_CHUNK_SIZE
                        length = min(CHUNK_SIZE, size - chunk * CHUNK_SIZE)
                        whole = high - low == 1 and _load(ranges, 3 * low + 2) == length
                        dst = target + _load(ranges, 3 * low + 1) if whole else scratch
                        if _call(variant, "open", bits, (schedule, src, dst, chunk, 1, length)) == 0:
                            fetch_min(counters + _BAD, start + entry - index)
                        if not whole:
                            _copy_ranges(ranges, low, high, target, scratch)
                start = end
                job += 1
        if done:
            _wipe(scratch, SEALED_CHUNK_SIZE)
            _wipe(schedule, gcm_ir.SCHEDULE_SIZE)
            wipe_stack()
            fetch_add(counters + _DONE, done)
        if wait:
            wait_until_done(counters, count)

    return open_jobs


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


@compiled
def _copy_ranges(ranges: int, low: int, high: int, target: int, scratch: int) -> None:
    """Copy ranges of a chunk to a result. The scratch buffer of a bad chunk holds zeros, and so do they then."""
    for item in range(low, high):
        offset, place, length = _load(ranges, 3 * item), _load(ranges, 3 * item + 1), _load(ranges, 3 * item + 2)
        copy_bytes(target + place, scratch + offset, length)


@emitted
def _load(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    """Return the word at an index from an address on."""
    pointer = builder.inttoptr(address, llvm.I64.as_pointer())
    return builder.load(builder.gep(pointer, [index]))


@emitted
def _schedule(builder: ir.IRBuilder) -> ir.Value:
    """Return the address of a key schedule on the stack, valid until the kernel returns."""
    return _allocate(builder, gcm_ir.SCHEDULE_SIZE)


@emitted
def _scratch(builder: ir.IRBuilder) -> ir.Value:
    """Return the address of room for a sealed chunk on the stack, valid until the kernel returns."""
    return _allocate(builder, SEALED_CHUNK_SIZE)


def _allocate(builder: ir.IRBuilder, size: int) -> ir.Value:
    with builder.goto_entry_block():
        memory = builder.alloca(llvm.I8, size)
        memory.align = 64
    return builder.ptrtoint(memory, llvm.I64)
