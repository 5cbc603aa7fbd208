"""Calls of CUDA beside threads that capture graphs.

By default CUDA forbids a thread to allocate, to free, and to query or await streams and events, while any other thread
captures a graph in global mode, which is the default of torch. A call that it forbids also invalidates that capture. In
the mode `THREAD_LOCAL` of the calling thread only captures of this thread itself forbid a call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

EXCHANGE_MODE = "cuThreadExchangeStreamCaptureMode"
THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class BesideCaptures:
    """A context manager in which captures of other threads forbid no call of CUDA, and no call invalidates them.

    The mode of the thread is restored at the end, so that CUDA checks the caller's own calls as before.
    """

    __slots__ = ("_exchanged", "_mode")

    def __init__(self) -> None:
        self._mode = ctypes.c_int(THREAD_LOCAL)
        self._exchanged = False

    def __enter__(self) -> None:
        self._exchanged = find_exchange()(ctypes.byref(self._mode)) == 0

    def __exit__(self, *_: object) -> None:
        if self._exchanged:  # `_mode` is the mode from before
            find_exchange()(ctypes.byref(self._mode))


@functools.cache
def find_exchange() -> Callable[[Any], int]:
    """Return libcuda's function that exchanges the mode of a thread, or one that fails if there is no libcuda."""
    try:
        # `PyDLL` keeps the interpreter's lock, which may take milliseconds to get back, and the call takes none. It
        # needs no context.
        exchange: Callable[[Any], int] = ctypes.PyDLL("libcuda.so.1")[EXCHANGE_MODE]
    except (OSError, AttributeError):
        return lambda _: -1
    return exchange
