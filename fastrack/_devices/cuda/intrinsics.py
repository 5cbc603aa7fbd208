"""Intrinsics for compiled code: words shared by threads, the clock, and calls of C functions by address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastrack._crypto.instructions import declare
from fastrack._crypto.jit import emitted
from fastrack._crypto.llvm import I32, I64

_FIRST_ARGUMENT = 7  # index of the first kernel argument in a LAUNCH command, in words
_MAX_ARGUMENTS = 16


@emitted
def at(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    """Read word `index`."""
    return builder.load(_word(builder, address, index))


@emitted
def put(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, value: ir.Value) -> None:
    """Write word `index`. Other threads see it before later writes."""
    builder.store_atomic(value, _word(builder, address, index), "seq_cst", 8)


@emitted
def load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Read a word that other threads may write."""
    return builder.load_atomic(builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@emitted
def exchange(builder: ir.IRBuilder, address: ir.Value, expected: ir.Value, value: ir.Value) -> ir.Value:
    """Compare and swap a word, and return its previous value."""
    pointer = builder.inttoptr(address, I64.as_pointer())
    return builder.extract_value(builder.cmpxchg(pointer, expected, value, "seq_cst"), 0)


@intrinsic
def call(typingctx: Any, function: Any, arguments: Any) -> Any:
    """Call a C function by its address, with integers or pointers, and return its int."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return _call(builder, values[0], cgutils.unpack_tuple(builder, values[1]))

    return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), codegen


@emitted
def launch(builder: ir.IRBuilder, function: ir.Value, command: ir.Value) -> ir.Value:
    """Call cuLaunchKernel with the operands of a LAUNCH command."""
    with builder.goto_entry_block():
        pointers = builder.alloca(I64, _MAX_ARGUMENTS)
    for index in range(_MAX_ARGUMENTS):
        argument = builder.add(command, I64(8 * (_FIRST_ARGUMENT + index)))
        builder.store(argument, builder.gep(pointers, [I32(index)]))
    handle, blocks, threads, shared, stream = (
        builder.load(_word(builder, command, I64(index))) for index in range(2, _FIRST_ARGUMENT)
    )
    arguments = builder.ptrtoint(pointers, I64)
    one, none = I64(1), I64(0)
    return _call(builder, function, [handle, blocks, one, one, threads, one, one, shared, stream, arguments, none])


@emitted
def now(builder: ir.IRBuilder) -> ir.Value:
    """Return the nanoseconds of the monotonic clock, as `time.perf_counter_ns`."""
    with builder.goto_entry_block():
        timespec = builder.alloca(I64, 2)
    kind = ir.FunctionType(I32, [I32, I64.as_pointer()])
    builder.call(declare(builder.module, "clock_gettime", kind), [I32(1), timespec])
    seconds, nanoseconds = (builder.load(builder.gep(timespec, [I32(index)])) for index in range(2))
    return builder.add(builder.mul(seconds, I64(10**9)), nanoseconds)


@emitted
def sleep(builder: ir.IRBuilder, microseconds: ir.Value) -> None:
    """Suspend the thread."""
    sleeping = declare(builder.module, "usleep", ir.FunctionType(I32, [I32]))
    builder.call(sleeping, [builder.trunc(microseconds, I32)])


def _word(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    return builder.inttoptr(builder.add(address, builder.mul(index, I64(8))), I64.as_pointer())


def _call(builder: ir.IRBuilder, function: ir.Value, arguments: Sequence[ir.Value]) -> ir.Value:
    # The C calling conventions of Linux on x86-64 and AArch64 accept a 64-bit word for a narrower integer.
    kind = ir.FunctionType(I32, [I64] * len(arguments))
    return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), arguments), I64)
