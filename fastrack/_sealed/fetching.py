"""Download what a call needs of messages on servers, all of it in parallel, before native code reads it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fastrack._sealed.indexing import EvenRanges, LazyRanges
from fastrack._sealed.storage import StoredBytes
from fastrack._sealed.tensor import SealedTensor, move_tensor
from fastrack.format import CHUNK_SIZE, HEADER_SIZE, SEALED_CHUNK_SIZE

if TYPE_CHECKING:
    from fastrack._remote.remote_file import Blocks, RemoteFile

Wanted = tuple[SealedTensor | None, LazyRanges | None]  # a tensor, or nothing, and bytes of it; None for all of them
_Part = tuple[int, int, LazyRanges | None]  # the place of a message in its file, its size, and these bytes
_REMOTE = (
    "fastrack._remote.remote_file"  # not loaded as long as no file on a server was opened: then others pay nothing
)
_NO_BYTES = EvenRanges(np.empty(0, np.int64), 0, 0)


def fetch(wanted: Iterable[Wanted]) -> list[SealedTensor | None] | None:
    """Download what is missing of messages, with their headers. Return None if all of them are on this machine.

    Else the tensors are returned in storages where these bytes are present, and stay present.
    """
    if _REMOTE not in sys.modules:
        return None
    from fastrack._remote.remote_file import RemoteFile, fetch_files

    wanted = list(wanted)
    found = _by_file(wanted)
    if not found:
        return None
    present = {file: StoredBytes(entry.content) for file, entry in fetch_files(found).items()}
    tensors = [tensor for tensor, _ in wanted]
    for number, tensor in enumerate(tensors):
        if tensor is not None and isinstance(storage := tensor.origin[0], RemoteFile):
            tensors[number] = move_tensor(tensor, present[storage])
    return tensors


def fetch_headers(tensors: Iterable[SealedTensor | None]) -> bool:
    """Download the headers of messages, all at once. Return False if all of them are on this machine."""
    if _REMOTE not in sys.modules:
        return False
    found = _by_file((tensor, _NO_BYTES) for tensor in tensors)
    if found:
        from fastrack._remote.remote_file import fetch_files

        fetch_files(found)
    return bool(found)


def prefetch(wanted: Iterable[Wanted]) -> int | None:
    """Begin to download what is missing of messages, and return its bytes. Return None if all are on this machine."""
    found = _by_file(wanted)
    if not found:
        return None
    from fastrack._remote.remote_file import prefetch_files

    return prefetch_files(found)


def discard(wanted: Iterable[Wanted]) -> bool:
    """Forget what was kept of messages on servers, as some of it is wrong. Return False if all are on this machine."""
    found = _by_file(wanted)
    for file, blocks in found.items():
        file.discard_blocks(blocks())
    return bool(found)


def discard_headers(tensors: Iterable[SealedTensor | None]) -> bool:
    """Forget what was kept of the headers of messages on servers. Return False if all are on this machine."""
    return discard((tensor, _NO_BYTES) for tensor in tensors)


def has_remote(tensors: Iterable[SealedTensor]) -> bool:
    """Return True if one of these messages is on a server."""
    return bool(_by_file((tensor, None) for tensor in tensors))


def _by_file(wanted: Iterable[Wanted]) -> dict[RemoteFile, Blocks]:
    """Return what computes the blocks that are wanted of each remote file."""
    if _REMOTE not in sys.modules:
        return {}
    from fastrack._remote.remote_file import RemoteFile

    parts: dict[RemoteFile, list[_Part]] = {}
    for tensor, ranges in wanted:
        if tensor is not None and isinstance(storage := tensor.origin[0], RemoteFile):
            parts.setdefault(storage, []).append((tensor.origin[1], tensor.message_size, ranges))
    return {file: partial(_blocks_of, some) for file, some in parts.items()}


def _blocks_of(parts: Sequence[_Part]) -> list[range]:
    """Return the blocks of a file that hold its parts, with the headers of their messages, in ascending order."""
    from fastrack._remote.blocks import BLOCK, block_range, merge

    blocks = []
    for start, size, ranges in parts:
        body, stop = start + HEADER_SIZE, start + size
        blocks.append(block_range(start, stop if ranges is None else body))
        if ranges is not None and ranges is not _NO_BYTES:
            wanted = ranges().expand()
            first, last = wanted.starts, wanted.starts + wanted.sizes - 1
            begins = (body + first // CHUNK_SIZE * SEALED_CHUNK_SIZE) // BLOCK
            ends = np.minimum(body + (last // CHUNK_SIZE + 1) * SEALED_CHUNK_SIZE, stop)
            some = wanted.sizes > 0
            spans = set(zip(begins[some].tolist(), ((ends[some] - 1) // BLOCK + 1).tolist(), strict=True))
            blocks += [range(begin, end) for begin, end in spans]
    return merge(blocks)
