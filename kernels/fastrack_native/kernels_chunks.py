"""Write the loops over chunks, around the cipher's functions of an instruction set, for numba to lower.

`build_runs` returns the kernels of one instruction set. A kernel is a single call without the GIL. Several
threads may enter it with the same *counters*: each takes grains of chunks from them until none is left, and overwrites
the stack that it has used before it returns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastrack._crypto.isa import InstructionSet
from fastrack._crypto.workers import BAD
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE
from fastrack_native import gcm_ir, gcm_ranges, gcm_reencrypt, gcm_widen, hkdf_ir, llvm
from fastrack_native.compiler import compiled, compiled_with_lock, declare_cipher
from fastrack_native.intrinsics import at, emitted, fetch_add, fetch_min

BAD_OFFSET = BAD * 8  # in bytes
_ROW_SIZE = 24  # bytes of a row of a plan's table

Array = int  # the address of an array
Role = int  # `CALLER` or `WORKER`
Counters = int  # the address of the counters that the threads of a call share


def build_runs(*isa: object) -> dict[str, Any]:
    """Return `expand_key`, `derive_keys`, the runs and `open_gather` of the `InstructionSet` of these fields.

    Addresses and sizes are integers; `bits` is 128 or 256. `expand_key` takes `(bits, schedule, material)`, and runs
    `(bits, schedule, source, target, first, count, size, grain, counters)`; `verify_run` ignores its target.
    `open_gather` takes `(bits, schedule, source, target, chunks, starts, table, count, size, grain, counters)`.
    """
    variant = "/".join(map(str, isa))

    @compiled_with_lock
    def expand_key(bits: int, schedule: int, material: int) -> None:
        _call(variant, "expand_key", bits, (schedule, material))
        wipe_stack()

    @compiled_with_lock
    def derive_keys(secret: Array, size: int, text: Array, table: Array, count: int, target: Array) -> int:
        bad = int(_call(variant, "derive", 256, (secret, size, text, table, count, target)))
        wipe_stack()
        return bad

    return {
        "expand_key": expand_key,
        "derive_keys": derive_keys,
        "open_run": _build_run(variant, "open", SEALED_CHUNK_SIZE, CHUNK_SIZE),
        "seal_run": _build_run(variant, "seal", CHUNK_SIZE, SEALED_CHUNK_SIZE),
        "verify_run": _build_run(variant, "verify", SEALED_CHUNK_SIZE, 0),
        "open_gather": _build_gather(variant),
    }


def _build_run(variant: str, name: str, source_step: int, target_step: int) -> Any:
    @compiled
    def run(
        bits: int, schedule: int, source: int, target: int, first: int, count: int, size: int,
        grain: int, counters: Counters,
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
                fetch_min(counters + BAD_OFFSET, first + start + bad)
            done += stop - start
        if done:
            wipe_stack()

    return run


def build_ranges(variant: str) -> Any:
    """Return the function that opens rows `low` to `high` of a table of ranges, all of one chunk."""

    @compiled
    def open_ranges(
        bits: int, schedule: int, source: int, target: int, chunk: int, after: int, size: int,
        table: int, low: int, high: int, buffer: int,
    ) -> bool:  # fmt: skip
        src, length = source + chunk * SEALED_CHUNK_SIZE, min(CHUNK_SIZE, size - chunk * CHUNK_SIZE)
        row = table + low * _ROW_SIZE
        if high - low == 1 and at(row, 2) == length:
            return bool(_call(variant, "open", bits, (schedule, src, target + at(row, 1), chunk, 1, length)))
        ahead = source + after * SEALED_CHUNK_SIZE
        work = schedule, src, target, chunk, length, ahead, row, high - low, buffer
        return bool(_call(variant, "ranges", bits, work))

    return open_ranges


def _build_gather(variant: str) -> Any:
    open_ranges = build_ranges(variant)

    @compiled
    def open_gather(
        bits: int, schedule: int, source: int, target: int, chunks: Array, starts: Array, table: Array, count: int,
        size: int, grain: int, counters: Counters,
    ) -> None:  # fmt: skip
        buffer = chunk_buffer()
        done = 0
        while True:
            start = fetch_add(counters, 1) * grain
            if start >= count:
                break
            stop = min(start + grain, count)
            for index in range(start, stop):
                chunk, after = at(chunks, index), at(chunks, min(index + 1, count - 1))
                low, high = at(starts, index), at(starts, index + 1)
                if not open_ranges(bits, schedule, source, target, chunk, after, size, table, low, high, buffer):
                    fetch_min(counters + BAD_OFFSET, chunk)
            done += stop - start
        if done:
            wipe(buffer, SEALED_CHUNK_SIZE)
            wipe_stack()

    return open_gather


def _derive(module: ir.Module, variant: gcm_ir.Variant, name: str) -> ir.Function:
    return hkdf_ir.derive_function(module, variant.isa)  # of keys of any size


_FUNCTIONS = {
    "expand_key": gcm_ir.chunk_function,
    "reencrypt": gcm_reencrypt.reencrypt_function,
    "widen": gcm_widen.widen_function,
    "ranges": gcm_ranges.ranges_function,
    "derive": _derive,
}


@intrinsic(prefer_literal=True)
def _call(typingctx: Any, variant: Any, name: Any, bits: Any, arguments: Any) -> Any:
    """Call a function of `_FUNCTIONS`, or the one of `gcm_ir` for a run of chunks: "open", "verify" or "seal".

    The literals `variant` and `name` select it, and at run time `bits`, the size of the key.
    """
    words = types.UniTuple(types.int64, len(arguments))
    build = _FUNCTIONS.get(name.literal_value, gcm_ir.run_function)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        architecture, width, native = variant.literal_value.split("/")
        isa = InstructionSet(architecture, int(width), int(native))
        of_sizes = (partial(build, variant=gcm_ir.Variant(size, isa), name=name.literal_value) for size in (128, 256))
        short, long = (declare_cipher(builder.module, isa, of_size) for of_size in of_sizes)
        function = builder.select(builder.icmp_unsigned("==", values[2], llvm.I64(256)), long, short)
        return builder.call(function, cgutils.unpack_tuple(builder, values[3]))

    return types.int64(variant, name, types.int64, words), codegen


@emitted
def copy_bytes(builder: ir.IRBuilder, target: ir.Value, source: ir.Value, size: ir.Value) -> None:
    gcm_ir.copy(builder, target, source, size)


@emitted
def wipe(builder: ir.IRBuilder, address: ir.Value, size: ir.Value) -> None:
    gcm_ir.fill_zero(builder, address, size)


def memory_on_stack(size: int) -> Any:
    """Make a function that returns the address of so many bytes on the stack, valid until the kernel returns.

    numba would free an array after its last use by name, though its address is still in use.
    """

    def emit(builder: ir.IRBuilder) -> ir.Value:
        with builder.goto_entry_block():
            memory = builder.alloca(llvm.I8, size)
            memory.align = 64
        return builder.ptrtoint(memory, llvm.I64)

    return emitted(emit)


chunk_buffer = memory_on_stack(SEALED_CHUNK_SIZE)


@emitted
def wipe_stack(builder: ir.IRBuilder) -> None:
    """Overwrite the stack below the frame of this function, where functions that it called have left data."""
    builder.call(declare_cipher(builder.module, None, gcm_ir.stack_wiper), [])
