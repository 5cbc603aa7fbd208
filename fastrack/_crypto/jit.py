"""Compile the loops over chunks with numba, on the host's AES instructions.

`build(form)` returns the kernels of one form. A kernel is a single call without the GIL. Several
threads may enter it with the same *counters*: each takes grains of chunks from them until none is left, so that no
thread waits for the interpreter between chunks. A thread counts its chunks as done after it has overwritten the stack
that they used. `drain` takes the grains that are left, and waits for those that other threads have taken.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from fastrack._crypto import gcm_ir, instructions, llvm
from fastrack._crypto.cobblestone import CHUNK_SIZE, SEALED_CHUNK_SIZE
from fastrack._crypto.forms import Form

# The counters of a kernel, as indexes of 64-bit words on cache lines of their own.
NEXT, BAD, DONE = 0, 8, 16
COUNTER_WORDS = 24
NONE_BAD = int(np.iinfo(np.int64).max)

_NEW_COUNTERS = array("q", [NONE_BAD if word == BAD else 0 for word in range(COUNTER_WORDS)])
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


_SOURCES = ("forms.py", "instructions.py", "llvm.py", "gcm_ir.py", "jit.py")


@cache
def build(form: Form) -> Kernels:
    """Return the kernels of a form, built once in a process.

    A kernel is compiled by its first call, and its code is cached on disk. The cache depends on this file and on the
    closure of the kernel, hence the digest in `variant`.
    """
    variant = "/".join(map(str, (*form, source_digest())))

    @cached_njit(nogil=False)  # it is so short that releasing the GIL would cost more under contention
    def expand_key(bits: int, schedule: int, material: int) -> None:
        _call(variant, "expand_key", bits, (schedule, material))
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
            bad = _call(variant, name, bits, (schedule, src, dst, first + start, stop - start, remaining))
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
                if _call(variant, "open", bits, (schedule, src, dst, chunk, 1, length)) == 0:
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
    paths = [Path(__file__).with_name(name) for name in _SOURCES]
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


def new_counters() -> array[int]:
    """Return counters with no grain taken and no bad chunk."""
    return array("q", _NEW_COUNTERS)


@compiled
def drain(counters: int, grain: int, count: int) -> None:
    """Take all grains that are left, and wait for those that other threads have taken."""
    wait_until_done(counters, min(fetch_add(counters, _NO_MORE) * grain, count))


@compiled
def wait_until_done(counters: int, done: int) -> None:
    while fetch_add(counters + _DONE, 0) < done:
        sched_yield()


@intrinsic(prefer_literal=True)
def _call(typingctx: Any, variant: Any, name: Any, bits: Any, arguments: Any) -> Any:
    """Call a function of `gcm_ir`: "expand_key", or "open", "verify" or "seal" for a run of chunks.

    The literals `variant` and `name` select it, and at run time `bits`, the size of the key.
    """
    words = types.UniTuple(types.int64, len(arguments))
    build = gcm_ir.chunk_function if name.literal_value == "expand_key" else gcm_ir.run_function

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        architecture, width, native, _ = variant.literal_value.split("/")
        form = Form(architecture, int(width), int(native))
        short, long = (build(builder.module, gcm_ir.Variant(size, form), name.literal_value) for size in (128, 256))
        function = builder.select(builder.icmp_unsigned("==", values[2], llvm.I64(256)), long, short)
        return builder.call(function, cgutils.unpack_tuple(builder, values[3]))

    return types.int64(variant, name, types.int64, words), codegen


def emitted(emit: Callable[..., ir.Value | None]) -> Any:
    """Make a function for compiled code of `emit(builder, *words)`, which emits code on 64-bit integers.

    The function returns the integer that `emit` returns, or 0.
    """

    @wraps(emit)
    def intrinsic_function(typingctx: Any, *words: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
            result = emit(builder, *values)
            return llvm.I64(0) if result is None else result

        return types.int64(*[types.int64] * len(words)), codegen

    return intrinsic(intrinsic_function)


@emitted
def fetch_add(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    return builder.atomic_rmw("add", builder.inttoptr(address, llvm.I64.as_pointer()), value, "seq_cst")


@emitted
def fetch_min(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    return builder.atomic_rmw("min", builder.inttoptr(address, llvm.I64.as_pointer()), value, "seq_cst")


@emitted
def copy_bytes(builder: ir.IRBuilder, target: ir.Value, source: ir.Value, size: ir.Value) -> None:
    gcm_ir.copy(builder, target, source, size)


@emitted
def _wipe(builder: ir.IRBuilder, address: ir.Value, size: ir.Value) -> None:
    gcm_ir.fill_zero(builder, address, size)


@emitted
def _scratch(builder: ir.IRBuilder) -> ir.Value:
    """Return the address of `CHUNK_SIZE` bytes on the stack, valid until the kernel returns.

    numba would free an array after its last use by name, though its address is still in use.
    """
    with builder.goto_entry_block():
        scratch = builder.alloca(llvm.I8, CHUNK_SIZE)
    return builder.ptrtoint(scratch, llvm.I64)


@emitted
def wipe_stack(builder: ir.IRBuilder) -> None:
    """Overwrite the stack below the frame of this function, where functions that it called have left data."""
    builder.call(gcm_ir.stack_wiper(builder.module), [])


@emitted
def isolate_frame(builder: ir.IRBuilder) -> None:
    """Prevent inlining of the function that calls this, so that `wipe_stack` in its callers covers its frame."""
    gcm_ir.isolate_frame(builder.function)


@emitted
def sched_yield(builder: ir.IRBuilder) -> None:
    builder.call(instructions.declare(builder.module, "sched_yield", ir.FunctionType(llvm.I32, [])), [])
