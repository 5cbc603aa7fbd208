"""The native code of the CUDA device, which runs a list of commands by one call without the interpreter.

It calls libcuda by the addresses of its functions, copies within host memory on several threads, and waits, so that a
list takes the lock of a busy interpreter once. Importing this imports numba.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from fastrack._crypto import workers
from fastrack._crypto.cobblestone import SEALED_CHUNK_SIZE
from fastrack._crypto.jit import cached_njit, copy_bytes, fetch_add, sched_yield, source_digest
from fastrack._devices.cuda import commands as opcodes
from fastrack._devices.cuda.commands import NAMES, Commands
from fastrack._devices.cuda.intrinsics import at, call, exchange, launch, load, now, put, sleep
from fastrack.errors import DeviceError

STOPPED = -1  # returned by `Native.run` for a list that a command stopped before its end
_NOT_READY, _IMPLICIT = 600, 906  # CUDA_ERROR_NOT_READY, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT

# The table of libcuda's functions: indices are opcodes, and two that are none.
_PUSH, _POP = 0, 15
_TABLE = 16
_VERSION = 12000  # of the driver API, for cuGetProcAddress

# The words that the threads of a list share; those that are written often have a cache line of their own.
_NEXT, _DONE, _LIMIT = 0, 8, 16  # grains of all copies so far: the next one, those done, and their number
_TARGET, _SOURCE, _SIZE, _CHUNKS, _COUNT, _BASE, _OVER = 24, 25, 26, 27, 28, 29, 30
_POSITION, _POPPED = 31, 32  # of the command that stopped or failed; an unused result of cuCtxPopCurrent
_SHARED = 40

_CHUNKS_A_PIECE = 16
_PIECE = _CHUNKS_A_PIECE * SEALED_CHUNK_SIZE
_PARALLEL_THRESHOLD = 2 * _PIECE  # bytes that one thread copies while another wakes up
_MAX_WORKERS = 7  # 8 threads with the issuing one: 55 GB/s at 7 GB/s each
_SPINS = 256
_NAP = 50  # microseconds


def find_functions(library: Any = None) -> dict[str, int]:
    """Return the addresses of the functions of libcuda that lists call, by name.

    Raise DeviceError if there is no libcuda, or it lacks one of them.
    """
    try:
        library = library or ctypes.CDLL("libcuda.so.1")
        find = library.cuGetProcAddress_v2
    except (OSError, AttributeError) as error:
        raise DeviceError(
            f"cannot call libcuda: {error}. Install an NVIDIA driver for CUDA 12 or later, or use device='cpu'"
        ) from error
    addresses = {}
    for name in (*NAMES.values(), "cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxGetCurrent"):
        function, status = ctypes.c_void_p(), ctypes.c_int()
        arguments = (ctypes.byref(function), ctypes.c_int(_VERSION), ctypes.c_uint64(0), ctypes.byref(status))
        result = find(name.encode(), *arguments)
        if result or not function.value:
            raise DeviceError(
                f"libcuda has no {name} (error {result}, status {status.value}). Install a newer NVIDIA driver, or use "
                "device='cpu'"
            )
        addresses[name] = function.value
    return addresses


class Native:
    """The runner of command lists for one CUDA context, which is current while a list runs.

    `functions` are the addresses from `find_functions`, and `context` is a CUcontext.
    """

    def __init__(self, functions: dict[str, int], context: int) -> None:
        self._table = np.zeros(_TABLE, np.int64)
        for code, name in NAMES.items():
            self._table[code] = functions[name]
        self._table[_PUSH] = functions["cuCtxPushCurrent"]
        self._table[_POP] = functions["cuCtxPopCurrent"]
        self._context = context

    def run(self, commands: Commands, *, threads: int = 1, start: int = 0, hold: bool = False) -> tuple[int, int]:
        """Run commands from the word `start` on, on up to `threads` threads for copies within host memory.

        With `hold` the interpreter's lock is kept until a command stops the list. That is for lists that take
        microseconds: getting the lock back from a busy interpreter takes milliseconds.

        Return the status and a position. The status is 0 at the end; `STOPPED` if a command stopped the list; else the
        CUresult of the command that failed. The position is the index of the first word of the command that failed, or
        of the next one if the list was stopped.
        """
        shared = np.zeros(_SHARED, np.int64)
        shared_address = int(shared.__array_interface__["data"][0])
        words, count = commands.code.buffer_info()
        table = int(self._table.__array_interface__["data"][0])
        arguments = (words, start, count, table, self._context, shared_address)
        if hold:
            return int(_run_held(*arguments, False)), int(shared[_POSITION])
        copiers = min(threads - 1, _MAX_WORKERS, commands.copies // _PARALLEL_THRESHOLD)
        try:
            if copiers > 0:
                workers.start(lambda: _copy_until_over(shared_address), copiers, (shared, commands))
            status = int(_run(*arguments, copiers > 0))
        except BaseException:  # an interrupt before the list began: its workers wait for its end
            shared[_OVER] = 1
            raise
        return status, int(shared[_POSITION])


# These functions are compiled into their callers, and cached on disk with them, under a digest. numba tells cached
# functions apart by their closures, which must not hold a compiled function: its name differs between processes.
_inner = njit(nogil=True)


@_inner
def _copy_piece(shared: int, piece: int) -> None:
    target, source = at(shared, _TARGET), at(shared, _SOURCE)
    size, chunks, count = at(shared, _SIZE), at(shared, _CHUNKS), at(shared, _COUNT)
    if chunks == 0:
        start = piece * _PIECE
        copy_bytes(target + start, source + start, min(_PIECE, size - start))
        return
    index, stop = piece * _CHUNKS_A_PIECE, min((piece + 1) * _CHUNKS_A_PIECE, count)
    while index < stop:
        chunk, after = at(chunks, index), index + 1
        while after < stop and at(chunks, after) - chunk == after - index:  # consecutive chunks are one copy
            after += 1
        start = chunk * SEALED_CHUNK_SIZE
        copy_bytes(
            target + index * SEALED_CHUNK_SIZE, source + start, min((after - index) * SEALED_CHUNK_SIZE, size - start)
        )
        index = after


@_inner
def _take_piece(shared: int) -> bool:
    """Copy the next piece, if there is one. The shared words of a copy stay unchanged until all its pieces are done."""
    piece = load(shared + 8 * _NEXT)
    while piece < load(shared + 8 * _LIMIT):
        if exchange(shared + 8 * _NEXT, piece, piece + 1) == piece:
            _copy_piece(shared, piece - at(shared, _BASE))
            fetch_add(shared + 8 * _DONE, 1)
            return True
        piece = load(shared + 8 * _NEXT)
    return False


@_inner
def _copy_shared(shared: int, parallel: bool, target: int, source: int, size: int, chunks: int, count: int) -> None:
    """Copy on all threads of this list: `size` bytes, or, with `chunks`, these of a message of `size` bytes."""
    pieces = -(-count // _CHUNKS_A_PIECE) if chunks else -(-size // _PIECE)
    base = load(shared + 8 * _LIMIT)
    put(shared, _TARGET, target)
    put(shared, _SOURCE, source)
    put(shared, _SIZE, size)
    put(shared, _CHUNKS, chunks)
    put(shared, _COUNT, count)
    put(shared, _BASE, base)
    if not parallel:
        for piece in range(pieces):
            _copy_piece(shared, piece)
        return
    fetch_add(shared + 8 * _LIMIT, pieces)  # starts the workers
    while _take_piece(shared):
        pass
    while load(shared + 8 * _DONE) < base + pieces:
        sched_yield()


def _build(digest: str) -> tuple[Any, Any, Any]:
    """Compile both variants of `run`, and the function of the workers.

    numba considers only this file and the closure of a function to decide whether cached code is valid: hence the
    digest of the other files.
    """

    def copy_until_over(shared: int) -> None:
        """Copy pieces until the list is over."""
        assert digest
        idle = 0
        while load(shared + 8 * _OVER) == 0:
            if _take_piece(shared):
                idle = 0
            else:
                idle += 1
                if idle < _SPINS:
                    sched_yield()
                else:
                    sleep(_NAP)

    def build_run(stops: bool) -> Any:
        def run(words: int, start: int, count: int, table: int, context: int, shared: int, parallel: bool) -> int:
            assert digest
            status = call(at(table, _PUSH), (context,))
            pushed = status == 0
            position = start
            while status == 0 and position < count:
                here = words + 8 * position
                code, length = at(here, 0), at(here, 1)
                function = at(table, code)
                if code == opcodes.LAUNCH:
                    status = launch(function, here)
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
                            status = STOPPED
                elif code == opcodes.POLL:
                    stop = now() + at(here, 3)
                    status = call(function, (at(here, 2),))
                    while status == _NOT_READY and now() < stop:
                        status = call(function, (at(here, 2),))
                    if status == _NOT_READY:
                        status = STOPPED if stops and at(here, 4) else 0
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
                if status in (0, STOPPED):
                    position += length
            put(shared, _OVER, 1)
            put(shared, _POSITION, position)
            if pushed:
                other = call(at(table, _POP), (shared + 8 * _POPPED,))
                if status == 0:
                    status = other
            return int(status)

        return run

    free, held = build_run(False), build_run(True)  # numba tells them apart by their closures
    compiled = cached_njit(nogil=True)
    return compiled(free), cached_njit(nogil=False)(held), compiled(copy_until_over)


_SOURCES = [Path(__file__).with_name(name) for name in ("intrinsics.py", "commands.py")]
_run, _run_held, _copy_until_over = _build(f"{source_digest(*_SOURCES)}/{SEALED_CHUNK_SIZE}")
