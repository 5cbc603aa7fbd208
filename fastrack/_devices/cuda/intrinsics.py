"""Words that threads share, the clock, and C functions called by their addresses, for code that numba compiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fastrack._crypto import llvm as emit

_ARGUMENTS = 7  # the word of a LAUNCH command at which the kernel's arguments start
_MOST_ARGUMENTS = 16


@intrinsic
def at(typingctx: Any, address: Any, index: Any) -> Any:
    """Read the word of this number."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.load(_word(builder, *values))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def put(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Write the word of this number, seen by other threads before what is written after it."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        builder.store_atomic(values[2], _word(builder, *values[:2]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def load(typingctx: Any, address: Any) -> Any:
    """Read a word that other threads write."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        pointer = builder.inttoptr(values[0], emit.I64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def exchange(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Put `value` where `expected` is; return what was there."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        pointer = builder.inttoptr(values[0], emit.I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, values[1], values[2], "seq_cst"), 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def call(typingctx: Any, function: Any, arguments: Any) -> Any:
    """Call a C function by its address, with integers or pointers, and return its int."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        count = len(signature.args[1])
        return _calling(builder, values[0], [builder.extract_value(values[1], place) for place in range(count)])

    return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), codegen


@intrinsic
def launch(typingctx: Any, function: Any, command: Any) -> Any:
    """Call cuLaunchKernel as a LAUNCH command says. The addresses of its arguments take room on the stack."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        function, command = values
        with builder.goto_entry_block():
            room = builder.alloca(emit.I64, _MOST_ARGUMENTS)
        for index in range(_MOST_ARGUMENTS):
            here = builder.add(command, ir.Constant(emit.I64, 8 * (_ARGUMENTS + index)))
            builder.store(here, builder.gep(room, [ir.Constant(emit.I32, index)]))

        def word(index: int) -> ir.Value:
            return builder.load(_word(builder, command, ir.Constant(emit.I64, index)))

        one, none = ir.Constant(emit.I64, 1), ir.Constant(emit.I64, 0)
        handle, blocks, threads, shared, stream = (word(index) for index in range(2, _ARGUMENTS))
        arguments = builder.ptrtoint(room, emit.I64)
        return _calling(
            builder, function, [handle, blocks, one, one, threads, one, one, shared, stream, arguments, none]
        )

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def now(typingctx: Any) -> Any:
    """Return the nanoseconds of `time.perf_counter_ns`: of the monotonic clock."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        with builder.goto_entry_block():
            room = builder.alloca(emit.I64, 2)
        kind = ir.FunctionType(emit.I32, [emit.I32, emit.I64.as_pointer()])
        builder.call(emit.declare(builder.module, "clock_gettime", kind), [ir.Constant(emit.I32, 1), room])
        seconds, rest = (builder.load(builder.gep(room, [ir.Constant(emit.I32, index)])) for index in range(2))
        return builder.add(builder.mul(seconds, ir.Constant(emit.I64, 10**9)), rest)

    return types.int64(), codegen


@intrinsic
def sleep(typingctx: Any, microseconds: Any) -> Any:
    """Let the thread sleep."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        sleeping = emit.declare(builder.module, "usleep", ir.FunctionType(emit.I32, [emit.I32]))
        builder.call(sleeping, [builder.trunc(values[0], emit.I32)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _word(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    moved = builder.add(address, builder.mul(index, ir.Constant(emit.I64, 8)))
    return builder.inttoptr(moved, emit.I64.as_pointer())


def _calling(builder: ir.IRBuilder, function: ir.Value, arguments: Sequence[ir.Value]) -> ir.Value:
    # In the C calling conventions of Linux on x86-64 and AArch64 a 64-bit word does for a narrower integer.
    kind = ir.FunctionType(emit.I32, [emit.I64] * len(arguments))
    pointer = builder.inttoptr(function, kind.as_pointer())
    return builder.sext(builder.call(pointer, list(arguments)), emit.I64)
