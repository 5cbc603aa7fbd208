"""Memory of the interpreted device: bounds, and bytes that were never written."""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np

NOBODY, SEVERAL = -1, -2
_GAP = 1 << 20


class Violation(Exception):  # noqa: N818 - it is what the program did
    """A kernel did what CUDA forbids or leaves undefined."""


class Buffer:
    """Bytes at a multiple of 16, and what a launch has done to each. The `first` of them are no part of it."""

    def __init__(self, name, pointer, size, content=b"", *, first=0, writable=True):
        self.name, self.pointer, self.size, self.first, self.writable = name, pointer, size, first, writable
        room = -(-size // 16) * 16  # so that all views of words end in bounds
        self.bytes = np.full(room, 0xA5, np.uint8)
        self.written = np.zeros(room, bool)
        self.put(0, np.frombuffer(content, np.uint8))
        self.launch = None

    def put(self, start, content):
        self.bytes[start : start + len(content)] = content
        self.written[start : start + len(content)] = True

    def begin(self, launch):
        """Forget what an earlier launch did: a later one comes after all of it."""
        if self.launch != launch:
            self.launch = launch
            self.writer, self.reader = (np.full(self.bytes.size, NOBODY, np.int32) for _ in range(2))  # blocks
            self.constant = np.zeros(self.bytes.size, bool)  # ld.global.nc has read it


class Space:
    """Buffers far apart, at multiples of 256."""

    def __init__(self):
        self.buffers = WeakValueDictionary()
        self._next, self._random = 1 << 33, np.random.default_rng(0)

    def add(self, size, content=b"", **options):
        """Make a buffer at an address that is free. It goes with its last reference."""
        name = options.pop("name", f"buffer {len(self.buffers)}")
        buffer = self.keep(Buffer(name, self._next, size, content, **options))
        self._next += -(-(size + _GAP) // 256) * 256 + 256 * int(self._random.integers(1 << 12))
        return buffer

    def keep(self, buffer):
        self.buffers[buffer.pointer] = buffer
        return buffer

    def find(self, pointer):
        """Return the buffer that holds this byte, or None."""
        buffers = list(self.buffers.values())
        return next((each for each in buffers if each.pointer + each.first <= pointer < each.pointer + each.size), None)
