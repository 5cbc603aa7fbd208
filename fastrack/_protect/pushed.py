"""Sealing of bytes that come by themselves, such as those that torch writes: one slab is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastrack._tensors import arrays
from fastrack._tensors.arrays import Bytes


class PushedBytes:
    """File for writing exactly `nbytes`, each slab of which goes to `seal`."""

    def __init__(self, nbytes: int, slab: int, seal: Callable[[Bytes], None]) -> None:
        self._nbytes, self._seal = nbytes, seal
        self._slab = arrays.empty_bytes(min(slab, nbytes))
        self._held = self._done = 0  # bytes in the slab, and bytes sealed before

    def write(self, data: Any) -> None:
        """Take all of `data`. Whole slabs are sealed where they are."""
        view = np.frombuffer(memoryview(data).cast("B"), np.uint8) if len(data) else np.empty(0, np.uint8)
        if self._done + self._held + view.size > self._nbytes:
            raise self._other_size("more")
        start = 0
        while start < view.size:
            if not self._held and view.size - start >= self._slab.size:
                self._pass(view[start : start + self._slab.size])
                start += self._slab.size
                continue
            count = min(self._slab.size - self._held, view.size - start)
            self._slab[self._held : self._held + count] = view[start : start + count]
            self._held, start = self._held + count, start + count
            if self._held == self._slab.size:
                self._pass(self._slab)

    def finish(self) -> None:
        """Seal the last slab. Fewer bytes than were announced are refused."""
        if self._done + self._held != self._nbytes:
            raise self._other_size("fewer")
        if self._held or not self._nbytes:
            self._pass(self._slab[: self._held])

    def wipe(self) -> None:
        """Overwrite the slab, which is plaintext."""
        self._slab.fill(0)

    def _pass(self, slab: Bytes) -> None:
        self._held = 0
        self._seal(slab)
        self._done += slab.size

    def _other_size(self, which: str) -> ValueError:
        return ValueError(
            f"saving failed: expected the {self._nbytes} bytes that were counted, got {which}; the state changed while "
            "it was saved. Nothing is left of the file. Save a copy, or let no other thread change it meanwhile"
        )
