"""Download what a call needs of messages on servers, all of it in parallel, before native code reads it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeGuard

import numpy as np

from fastrack._sealed import indexing
from fastrack._sealed.indexing import ByteRanges
from fastrack._sealed.storage import Storage
from fastrack.format import CHUNK_SIZE, HEADER_SIZE, SEALED_CHUNK_SIZE

if TYPE_CHECKING:
    from fastrack._remote.remote_file import RemoteFile

_FEW = 64  # rows, for which a loop is faster than arrays


class Message(Protocol):
    """A sealed message in a storage, as `SealedTensor` is one."""

    @property
    def origin(self) -> tuple[Storage, int]: ...
    @property
    def message_size(self) -> int: ...


Wanted = tuple[Message, indexing.LazyRanges | None]  # a message, and the bytes of its plaintext; None for all of it
Part = tuple[int, int, indexing.LazyRanges | None]  # the place of a message in its file, its size, and these bytes


class Fetched:
    """Parts of remote files, which stay in their places as long as this object is alive, unless `is_kept` is False."""

    def __init__(self, parts: Mapping[RemoteFile, Sequence[Part]], *, is_kept: bool = True) -> None:
        self._parts = parts
        self._is_kept = is_kept
        self._leases: list[object] = []
        self.fetch()

    def fetch(self) -> None:
        """Download what is missing: from all files at once."""
        self._leases = []
        if all(file.is_complete for file in self._parts):
            leases = [file.lease_all() for file in self._parts] if self._is_kept else []
            if None not in leases:
                self._leases = leases
                return
            del leases
        wanted = {file: _blocks_of(parts) for file, parts in self._parts.items()}
        if not self._is_kept:
            wanted = {file: blocks for file, blocks in wanted.items() if not file.has_blocks(blocks)}
        if len(wanted) > 1:
            for file, blocks in wanted.items():
                file.prefetch_blocks(blocks)
        leases = [file.fetch_blocks(blocks) for file, blocks in wanted.items()]
        self._leases = leases if self._is_kept else []

    def fetch_again(self) -> None:
        """Download all of it again: the bytes that were kept are wrong, or those on the server."""
        for file, parts in self._parts.items():
            file.drop_blocks(_blocks_of(parts))
        self.fetch()


def fetch(wanted: Iterable[Wanted]) -> Fetched | None:
    """Download what is missing of messages, with their headers. Return None if all of them are on this machine."""
    if not has_remote():
        return None
    found = _group((*tensor.origin, tensor.message_size, ranges) for tensor, ranges in wanted)
    return Fetched(found) if found else None


def fetch_range(storage: Storage, start: int, stop: int) -> Fetched | None:
    """Download what is missing of a range of a storage. Return None if it is on this machine."""
    if not has_remote() or not is_remote(storage):
        return None
    return Fetched({storage: [(start, stop - start, None)]})


def prefetch_range(storage: Storage, start: int, stop: int) -> None:
    """Begin to download a range."""
    if start < stop and is_remote(storage):
        storage.prefetch([(start, stop)])


def prefetch(wanted: Iterable[Wanted]) -> int | None:
    """Begin to download messages as `fetch` does, and return the bytes. Return None if all are on this machine."""
    if not has_remote():
        return None
    found = _group((*tensor.origin, tensor.message_size, ranges) for tensor, ranges in wanted)
    if not found:
        return None
    return sum(file.prefetch_blocks(_blocks_of(parts)) for file, parts in found.items() if not file.is_complete)


def fetch_headers(tensors: Iterable[Message | None]) -> Fetched | None:
    """Download the headers of messages, all at once. Return None if all of them are on this machine."""
    if not has_remote():
        return None
    found = _group((*tensor.origin, HEADER_SIZE, None) for tensor in tensors if tensor is not None)
    return Fetched(found, is_kept=False) if found else None


def has_remote() -> bool:
    """Return False as long as this process has opened no file on a server, so that others pay nothing."""
    return "fastrack._remote.remote_file" in sys.modules


def is_remote(storage: Storage) -> TypeGuard[RemoteFile]:
    """Return True for a file on a server."""
    from fastrack._remote.remote_file import RemoteFile

    return isinstance(storage, RemoteFile)


def _group(
    wanted: Iterable[tuple[Storage, int, int, indexing.LazyRanges | None]],
) -> dict[RemoteFile, list[Part]]:
    """Return the parts of each remote file."""
    from fastrack._remote.remote_file import RemoteFile

    found: dict[RemoteFile, list[Part]] = {}
    for storage, start, size, ranges in wanted:
        if isinstance(storage, RemoteFile):
            found.setdefault(storage, []).append((start, size, ranges))
    return found


def _blocks_of(parts: Sequence[Part]) -> list[range]:
    """Return the blocks of a file that hold its parts, with the headers of their messages, in ascending order."""
    from fastrack._remote.blocks import block_range, merge

    blocks = []
    for start, size, ranges in parts:
        body, stop = start + HEADER_SIZE, start + size
        blocks.append(block_range(start, stop if ranges is None else body))
        if ranges is not None:
            blocks += _blocks_of_chunks(ranges().expand(), body, stop)
    return merge(blocks)


def _blocks_of_chunks(ranges: ByteRanges, start: int, stop: int) -> list[range]:
    """Return the blocks of a file that hold the chunks with bytes of a plaintext."""
    from fastrack._remote.blocks import BLOCK, block_range

    if ranges.starts.size > _FEW:
        some = ranges.sizes > 0
        first, size = ranges.starts[some], ranges.sizes[some]
        firsts = (start + first // CHUNK_SIZE * SEALED_CHUNK_SIZE) // BLOCK
        ends = start + ((first + size - 1) // CHUNK_SIZE + 1) * SEALED_CHUNK_SIZE
        spans = np.unique(np.stack((firsts, (np.minimum(ends, stop) - 1) // BLOCK + 1), axis=1), axis=0)
        return [range(first, end) for first, end in spans.tolist()]
    return [
        block_range(
            start + first // CHUNK_SIZE * SEALED_CHUNK_SIZE,
            min(start + ((first + size - 1) // CHUNK_SIZE + 1) * SEALED_CHUNK_SIZE, stop),
        )
        for first, size in zip(ranges.starts.tolist(), ranges.sizes.tolist(), strict=True)
        if size
    ]
