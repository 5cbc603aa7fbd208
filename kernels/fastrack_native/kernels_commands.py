"""Compile with numba the loops of `native`, over the commands of a list and over the pieces of a copy."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from fastrack._crypto.workers import CALLER
from fastrack._devices.cuda import commands as opcodes
from fastrack._devices.cuda import native as layout
from fastrack._devices.cuda.captures import THREAD_LOCAL
from fastrack.format import SEALED_CHUNK_SIZE
from fastrack_native import intrinsics
from fastrack_native.compiler import compiled, compiled_with_lock
from fastrack_native.intrinsics import at, call, emitted, fetch_add, load, now, put
from fastrack_native.kernels_chunks import Counters, Role, copy_bytes
from fastrack_native.llvm import I32, I64

_NOT_READY, _IMPLICIT = 600, 906  # CUDA_ERROR_NOT_READY, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
_SPINS = 256
_NAP = 50  # microseconds
_FIRST_ARGUMENT = 7  # index of the first kernel argument in a LAUNCH command, in words
_MAX_ARGUMENTS = 16


def build_commands() -> dict[str, Any]:
    """Return `run_commands` and `run_commands_held`.

    The first is a kernel, `(words, start, count, table, context, shared, parallel, counters)`; the other takes the same
    without counters, keeps the interpreter's lock, and stops where a command asks for it.
    """
    run_list = compiled(_build_run(stops=False))

    @compiled
    def run(
        role: Role, words: int, start: int, count: int, table: int, context: int, shared: int, parallel: bool,
        counters: Counters,
    ) -> None:  # fmt: skip
        if role == CALLER:
            run_list(words, start, count, table, context, shared, parallel)
        else:
            _copy_until_over(shared)

    return {"run_commands": run, "run_commands_held": compiled_with_lock(_build_run(stops=True))}


def _build_run(*, stops: bool) -> Any:
    def run(words: int, start: int, count: int, table: int, context: int, shared: int, parallel: bool) -> None:
        status = call(at(table, layout.PUSH), (context,))
        pushed = status == 0
        put(shared, layout.MODE, THREAD_LOCAL)
        exchanged = pushed and call(at(table, layout.EXCHANGE), (shared + 8 * layout.MODE,)) == 0
        position = start
        while status == 0 and position < count:
            here = words + 8 * position
            code, length = at(here, 0), at(here, 1)
            function = at(table, code)
            if code == opcodes.LAUNCH:
                status = _launch(function, here)
            elif code in (opcodes.UPLOAD, opcodes.DOWNLOAD, opcodes.FILL):
                status = call(function, (at(here, 2), at(here, 3), at(here, 4), at(here, 5)))
            elif code == opcodes.WAIT:
                status = call(function, (at(here, 2), at(here, 3), 0))
            elif code == opcodes.RECORD:
                status = call(function, (at(here, 2), at(here, 3)))
            elif code == opcodes.SYNCHRONIZE:
                status = call(function, (at(here, 2),))
            elif code == opcodes.REQUIRE_IDLE:
                if stops:
                    status = call(function, (at(here, 2),))
                    if status == _NOT_READY:
                        status = layout.STOPPED
            elif code == opcodes.POLL:
                stop = now() + at(here, 3)
                status = call(function, (at(here, 2),))
                while status == _NOT_READY and now() < stop:
                    status = call(function, (at(here, 2),))
                if status == _NOT_READY:
                    status = layout.STOPPED if stops and at(here, 4) else 0
            elif code == opcodes.CAPTURING:
                status = call(function, (at(here, 2), here + 24))
                if status == _IMPLICIT:  # the default stream, while another stream is captured
                    put(here, 3, 1)
                    status = 0
            elif code == opcodes.COPY:
                _copy_shared(shared, parallel, at(here, 2), at(here, 3), at(here, 4), 0, 0)
            elif code == opcodes.PACK:
                _copy_shared(shared, parallel, at(here, 2), at(here, 3), at(here, 4), at(here, 5), at(here, 6))
            elif code == opcodes.TIMESTAMP:
                put(here, 2, now())
            if status in (0, layout.STOPPED):
                position += length
        put(shared, layout.OVER, 1)
        if exchanged:  # the thread is the caller's, whose own calls CUDA is to check as before
            call(at(table, layout.EXCHANGE), (shared + 8 * layout.MODE,))
        if pushed:
            other = call(at(table, layout.POP), (shared + 8 * layout.POPPED,))
            if status == 0:
                status = other
        put(shared, layout.POSITION, position)
        put(shared, layout.STATUS, status)

    return run


@compiled
def _copy_until_over(shared: int) -> None:
    """Copy pieces until the list is over."""
    idle = 0
    while load(shared + 8 * layout.OVER) == 0:
        if _take_piece(shared):
            idle = 0
        else:
            idle += 1
            if idle < _SPINS:
                intrinsics.sched_yield()
            else:
                intrinsics.sleep(_NAP)


@compiled
def _copy_piece(shared: int, piece: int) -> None:
    target, source = at(shared, layout.TARGET), at(shared, layout.SOURCE)
    size, chunks, count = at(shared, layout.SIZE), at(shared, layout.CHUNKS), at(shared, layout.COUNT)
    if chunks == 0:
        start = piece * layout.PIECE
        copy_bytes(target + start, source + start, min(layout.PIECE, size - start))
        return
    index, stop = piece * layout.CHUNKS_A_PIECE, min((piece + 1) * layout.CHUNKS_A_PIECE, count)
    while index < stop:
        chunk, after = at(chunks, index), index + 1
        while after < stop and at(chunks, after) - chunk == after - index:  # consecutive chunks are one copy
            after += 1
        start = chunk * SEALED_CHUNK_SIZE
        copy_bytes(
            target + index * SEALED_CHUNK_SIZE, source + start, min((after - index) * SEALED_CHUNK_SIZE, size - start)
        )
        index = after


@compiled
def _take_piece(shared: int) -> bool:
    """Copy the next piece, if there is one. The shared words of a copy stay unchanged until all its pieces are done."""
    piece = load(shared + 8 * layout.NEXT)
    while piece < load(shared + 8 * layout.LIMIT):
        if intrinsics.exchange(shared + 8 * layout.NEXT, piece, piece + 1) == piece:
            _copy_piece(shared, piece - at(shared, layout.BASE))
            fetch_add(shared + 8 * layout.DONE, 1)
            return True
        piece = load(shared + 8 * layout.NEXT)
    return False


@compiled
def _copy_shared(shared: int, parallel: bool, target: int, source: int, size: int, chunks: int, count: int) -> None:
    """Copy on all threads of this list: `size` bytes, or, with `chunks`, these of a message of `size` bytes."""
    pieces = -(-count // layout.CHUNKS_A_PIECE) if chunks else -(-size // layout.PIECE)
    base = load(shared + 8 * layout.LIMIT)
    put(shared, layout.TARGET, target)
    put(shared, layout.SOURCE, source)
    put(shared, layout.SIZE, size)
    put(shared, layout.CHUNKS, chunks)
    put(shared, layout.COUNT, count)
    put(shared, layout.BASE, base)
    if not parallel:
        for piece in range(pieces):
            _copy_piece(shared, piece)
        return
    fetch_add(shared + 8 * layout.LIMIT, pieces)  # starts the workers
    while _take_piece(shared):
        pass
    while load(shared + 8 * layout.DONE) < base + pieces:
        intrinsics.sched_yield()


@emitted
def _launch(builder: ir.IRBuilder, function: ir.Value, command: ir.Value) -> ir.Value:
    """Call cuLaunchKernel with the operands of a LAUNCH command."""
    with builder.goto_entry_block():
        pointers = builder.alloca(I64, _MAX_ARGUMENTS)
    for index in range(_MAX_ARGUMENTS):
        argument = builder.add(command, I64(8 * (_FIRST_ARGUMENT + index)))
        builder.store(argument, builder.gep(pointers, [I32(index)]))
    handle, blocks, threads, shared, stream = (
        builder.load(intrinsics.word_pointer(builder, command, I64(index))) for index in range(2, _FIRST_ARGUMENT)
    )
    arguments = builder.ptrtoint(pointers, I64)
    one, none = I64(1), I64(0)
    return intrinsics.emit_call(
        builder, function, [handle, blocks, one, one, threads, one, one, shared, stream, arguments, none]
    )
