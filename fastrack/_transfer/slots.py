"""Memory that is made once and used again: `Slots`."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastrack._tensors import arrays
from fastrack._tensors.arrays import Bytes
from fastrack._tensors.mapped_file import map_file
from fastrack._util.fork import register_fork_reset

_LEAST, _STEPS = 4096, 3  # bytes of a slot; a slot has up to an eighth (2**-3) more than was asked for


class Slots:
    """Memory that is reused once no array, tensor or view refers to it any more. Thread-safe.

    The first touch of new memory takes longer than the cipher. All slots together take no more than twice what those
    in use took at the worst moment: then new memory takes the place of free memory of other sizes. `make` makes the
    memory of a slot of so many bytes.
    """

    def __init__(self, make: Callable[[int], Bytes] = arrays.empty_bytes) -> None:
        self._make = make
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Leave all slots to the parent: the memory of files is shared with it."""
        self._lock = threading.Lock()
        self._free: dict[int, list[Bytes]] = {}  # by their size; what was used last is the last one
        # The garbage collector may return a slot at any moment, also while this thread has the lock.
        self._returned: deque[Bytes] = deque()
        self._used = self._most_used = self._spare = 0  # bytes in use, the most of them so far, and bytes that are free

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        with self._lock:
            self._take_back()
            return self._used + self._spare

    def take(self, size: int) -> Bytes:
        """Return uint8 (size,) with any contents. Raise OSError or MemoryError if there is no memory for it."""
        step = max(_LEAST, 1 << max(size.bit_length() - _STEPS - 1, 0))
        capacity = -(-max(size, 1) // step) * step
        with self._lock:
            self._take_back()
            self._used += capacity
            free = self._free.get(capacity)
            memory = free.pop() if free else None
            if memory is not None:
                self._spare -= capacity
            else:
                self._release()
        if memory is None:
            try:
                memory = self._make(capacity)
            except BaseException:
                with self._lock:
                    self._used -= capacity
                raise
        with self._lock:
            self._most_used = max(self._most_used, self._used)
        return np.asarray(_Slot(memory, self._returned))[:size]

    def _take_back(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._free.setdefault(memory.size, []).append(memory)
            self._used -= memory.size
            self._spare += memory.size

    def _release(self) -> None:
        """Release free slots, those of one size after another, until all take what they may."""
        for free in self._free.values():
            while free and self._used + self._spare > 2 * max(self._most_used, self._used):
                self._spare -= free.pop().size


class _Slot:
    """Memory in use. An array refers to it, as its base; with the last one, and its views, it is free again."""

    __slots__ = ("__array_interface__", "_memory", "_returned")

    def __init__(self, memory: Bytes, returned: deque[Bytes]) -> None:
        self._memory, self._returned = memory, returned
        self.__array_interface__: dict[str, Any] = memory.__array_interface__

    def __del__(self) -> None:
        self._returned.append(self._memory)


def file_slots(folder: str | os.PathLike[str]) -> Slots:
    """Return slots in files of a folder, which have no names there and end with their slots."""
    return Slots(partial(_map_new, str(Path(folder).resolve())))


def _map_new(folder: str, size: int) -> Bytes:
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # else a full disk would end the process, at a write to the map
            return map_file(file.fileno(), size, writable=True)
        except OSError as error:
            raise OSError(error.errno, error.strerror, folder) from None
