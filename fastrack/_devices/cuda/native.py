"""The native side of the CUDA device: one call without the interpreter for a whole list of commands.

It calls libcuda by addresses, copies host memory to host memory with the help of other threads, and waits, so that a
busy interpreter is asked for its lock once a list. Importing this imports numba.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from fastrack._crypto import workers as crew
from fastrack._crypto.cobblestone import SEALED_CHUNK_SIZE
from fastrack._crypto.jit import cached_njit, copy_bytes, fetch_add, sched_yield, source_digest
from fastrack._devices.cuda.commands import (
    CAPTURING,
    COPY,
    DOWNLOAD,
    FILL,
    LAUNCH,
    NAMES,
    PACK,
    POLL,
    RECORD,
    REQUIRE_IDLE,
    SYNCHRONIZE,
    TIMESTAMP,
    UPLOAD,
    WAIT,
    Commands,
)
from fastrack._devices.cuda.intrinsics import at, call, exchange, launch, load, now, put, sleep
from fastrack.errors import DeviceError

STOPPED = -1  # what `Native.run` returns when a list was stopped before its end
_NOT_READY, _IMPLICIT = 600, 906  # CUDA_ERROR_NOT_READY, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT

# The functions of libcuda by the opcode that calls them, and two that no opcode has.
_PUSH, _POP = 0, 15
_TABLE = 16
_VERSION = 12000  # of the interface, as cuGetProcAddress counts

# The board that the threads of a list share, in words; those that are written often have a cache line of their own.
_NEXT, _DONE, _LIMIT = 0, 8, 16  # pieces: the next to be taken, those done, those there are; all ever so far
_TARGET, _SOURCE, _SIZE, _CHUNKS, _COUNT, _BASE, _OVER = 24, 25, 26, 27, 28, 29, 30
_PLACE, _POPPED = 31, 32  # of the command that stopped or failed; a context that nobody asks for
_BOARD = 40

_CHUNKS_A_PIECE = 16
_PIECE = _CHUNKS_A_PIECE * SEALED_CHUNK_SIZE
_ALONE = 2 * _PIECE  # bytes that one thread has copied before another has woken up
_HELPERS = 7  # with the issuing thread 8: what 55 GB/s take at 7 GB/s a thread
_SPINS = 256
_NAP = 50  # microseconds


def find_functions(library: Any = None) -> dict[str, int]:
    """Find the functions of libcuda that lists call: their addresses, by name.

    Raises
    ------
    DeviceError
        If there is no libcuda, or it lacks one of them.
    """
    try:
        library = library or ctypes.CDLL("libcuda.so.1")
        find = library.cuGetProcAddress_v2
    except (OSError, AttributeError) as error:
        raise DeviceError(
            f"cannot call libcuda: {error}. Install an NVIDIA driver for CUDA 12 or later, or use device='cpu'"
        ) from error
    found = {}
    for name in (*NAMES.values(), "cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxGetCurrent"):
        function, status = ctypes.c_void_p(), ctypes.c_int()
        arguments = (ctypes.byref(function), ctypes.c_int(_VERSION), ctypes.c_uint64(0), ctypes.byref(status))
        result = find(name.encode(), *arguments)
        if result or not function.value:
            raise DeviceError(
                f"libcuda has no {name} (error {result}, status {status.value}). Install a newer NVIDIA driver, or use "
                "device='cpu'"
            )
        found[name] = function.value
    return found


class Native:
    """Lists of commands for one CUDA context.

    Parameters
    ----------
    functions : dict of str to int
        The addresses that `find_functions` gives.
    context : int
        The CUcontext in which lists are issued, whichever is current in the calling thread.
    """

    def __init__(self, functions: dict[str, int], context: int) -> None:
        self._table = np.zeros(_TABLE, np.int64)
        for code, name in NAMES.items():
            self._table[code] = functions[name]
        self._table[_PUSH] = functions["cuCtxPushCurrent"]
        self._table[_POP] = functions["cuCtxPopCurrent"]
        self._context = context

    def run(self, commands: Commands, *, threads: int = 1, start: int = 0, hold: bool = False) -> tuple[int, int]:
        """Run commands from the word `start` on.

        Parameters
        ----------
        threads : int
            How many threads may copy host memory.
        hold : bool
            Keep the interpreter's lock, up to a command that stops the list. For what takes some microseconds: to get
            the lock back from a busy interpreter takes milliseconds.

        Returns
        -------
        status : int
            0 at the end; `STOPPED` where a command stopped the list; else the CUresult of the command that failed.
        place : int
            Where that command starts; where the next one starts if the list was stopped.
        """
        board = np.zeros(_BOARD, np.int64)
        place = int(board.__array_interface__["data"][0])
        words, count = commands.code.buffer_info()
        table = int(self._table.__array_interface__["data"][0])
        where = (words, start, count, table, self._context, place)
        if hold:
            return int(_run_held(*where, False)), int(board[_PLACE])
        helpers = min(threads - 1, _HELPERS, commands.copies // _ALONE)
        try:
            if helpers > 0:
                crew.start(lambda: _assist(place), helpers, (board, commands))
            status = int(_run(*where, helpers > 0))
        except BaseException:  # an interrupt before the list began, whose end helpers wait for
            board[_OVER] = 1
            raise
        return status, int(board[_PLACE])


# These have no code of their own on disk: it is part of that of what calls them, known by a digest. numba keeps
# functions apart there by what they close over, which may be no compiled function: its name differs in each process.
_inner = njit(nogil=True)


@_inner
def _copy_piece(board: int, piece: int) -> None:
    target, source = at(board, _TARGET), at(board, _SOURCE)
    size, chunks, count = at(board, _SIZE), at(board, _CHUNKS), at(board, _COUNT)
    if chunks == 0:
        start = piece * _PIECE
        copy_bytes(target + start, source + start, min(_PIECE, size - start))
        return
    index, stop = piece * _CHUNKS_A_PIECE, min((piece + 1) * _CHUNKS_A_PIECE, count)
    while index < stop:
        chunk, after = at(chunks, index), index + 1
        while after < stop and at(chunks, after) - chunk == after - index:  # neighbours are one stretch
            after += 1
        start = chunk * SEALED_CHUNK_SIZE
        copy_bytes(
            target + index * SEALED_CHUNK_SIZE, source + start, min((after - index) * SEALED_CHUNK_SIZE, size - start)
        )
        index = after


@_inner
def _take_piece(board: int) -> bool:
    """Copy the next piece, if there is one. As long as it is not done, what the board says of the copy stands."""
    piece = load(board + 8 * _NEXT)
    while piece < load(board + 8 * _LIMIT):
        if exchange(board + 8 * _NEXT, piece, piece + 1) == piece:
            _copy_piece(board, piece - at(board, _BASE))
            fetch_add(board + 8 * _DONE, 1)
            return True
        piece = load(board + 8 * _NEXT)
    return False


@_inner
def _share(board: int, helped: bool, target: int, source: int, size: int, chunks: int, count: int) -> None:
    """Copy by all threads of this list; with `chunks`, these of a message of `size` bytes."""
    pieces = -(-count // _CHUNKS_A_PIECE) if chunks else -(-size // _PIECE)
    base = load(board + 8 * _LIMIT)
    put(board, _TARGET, target)
    put(board, _SOURCE, source)
    put(board, _SIZE, size)
    put(board, _CHUNKS, chunks)
    put(board, _COUNT, count)
    put(board, _BASE, base)
    if not helped:
        for piece in range(pieces):
            _copy_piece(board, piece)
        return
    fetch_add(board + 8 * _LIMIT, pieces)  # from here on others take part
    while _take_piece(board):
        pass
    while load(board + 8 * _DONE) < base + pieces:
        sched_yield()


def _build(form: str) -> tuple[Any, Any, Any]:
    """Compile both forms of `run`, and what helps them.

    numba looks only at this file, and at what a function closes over, to see whether the code on disk is still good:
    hence a digest of the other files that it is made of in `form`.
    """

    def assist(board: int) -> None:
        """Copy pieces until the list is over."""
        assert form
        idle = 0
        while load(board + 8 * _OVER) == 0:
            if _take_piece(board):
                idle = 0
            else:
                idle += 1
                if idle < _SPINS:
                    sched_yield()
                else:
                    sleep(_NAP)

    def build_run(stops: bool) -> Any:
        def run(words: int, start: int, count: int, table: int, context: int, board: int, helped: bool) -> int:
            assert form
            status = call(at(table, _PUSH), (context,))
            pushed = status == 0
            place = start
            while status == 0 and place < count:
                here = words + 8 * place
                code, length = at(here, 0), at(here, 1)
                function = at(table, code)
                if code == LAUNCH:
                    status = launch(function, here)
                elif code in (UPLOAD, DOWNLOAD, FILL):
                    status = call(function, (at(here, 2), at(here, 3), at(here, 4), at(here, 5)))
                elif code == WAIT:
                    status = call(function, (at(here, 2), at(here, 3), 0))
                elif code == RECORD:
                    status = call(function, (at(here, 2), at(here, 3)))
                elif code == SYNCHRONIZE:
                    status = call(function, (at(here, 2),))
                elif code == REQUIRE_IDLE:
                    if stops:
                        status = call(function, (at(here, 2),))
                        if status == _NOT_READY:
                            status = STOPPED
                elif code == POLL:
                    stop = now() + at(here, 3)
                    status = call(function, (at(here, 2),))
                    while status == _NOT_READY and now() < stop:
                        status = call(function, (at(here, 2),))
                    if status == _NOT_READY:
                        status = STOPPED if stops and at(here, 4) else 0
                elif code == CAPTURING:
                    status = call(function, (at(here, 2), here + 24))
                    if status == _IMPLICIT:  # of the default stream, to which another one's capture is in the way
                        put(here, 3, 1)
                        status = 0
                elif code == COPY:
                    _share(board, helped, at(here, 2), at(here, 3), at(here, 4), 0, 0)
                elif code == PACK:
                    _share(board, helped, at(here, 2), at(here, 3), at(here, 4), at(here, 5), at(here, 6))
                elif code == TIMESTAMP:
                    put(here, 2, now())
                if status in (0, STOPPED):
                    place += length
            put(board, _OVER, 1)
            put(board, _PLACE, place)
            if pushed:
                other = call(at(table, _POP), (board + 8 * _POPPED,))
                if status == 0:
                    status = other
            return int(status)

        return run

    free, held = build_run(False), build_run(True)  # numba keeps them apart on disk by what they close over
    compiled = cached_njit(nogil=True)
    return compiled(free), cached_njit(nogil=False)(held), compiled(assist)


_SOURCES = [Path(__file__).with_name(name) for name in ("intrinsics.py", "commands.py")]
_run, _run_held, _assist = _build(f"{source_digest(*_SOURCES)}/{SEALED_CHUNK_SIZE}")
