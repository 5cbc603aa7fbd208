"""Intrinsics for compiled code: words shared by threads, the clock, and calls of C functions by address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fastrack._crypto.llvm import I32, I64, declare

_FIRST_ARGUMENT = 7  # index of the first kernel argument in a LAUNCH command, in words
_MAX_ARGUMENTS = 16


@intrinsic
def at(typingctx: Any, address: Any, index: Any) -> Any:
    """Read word `index`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.load(_word(builder, *values))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def put(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Write word `index`. Other threads see it before later writes."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        builder.store_atomic(values[2], _word(builder, *values[:2]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def load(typingctx: Any, address: Any) -> Any:
    """Read a word that other threads may write."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        pointer = builder.inttoptr(values[0], I64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def exchange(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Compare and swap a word, and return its previous value."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        pointer = builder.inttoptr(values[0], I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, values[1], values[2], "seq_cst"), 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def call(typingctx: Any, function: Any, arguments: Any) -> Any:
    """Call a C function by its address, with integers or pointers, and return its int."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        count = len(signature.args[1])
        return _call(builder, values[0], [builder.extract_value(values[1], index) for index in range(count)])

    return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), codegen


@intrinsic
def launch(typingctx: Any, function: Any, command: Any) -> Any:
    """Call cuLaunchKernel with the operands of a LAUNCH command."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        function, command = values
        with builder.goto_entry_block():
            pointers = builder.alloca(I64, _MAX_ARGUMENTS)
        for index in range(_MAX_ARGUMENTS):
            argument = builder.add(command, ir.Constant(I64, 8 * (_FIRST_ARGUMENT + index)))
            builder.store(argument, builder.gep(pointers, [ir.Constant(I32, index)]))

        def word(index: int) -> ir.Value:
            return builder.load(_word(builder, command, ir.Constant(I64, index)))

        one, none = ir.Constant(I64, 1), ir.Constant(I64, 0)
        handle, blocks, threads, shared, stream = (word(index) for index in range(2, _FIRST_ARGUMENT))
        arguments = builder.ptrtoint(pointers, I64)
        return _call(builder, function, [handle, blocks, one, one, threads, one, one, shared, stream, arguments, none])

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def now(typingctx: Any) -> Any:
    """Return the nanoseconds of the monotonic clock, as `time.perf_counter_ns`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        with builder.goto_entry_block():
            timespec = builder.alloca(I64, 2)
        kind = ir.FunctionType(I32, [I32, I64.as_pointer()])
        builder.call(declare(builder.module, "clock_gettime", kind), [ir.Constant(I32, 1), timespec])
        seconds, nanoseconds = (builder.load(builder.gep(timespec, [ir.Constant(I32, index)])) for index in range(2))
        return builder.add(builder.mul(seconds, ir.Constant(I64, 10**9)), nanoseconds)

    return types.int64(), codegen


@intrinsic
def sleep(typingctx: Any, microseconds: Any) -> Any:
    """Suspend the thread."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        sleeping = declare(builder.module, "usleep", ir.FunctionType(I32, [I32]))
        builder.call(sleeping, [builder.trunc(values[0], I32)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _word(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    moved = builder.add(address, builder.mul(index, ir.Constant(I64, 8)))
    return builder.inttoptr(moved, I64.as_pointer())


def _call(builder: ir.IRBuilder, function: ir.Value, arguments: Sequence[ir.Value]) -> ir.Value:
    # The C calling conventions of Linux on x86-64 and AArch64 accept a 64-bit word for a narrower integer.
    kind = ir.FunctionType(I32, [I64] * len(arguments))
    pointer = builder.inttoptr(function, kind.as_pointer())
    return builder.sext(builder.call(pointer, list(arguments)), I64)
