"""The native code of the CUDA device, which runs a list of commands by one call without the interpreter.

It calls libcuda by the addresses of its functions, copies within host memory on several threads, and waits, so that a
list takes the lock of a busy interpreter once. `kernels/fastrack_native` has the loops.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from fastrack._crypto import native, workers
from fastrack._devices.cuda.captures import EXCHANGE_MODE
from fastrack._devices.cuda.commands import NAMES, Commands
from fastrack.errors import DeviceError
from fastrack.format import SEALED_CHUNK_SIZE

STOPPED = -1  # returned by `Native.run` for a list that a command stopped before its end

# The table of libcuda's functions: indices are opcodes, and three that are none.
PUSH, EXCHANGE, POP = 0, 14, 15
_TABLE = 16
_VERSION = 12000  # of the driver API, for cuGetProcAddress

# The words that the threads of a list share; those that are written often have a cache line of their own.
NEXT, DONE, LIMIT = 0, 8, 16  # grains of all copies so far: the next one, those done, and their number
TARGET, SOURCE, SIZE, CHUNKS, COUNT, BASE, OVER = 24, 25, 26, 27, 28, 29, 30
POSITION, POPPED, STATUS = 31, 32, 33  # of the command that stopped; unused result of cuCtxPopCurrent; result
MODE = 34  # of the calling thread before the list, which is restored after it
_SHARED = 40

CHUNKS_A_PIECE = 16
PIECE = CHUNKS_A_PIECE * SEALED_CHUNK_SIZE
_PARALLEL_THRESHOLD = 2 * PIECE  # bytes that one thread copies while another wakes up


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
    for name in (*NAMES.values(), "cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxGetCurrent", EXCHANGE_MODE):
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

    CUDA graphs that other threads capture meanwhile stay valid, and forbid no command.

    `functions` are the addresses from `find_functions`, and `context` is a CUcontext.
    """

    def __init__(self, functions: dict[str, int], context: int) -> None:
        self._table = np.zeros(_TABLE, np.int64)
        for code, name in NAMES.items():
            self._table[code] = functions[name]
        self._table[PUSH] = functions["cuCtxPushCurrent"]
        self._table[POP] = functions["cuCtxPopCurrent"]
        self._table[EXCHANGE] = functions[EXCHANGE_MODE]
        self._context = context
        self._code = native.functions()

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
            self._code.run_commands_held(*arguments, False)
        else:
            copiers = min(threads - 1, commands.copies // _PARALLEL_THRESHOLD)
            workers.share(self._code.run_commands, (*arguments, copiers > 0), copiers, copiers)
        return int(shared[STATUS]), int(shared[POSITION])
