"""Download what a call needs of messages on servers, all of it in parallel, before native code reads it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from fastrack._crypto.cobblestone import CHUNK_SIZE, HEADER_SIZE, SEALED_CHUNK_SIZE
from fastrack._sealed import indexing
from fastrack._sealed.indexing import ByteRanges
from fastrack._sealed.storage import Storage

if TYPE_CHECKING:
    from fastrack._remote.remote_file import RemoteFile
    from fastrack._sealed.tensor import SealedTensor

Ranges = list[tuple[int, int]]
Wanted = tuple["SealedTensor", Callable[[], indexing.Ranges] | None]
"""A message, and what computes the bytes wanted of its plaintext, if it is on a server; None for all of it."""


class Fetched:
    """Ranges of remote files, which stay in their places as long as this object is alive."""

    def __init__(self, ranges: dict[RemoteFile, Ranges]) -> None:
        self._ranges = ranges
        self._leases: list[object] = []
        self.fetch()

    def fetch(self) -> None:
        """Download what is missing: from all files at once."""
        if len(self._ranges) > 1:
            for file, ranges in self._ranges.items():
                file.prefetch(ranges)
        self._leases = [file.fetch(ranges) for file, ranges in self._ranges.items()]

    def fetch_again(self) -> None:
        """Download all of it again: the bytes that were kept are wrong, or those on the server."""
        self._leases = []
        for file, ranges in self._ranges.items():
            file.drop(ranges)
        self.fetch()


def fetch(wanted: Iterable[Wanted]) -> Fetched | None:
    """Download what is missing of messages, with their headers. Return None if all of them are on this machine."""
    if not has_remote():
        return None
    found = _group(wanted)
    return Fetched(found) if found else None


def fetch_range(storage: Storage, start: int, stop: int) -> Fetched | None:
    """Download what is missing of a range of a storage. Return None if it is on this machine."""
    if not has_remote() or not is_remote(storage):
        return None
    return Fetched({storage: [(start, stop)]})


def prefetch_range(storage: Storage, start: int, stop: int) -> None:
    """Begin to download a range."""
    if start < stop and is_remote(storage):
        storage.prefetch([(start, stop)])


def prefetch(wanted: Iterable[Wanted]) -> int | None:
    """Begin to download messages as `fetch` does, and return the bytes. Return None if all are on this machine."""
    if not has_remote():
        return None
    found = _group(wanted)
    return sum(file.prefetch(ranges) for file, ranges in found.items()) if found else None


def fetch_headers(tensors: Sequence[SealedTensor]) -> Fetched | None:
    """Download the headers of messages, all at once."""
    nothing = np.empty(0, np.int64)
    return fetch((tensor, lambda: ByteRanges(nothing, nothing, nothing)) for tensor in tensors)


def has_remote() -> bool:
    """Return False as long as this process has opened no file on a server, so that others pay nothing."""
    return "fastrack._remote.remote_file" in sys.modules


def is_remote(storage: Storage) -> TypeGuard[RemoteFile]:
    """Return True for a file on a server."""
    from fastrack._remote.remote_file import RemoteFile

    return isinstance(storage, RemoteFile)


def _group(wanted: Iterable[Wanted]) -> dict[RemoteFile, Ranges]:
    """Return the ranges of each remote file."""
    found: dict[RemoteFile, Ranges] = {}
    for tensor, ranges in wanted:
        (storage, start), size = tensor.origin, tensor.message_size
        if is_remote(storage):
            of_file = found.setdefault(storage, [])
            if ranges is None:
                of_file.append((start, start + size))
            else:
                of_file.append((start, start + HEADER_SIZE))
                of_file += _chunks_of(ranges().expand(), start + HEADER_SIZE, start + size)
    return found


def _chunks_of(ranges: ByteRanges, start: int, stop: int) -> Iterable[tuple[int, int]]:
    """Return where in a file the chunks with bytes of a plaintext are."""
    some = ranges.sizes > 0
    first = ranges.starts[some] // CHUNK_SIZE
    last = (ranges.starts[some] + ranges.sizes[some] - 1) // CHUNK_SIZE
    starts = start + first * SEALED_CHUNK_SIZE
    stops = np.minimum(start + (last + 1) * SEALED_CHUNK_SIZE, stop)
    return zip(starts.tolist(), stops.tolist(), strict=True)
