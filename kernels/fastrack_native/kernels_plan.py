"""Compile with numba what the host runs on any CPU: the loops of gather plans and of copies."""

from __future__ import annotations

from inspect import isfunction
from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic, register_jitable

from fastrack._crypto import gather
from fastrack.format import SEALED_CHUNK_SIZE
from fastrack_native.compiler import compiled
from fastrack_native.intrinsics import fetch_add
from fastrack_native.kernels_chunks import Array, Counters, copy_bytes
from fastrack_native.llvm import I64

for _function in filter(isfunction, vars(gather).values()):
    if _function.__module__ == gather.__name__:  # numba compiles those that are called here
        register_jitable(_function)


def build_plans() -> dict[str, Any]:
    """Return `copy_chunks`, a kernel that copies, and the loops of `gather`.

    These take its arrays, followed by their lengths; `is_plan_inside` takes addresses in their place.
    """
    functions = copy_chunks, count_pieces, plan_ranges, plan_rows, is_plan_inside
    return {function.__name__: function for function in functions}


@compiled
def copy_chunks(source: int, target: int, count: int, size: int, grain: int, counters: Counters) -> None:
    while True:
        start = fetch_add(counters, 1) * grain
        if start >= count:
            break
        stop = min(start + grain, count)
        offset = start * SEALED_CHUNK_SIZE
        copy_bytes(target + offset, source + offset, min((stop - start) * SEALED_CHUNK_SIZE, size - offset))


@compiled
def count_pieces(starts: Array, sizes: Array, offsets: Array, ranges: int) -> int:
    return gather.count_pieces(_words(starts, ranges), _words(sizes, ranges), _words(offsets, ranges), ranges)


@compiled
def plan_ranges(starts: Array, sizes: Array, offsets: Array, ranges: int, memory: Array, room: int) -> None:
    arrays = _words(starts, ranges), _words(sizes, ranges), _words(offsets, ranges)
    gather.plan_ranges(arrays[0], arrays[1], arrays[2], ranges, _words(memory, gather.memory_size(room)), room)
    _locate(memory, room)


@compiled
def plan_rows(
    rows: Array, places: Array, has_places: bool, ranges: int, stride: int, size: int, memory: Array, room: int,
    count: int, plain: int, target: int,
) -> bool:  # fmt: skip
    plan = _words(memory, gather.memory_size(room))
    gather.fill_rows(_words(rows, ranges), _words(places, ranges), has_places, ranges, stride, size, plan, room)
    _locate(memory, room)
    return bool(is_plan_inside(plan[2], plan[3], plan[4], plan[0], plan[1], count, plain, target))


@compiled
def _locate(memory: int, room: int) -> None:
    """Put the addresses of a plan's arrays into its memory."""
    head = _words(memory, gather.HEAD)
    for place, offset in enumerate(gather.offsets(room)):
        head[gather.PLACES + place] = memory + 8 * offset


@compiled
def is_plan_inside(
    chunks: int, starts: int, table: int, size: int, rows: int, count: int, plain: int, target: int
) -> bool:
    arrays = _words(chunks, size), _words(starts, size + 1), _table(table, rows)
    return gather.is_plan_inside(arrays[0], arrays[1], arrays[2], size, rows, count, plain, target)


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    """Return an address as a pointer to words, for `carray`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return builder.inttoptr(values[0], I64.as_pointer())

    return types.CPointer(types.int64)(types.int64), codegen


@compiled
def _words(address: Array, count: int) -> Any:
    """Return the array of so many integers at an address."""
    return carray(_pointer(address), (count,))


@compiled
def _table(address: Array, rows: int) -> Any:
    """Return the array of so many rows of three integers at an address."""
    return carray(_pointer(address), (rows, 3))
