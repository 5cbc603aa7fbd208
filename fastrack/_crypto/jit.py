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

from fastrack._crypto import gcm_ir as gcm
from fastrack._crypto import llvm as emit
from fastrack._crypto.cobblestone import CHUNK_SIZE, SEALED_CHUNK_SIZE

# A counters, in 64-bit words that lie on cache lines of their own.
NEXT, BAD, DONE = 0, 8, 16
COUNTER_WORDS = 24
NONE_BAD = int(np.iinfo(np.int64).max)

_BAD, _DONE = BAD * 8, DONE * 8  # in bytes
_NO_MORE = 1 << 40  # tickets; further than any run goes


@dataclass(frozen=True, slots=True)
class Kernels:
    """The compiled entry points. Addresses and sizes are integers, `bits` is 128 or 256.

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
    """Make the kernels for vectors of `width` bytes on instructions `native` bytes wide, once in a process.

    Nothing is compiled before the first call, and what was compiled is kept on disk. numba looks only at this file and
    at what a kernel closes over to see whether that copy is still good, hence the digest in `variant`.
    """
    variant = f"{width}/{native}/{source_digest()}"

    @cached_njit(nogil=False)  # so short that to give the lock away would cost more, where others want it
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
        worked = 0
        while True:
            start = fetch_add(counters, 1) * grain
            if start >= count:
                break
            stop = min(start + grain, count)
            here, there = source + start * source_step, target + start * target_step
            left = size - start * CHUNK_SIZE
            if bits == 256:
                bad = _chunks(variant, name, 256, schedule, here, there, first + start, stop - start, left)
            else:
                bad = _chunks(variant, name, 128, schedule, here, there, first + start, stop - start, left)
            if bad < stop - start:
                fetch_min(counters + _BAD, first + start + bad)
            worked += stop - start
        if worked:
            wipe_stack()
            fetch_add(counters + _DONE, worked)
        if wait:
            wait_until_done(counters, count)

    return run


def _build_gather(variant: str) -> Any:
    @compiled
    def open_gather(
        bits: int, schedule: int, source: int, target: int, chunks: Any, starts: Any, pieces: Any, size: int,
        grain: int, counters: int, wait: bool,
    ) -> None:  # fmt: skip
        count = chunks.size
        scratch = _scratch()
        worked = 0
        while True:
            start = fetch_add(counters, 1) * grain
            if start >= count:
                break
            stop = min(start + grain, count)
            for index in range(start, stop):
                chunk = chunks[index]
                here = source + chunk * SEALED_CHUNK_SIZE
                length = min(CHUNK_SIZE, size - chunk * CHUNK_SIZE)
                low, high = starts[index], starts[index + 1]
                whole = high - low == 1 and pieces[low, 2] == length
                there = target + pieces[low, 1] if whole else scratch
                if bits == 256:
                    bad = _chunks(variant, "open", 256, schedule, here, there, chunk, 1, length)
                else:
                    bad = _chunks(variant, "open", 128, schedule, here, there, chunk, 1, length)
                if bad == 0:
                    fetch_min(counters + _BAD, chunk)
                if not whole:
                    # The scratch of a bad chunk holds zeros, and so do its pieces then.
                    for piece in range(low, high):
                        copy_bytes(target + pieces[piece, 1], scratch + pieces[piece, 0], pieces[piece, 2])
            worked += stop - start
        if worked:
            _wipe(scratch, CHUNK_SIZE)
            wipe_stack()
            fetch_add(counters + _DONE, worked)
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
    """Compile, and keep the code on disk if there is anywhere to keep it."""

    def compiled(function: Any) -> Any:
        try:
            return njit(nogil=nogil, cache=True)(function)
        except RuntimeError:  # neither this folder nor the user's cache folder can be written
            return njit(nogil=nogil)(function)

    return compiled


compiled = cached_njit(nogil=True)


def new_counters() -> np.ndarray[Any, np.dtype[np.int64]]:
    """A counters with all tickets to be drawn and nothing bad."""
    counters = np.zeros(COUNTER_WORDS, np.int64)
    counters[BAD] = NONE_BAD
    return counters


@compiled
def drain(counters: int, grain: int, count: int) -> None:
    """Take all tickets that are left, and wait until the work of those that others drew is done."""
    wait_until_done(counters, min(fetch_add(counters, _NO_MORE) * grain, count))


@compiled
def wait_until_done(counters: int, done: int) -> None:
    while fetch_add(counters + _DONE, 0) < done:
        sched_yield()


# The functions of `gcm` as intrinsics. `variant`, `name` and `bits` are literals that choose the code.


@intrinsic(prefer_literal=True)
def _expand_key(typingctx: Any, variant: Any, bits: Any, schedule: Any, material: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.call(gcm.chunk_function(builder.module, _parse_variant(variant, bits), "expand_key"), values[2:])

    return types.int64(variant, bits, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def _chunks(
    typingctx: Any, variant: Any, name: Any, bits: Any, schedule: Any, source: Any, target: Any, first: Any, count: Any,
    size: Any,
) -> Any:  # fmt: skip
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        function = gcm.run_function(builder.module, _parse_variant(variant, bits), name.literal_value)
        return builder.call(function, values[3:])

    return types.int64(variant, name, bits, *[types.int64] * 6), codegen


def _parse_variant(variant: Any, bits: Any) -> gcm.Variant:
    width, native, _ = variant.literal_value.split("/")
    return gcm.Variant(bits.literal_value, int(width), int(native))


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
        pointer = builder.inttoptr(address, emit.I64.as_pointer())
        return builder.atomic_rmw(operation, pointer, value, "seq_cst")

    return codegen


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, size: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        gcm.copy(builder, *values)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _wipe(typingctx: Any, address: Any, size: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        gcm.fill_zero(builder, *values)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _scratch(typingctx: Any) -> Any:
    """The address of CHUNK bytes on the stack, which last until the kernel returns.

    An array would not do: numba frees it after its last use by name, and an address is no use.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        with builder.goto_entry_block():
            place = builder.alloca(emit.I8, CHUNK_SIZE)
        return builder.ptrtoint(place, emit.I64)

    return types.int64(), codegen


@intrinsic
def wipe_stack(typingctx: Any) -> Any:
    """Overwrite the stack below this function's frame: what those it called have left there."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        builder.call(gcm.stack_wiper(builder.module), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def isolate_frame(typingctx: Any) -> Any:
    """Keep the calling function out of its callers, so that `wipe_stack` in one of them reaches its frame."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        gcm.isolate_frame(builder.function)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def sched_yield(typingctx: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        yielding = emit.declare(builder.module, "sched_yield", ir.FunctionType(emit.I32, []))
        builder.call(yielding, [])
        return context.get_dummy_value()

    return types.void(), codegen
