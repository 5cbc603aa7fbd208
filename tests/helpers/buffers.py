"""Buffers with a fence on both sides, at any distance from an aligned address."""

import ctypes
import mmap
from weakref import WeakValueDictionary

import numpy as np

LIVING = WeakValueDictionary()  # what stands between fences now, by its address
_FENCE = 256
_GUARD = 0xA5


class Fenced:
    """`size` bytes, `offset` bytes after a 64-byte boundary, between guard bytes that must not change."""

    def __init__(self, size, offset=0):
        self._all = np.full(size + 2 * _FENCE + 128, _GUARD, np.uint8)
        start = -self._all.ctypes.data % 64 + 64 + offset
        self._before = self._all[:start]
        self.data = self._all[start : start + size]
        self._after = self._all[start + size :]
        LIVING[self.data.ctypes.data] = self.data
        assert self.data.size == size
        assert self._after.size >= 64

    @classmethod
    def holding(cls, content, offset=0):
        content = as_array(content)
        fenced = cls(content.size, offset)
        fenced.data[:] = content
        return fenced

    @property
    def stands(self):
        return bool((self._before == _GUARD).all() and (self._after == _GUARD).all())


def as_array(content):
    return np.frombuffer(content, np.uint8)


class Guarded:
    """Memory between two inaccessible pages: to read or write past it ends the process with SIGSEGV.

    It lasts as long as the process does. Linux and macOS only.
    """

    def __init__(self, size):
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = mmap.mmap(-1, pages + 2 * mmap.PAGESIZE)
        data = np.frombuffer(whole, np.uint8)
        start = data.ctypes.data
        for page in (start, start + mmap.PAGESIZE + pages):
            if _protect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), 0):
                raise OSError(ctypes.get_errno(), "a page could not be protected")
        self.data = data[mmap.PAGESIZE : mmap.PAGESIZE + pages]

    def take(self, size, *, at_end):
        """Give so many bytes that end, or begin, at such a page."""
        return self.data[self.data.size - size :] if at_end else self.data[:size]


_protect = ctypes.CDLL(None, use_errno=True).mprotect
