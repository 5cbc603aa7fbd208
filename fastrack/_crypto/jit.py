"""Compile the loops over chunks with numba, on the host's vector AES instructions.

`build(width, native)` returns the kernels of one vector width. A kernel is a single call without the GIL. Several
threads may enter it with the same *counters*: each takes grains of chunks from them until none is left, so that no
thread waits for the interpreter between chunks. A thread counts its chunks as done after it has overwritten the stack
that they used. `drain` takes the grains that are left, and waits for those that other threads have taken.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from fastrack._crypto import gcm_ir, llvm
from fastrack._crypto.cobblestone import CHUNK_SIZE, SEALED_CHUNK_SIZE

# The counters of a kernel, as indexes of 64-bit words on cache lines of their own.
NEXT, BAD, DONE = 0, 8, 16
COUNTER_WORDS = 24
NONE_BAD = int(np.iinfo(np.int64).max)

_BAD, _DONE = BAD * 8, DONE * 8  # in bytes
_NO_MORE = 1 << 40  # grains, more than any run has


@dataclass(frozen=True, slots=True)
class Kernels:
    """The compiled entry points. Addresses and sizes are integers; `bits` is 128 or 256.

    `expand_key` takes `(bits, schedule, material)`; `open_run`, `verify_run` and `seal_run` take `(bits, schedule,
    source, target, first, count, size, grain, counters, wait)`, and `verify_run` ignores its target; `open_gather`
    takes `(bits, schedule, source, target, chunks, starts, table, size, grain, counters, wait)`. With `wait` they
    return when all chunks are done, on whichever thread.
    """

    expand_key: Any
    open_run: Any
    verify_run: Any
    seal_run: Any
    open_gather: Any


@cache
def build(width: int, native: int) -> Kernels:
    """Return the kernels for vectors of `width` bytes on instructions `native` bytes wide, built once in a process.

    A kernel is compiled by its first call, and its code is cached on disk. The cache depends on this file and on the
    closure of the kernel, hence the digest in `variant`.
    """
    variant = f"{width}/{native}/{source_digest()}"

    @cached_njit(nogil=False)  # it is so short that releasing the GIL would cost more under contention
    def expand_key(bits: int, schedule: int, material: int) -> None:
        if bits == 256:
            _expand_key(variant, 256, schedule, material)
        else:
            _expand_key(variant, 128, schedule, material)
        wipe_stack()

    return Kernels(
        expand_key,
        open_run=_build_run(variant, "open", SEALED_CHUNK_SIZE, CHUNK_SIZE),
        verify_run=_build_run(variant, "verify", SEALED_CHUNK_SIZE, 0),
        seal_run=_build_run(variant, "seal", CHUNK_SIZE, SEALED_CHUNK_SIZE),
        open_gather=_build_gather(variant),
    )


def _build_run(variant: str, name: str, source_step: int, target_step: int) -> Any:
    @compiled
    def run(
        bits: int, schedule: int, source: int, target: int, first: int, count: int, size: int,
        grain: int, counters: int, wait: bool,
    ) -> None:  # fmt: skip
        done = 0
        while True:
            start = fetch_add(counters, 1) * grain
            if start >= count:
                break
            stop = min(start + grain, count)
            src, dst = source + start * source_step, target + start * target_step
            remaining = size - start * CHUNK_SIZE
            if bits == 256:
                bad = _chunks(variant, name, 256, schedule, src, dst, first + start, stop - start, remaining)
            else:
                bad = _chunks(variant, name, 128, schedule, src, dst, first + start, stop - start, remaining)
            if bad < stop - start:
                fetch_min(counters + _BAD, first + start + bad)
            done += stop - start
        if done:
            wipe_stack()
            fetch_add(counters + _DONE, done)
        if wait:
            wait_until_done(counters, count)

    return run


def _build_gather(variant: str) -> Any:
    @compiled
    def open_gather(
        bits: int, schedule: int, source: int, target: int, chunks: Any, starts: Any, table: Any, size: int,
        grain: int, counters: int, wait: bool,
    ) -> None:  # fmt: skip
        count = chunks.size
        scratch = _scratch()
        done = 0
        while True:
            start = fetch_add(counters, 1) * grain
            if start >= count:
                break
            stop = min(start + grain, count)
            for index in range(start, stop):
                chunk = chunks[index]
                src = source + chunk * SEALED_CHUNK_SIZE
                length = min(CHUNK_SIZE, size - chunk * CHUNK_SIZE)
                low, high = starts[index], starts[index + 1]
                whole = high - low == 1 and table[low, 2] == length
                dst = target + table[low, 1] if whole else scratch
                if bits == 256:
                    bad = _chunks(variant, "open", 256, schedule, src, dst, chunk, 1, length)
                else:
                    bad = _chunks(variant, "open", 128, schedule, src, dst, chunk, 1, length)
                if bad == 0:
                    fetch_min(counters + _BAD, chunk)
                if not whole:
                    # The scratch buffer of a bad chunk holds zeros, and so do its ranges in the result.
                    for row in range(low, high):
                        copy_bytes(target + table[row, 1], scratch + table[row, 0], table[row, 2])
            done += stop - start
        if done:
            _wipe(scratch, CHUNK_SIZE)
            wipe_stack()
            fetch_add(counters + _DONE, done)
        if wait:
            wait_until_done(counters, count)

    return open_gather


def source_digest(*more: Path) -> str:
    """Return a digest of the source files that compiled functions are made of: those of the engine, and `more`.

    numba decides by a function's own file and closure whether its compiled copy on disk is still valid. Compiled
    functions therefore close over this digest of the other files.
    """
    paths = [Path(__file__).with_name(name) for name in ("llvm.py", "gcm_ir.py", "jit.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in (*paths, *more))).hexdigest()[:16]


def cached_njit(*, nogil: bool) -> Any:
    """Return a decorator that compiles a function, and caches its code on disk if a folder can be written."""

    def compiled(function: Any) -> Any:
        try:
            return njit(nogil=nogil, cache=True)(function)
        except RuntimeError:  # neither this folder nor the cache folder of the user is writable
            return njit(nogil=nogil)(function)

    return compiled


compiled = cached_njit(nogil=True)


def new_counters() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return counters with no grain taken and no bad chunk."""
    counters = np.zeros(COUNTER_WORDS, np.int64)
    counters[BAD] = NONE_BAD
    return counters


@compiled
def drain(counters: int, grain: int, count: int) -> None:
    """Take all grains that are left, and wait for those that other threads have taken."""
    wait_until_done(counters, min(fetch_add(counters, _NO_MORE) * grain, count))


@compiled
def wait_until_done(counters: int, done: int) -> None:
    while fetch_add(counters + _DONE, 0) < done:
        sched_yield()


# The functions of `gcm_ir` as intrinsics. The literals `variant`, `name` and `bits` select the code.


@intrinsic(prefer_literal=True)
def _expand_key(typingctx: Any, variant: Any, bits: Any, schedule: Any, material: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.call(
            gcm_ir.chunk_function(builder.module, _parse_variant(variant, bits), "expand_key"), values[2:]
        )

    return types.int64(variant, bits, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def _chunks(
    typingctx: Any, variant: Any, name: Any, bits: Any, schedule: Any, source: Any, target: Any, first: Any, count: Any,
    size: Any,
) -> Any:  # fmt: skip
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        function = gcm_ir.run_function(builder.module, _parse_variant(variant, bits), name.literal_value)
        return builder.call(function, values[3:])

    return types.int64(variant, name, bits, *[types.int64] * 6), codegen


def _parse_variant(variant: Any, bits: Any) -> gcm_ir.Variant:
    width, native, _ = variant.literal_value.split("/")
    return gcm_ir.Variant(bits.literal_value, int(width), int(native))


# Memory and threads.


@intrinsic
def fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    return types.int64(types.int64, types.int64), _atomic("add")


@intrinsic
def fetch_min(typingctx: Any, address: Any, value: Any) -> Any:
    return types.int64(types.int64, types.int64), _atomic("min")


def _atomic(operation: str) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        address, value = values
        pointer = builder.inttoptr(address, llvm.I64.as_pointer())
        return builder.atomic_rmw(operation, pointer, value, "seq_cst")

    return codegen


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, size: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        gcm_ir.copy(builder, *values)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _wipe(typingctx: Any, address: Any, size: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        gcm_ir.fill_zero(builder, *values)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _scratch(typingctx: Any) -> Any:
    """Return the address of `CHUNK_SIZE` bytes on the stack, valid until the kernel returns.

    numba would free an array after its last use by name, though its address is still in use.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        with builder.goto_entry_block():
            scratch = builder.alloca(llvm.I8, CHUNK_SIZE)
        return builder.ptrtoint(scratch, llvm.I64)

    return types.int64(), codegen


@intrinsic
def wipe_stack(typingctx: Any) -> Any:
    """Overwrite the stack below the frame of this function, where functions that it called have left data."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        builder.call(gcm_ir.stack_wiper(builder.module), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def isolate_frame(typingctx: Any) -> Any:
    """Prevent inlining of the function that calls this, so that `wipe_stack` in its callers covers its frame."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        gcm_ir.isolate_frame(builder.function)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def sched_yield(typingctx: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        function = llvm.declare(builder.module, "sched_yield", ir.FunctionType(llvm.I32, []))
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen
