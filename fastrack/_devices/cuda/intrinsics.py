"""The intrinsic for compiled code that launches a kernel."""

from __future__ import annotations

from llvmlite import ir

from fastrack._crypto.native.intrinsics import emit_call, emitted, word_pointer
from fastrack._crypto.native.llvm import I32, I64

_FIRST_ARGUMENT = 7  # index of the first kernel argument in a LAUNCH command, in words
_MAX_ARGUMENTS = 16


@emitted
def launch(builder: ir.IRBuilder, function: ir.Value, command: ir.Value) -> ir.Value:
    """Call cuLaunchKernel with the operands of a LAUNCH command."""
    with builder.goto_entry_block():
        pointers = builder.alloca(I64, _MAX_ARGUMENTS)
    for index in range(_MAX_ARGUMENTS):
        argument = builder.add(command, I64(8 * (_FIRST_ARGUMENT + index)))
        builder.store(argument, builder.gep(pointers, [I32(index)]))
    handle, blocks, threads, shared, stream = (
        builder.load(word_pointer(builder, command, I64(index))) for index in range(2, _FIRST_ARGUMENT)
    )
    arguments = builder.ptrtoint(pointers, I64)
    one, none = I64(1), I64(0)
    return emit_call(builder, function, [handle, blocks, one, one, threads, one, one, shared, stream, arguments, none])
