"""Map files without keeping a descriptor, so that a dataset may have more files than a process may open."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

import numpy as np

from fastrack._tensors.arrays import Bytes

_LIBC = ctypes.CDLL(None, use_errno=True)
# The last argument is off_t, which has 64 bits on every supported Linux.
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def map_file(descriptor: int, size: int, *, writable: bool = False) -> Bytes:
    """Map the first bytes of a file, one or more. The map outlives the descriptor, and ends with the array."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _LIBC.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return np.asarray(_Map(address, size, writable))


class _Map:
    """An owned memory map. `mmap.mmap` always keeps a descriptor of its own before Python 3.13."""

    # A slot, which holds a function in C: what a signal's handler raises in a `__del__` in Python is lost.
    __slots__ = ("__array_interface__", "__del__")

    def __init__(self, address: int, size: int, writable: bool) -> None:
        self.__del__ = functools.partial(_LIBC.munmap, address, size)
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, not writable)}
