"""Authenticate the headers of a call's messages and derive their keys, before anything is allocated or moved.

The required parts of remote messages are downloaded in parallel, headers first, before native code reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastrack._crypto import derivation
from fastrack._crypto.cobblestone import MessageKey
from fastrack._crypto.gather import EvenRanges, LazyRanges
from fastrack._crypto.message_keys import MessageKeyCache, MessageKeys
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._sealed.storage import StoredBytes
from fastrack._sealed.tensor import Proof, SealedTensor, move_tensor
from fastrack.errors import AuthenticationError, GrantError, UnknownKeyError
from fastrack.format import CHUNK_SIZE, HEADER_SIZE, SEALED_CHUNK_SIZE

if TYPE_CHECKING:
    from fastrack._remote.remote_file import Blocks, RemoteFile

Wanted = tuple[SealedTensor | None, LazyRanges | None]  # a tensor or None, and its byte ranges; None for all bytes
_Part = tuple[int, int, LazyRanges | None]  # the start of a message in its file, its size, and its byte ranges
_REMOTE = (
    "fastrack._remote.remote_file"  # not loaded until a remote file is opened, so that local files do not pay for it
)
_NO_BYTES = EvenRanges(np.empty(0, np.int64), 0, 0)


def open_headers(
    tensors: Sequence[SealedTensor | None], ring: KeyRing, keys: MessageKeys, cacheable: Collection[int] = ()
) -> bool:
    """Authenticate header and binding of each message, and derive its key into its row of `keys`.

    Remote headers are downloaded first, in parallel, and once more if a cached header is wrong. Rows of None are left
    out. The keys of the rows in `cacheable` are kept for later calls, as long as the tensor and the owner's key exist;
    a kept key is used only for an unchanged header, context and binding. Errors have the path of the file. Return
    False if all messages are on this machine.
    """
    is_remote = fetch_headers(tensors)
    try:
        _open_headers(tensors, ring, keys, cacheable)
    except AuthenticationError:
        if not is_remote:
            raise
        discard((tensor, _NO_BYTES) for tensor in tensors)
        fetch_headers(tensors)
        _open_headers(tensors, ring, keys, cacheable)
    return is_remote


class _Group(NamedTuple):
    """The messages under one key without cached message keys: their rows, headers and contexts."""

    key: Key
    is_restricted: bool
    cache: MessageKeyCache | None
    rows: list[int]
    headers: list[bytes]
    contexts: list[bytes]


def _open_headers(
    tensors: Sequence[SealedTensor | None], ring: KeyRing, keys: MessageKeys, cacheable: Collection[int]
) -> None:
    groups: dict[str, _Group] = {}  # by the ids of keys, so that the ring is asked once for each
    storing: list[tuple[MessageKeyCache, SealedTensor, Proof, int]] = []
    for row, tensor in enumerate(tensors):
        if tensor is None:
            continue
        try:
            group = groups.get(tensor.key_id)
            if group is None:
                key = ring[tensor.key_id]
                cache = key.message_keys if cacheable else None
                group = groups[tensor.key_id] = _Group(key, key.is_restricted, cache, [], [], [])
            key, is_restricted, cache, rows, headers, contexts = group
            if is_restricted:
                tensor.check_grant(key)
            proof = tensor.proof()
            if cache is not None and row in cacheable:
                if cache.load(tensor, proof, keys, row):
                    continue
                storing.append((cache, tensor, proof, row))
            if tensor.binding is not None:
                tensor.binding.check(tensor.context, key)
            rows.append(row)
            headers.append(proof[0])
            contexts.append(proof[1])
        except (AuthenticationError, GrantError, UnknownKeyError) as error:
            tensor.add_path(error)
            raise
    _derive(keys, groups.values(), tensors)
    for cache, owner, proof, row in storing:
        cache.store(owner, proof, keys, row)


def _derive(keys: MessageKeys, groups: Iterable[_Group], tensors: Sequence[SealedTensor | None]) -> None:
    for key, _, _, rows, headers, contexts in groups:
        if not rows:
            continue
        secret = key.material()
        bad = derivation.derive_rows(secret, headers, contexts, rows, keys.reserve(rows, 8 * len(secret)))
        if bad is not None:
            tensor = tensors[rows[bad]]
            assert tensor is not None
            mismatch = tensor.context.mismatch()
            tensor.add_path(mismatch)
            raise mismatch


def open_header(tensor: SealedTensor, ring: KeyRing) -> MessageKey:
    """Authenticate header and binding of a message, and return its key, which the caller wipes."""
    keys = MessageKeys(1)
    try:
        open_headers([tensor], ring, keys)
        return keys.key(0)
    finally:
        keys.wipe()


def authenticate_headers(tensors: Sequence[SealedTensor], ring: KeyRing, cacheable: Collection[int] = ()) -> None:
    """Authenticate the headers of messages, and so the sizes of tensors, before memory is allocated."""
    keys = MessageKeys(len(tensors))
    try:
        open_headers(tensors, ring, keys, cacheable)
    finally:
        keys.wipe()


def authenticate_remote(tensors: Sequence[SealedTensor], ring: KeyRing) -> bool:
    """Authenticate the headers of messages if any message is remote, before more is downloaded.

    Return False, without reading headers, if all messages are on this machine.
    """
    if not _by_file((tensor, None) for tensor in tensors):
        return False
    authenticate_headers(tensors, ring, cacheable=range(len(tensors)))
    return True


def fetch(wanted: Iterable[Wanted]) -> list[SealedTensor | None] | None:
    """Download the missing bytes of messages, and their headers. Return None if all messages are on this machine.

    Else return the tensors in storages that keep the downloaded bytes present.
    """
    wanted = list(wanted)
    blocks_by_file = _by_file(wanted)
    if not blocks_by_file:
        return None
    from fastrack._remote.remote_file import RemoteFile, fetch_files

    present = {file: StoredBytes(entry.content) for file, entry in fetch_files(blocks_by_file).items()}
    tensors = [tensor for tensor, _ in wanted]
    for number, tensor in enumerate(tensors):
        if tensor is not None and isinstance(storage := tensor.location[0], RemoteFile):
            tensors[number] = move_tensor(tensor, present[storage])
    return tensors


def fetch_headers(tensors: Iterable[SealedTensor | None]) -> bool:
    """Download the headers of messages in parallel. Return False if all messages are on this machine."""
    if _REMOTE not in sys.modules:
        return False
    blocks_by_file = _by_file((tensor, _NO_BYTES) for tensor in tensors)
    if blocks_by_file:
        from fastrack._remote.remote_file import fetch_files

        fetch_files(blocks_by_file)
    return bool(blocks_by_file)


def prefetch(wanted: Iterable[Wanted]) -> int | None:
    """Begin to download the missing parts of messages, and return their size; None if all are on this machine."""
    blocks_by_file = _by_file(wanted)
    if not blocks_by_file:
        return None
    from fastrack._remote.remote_file import prefetch_files

    return prefetch_files(blocks_by_file)


def is_remote(tensor: SealedTensor) -> bool:
    """Return whether a message is in a remote file."""
    if _REMOTE not in sys.modules:
        return False
    from fastrack._remote.remote_file import RemoteFile

    return isinstance(tensor.location[0], RemoteFile)


def discard(wanted: Iterable[Wanted]) -> bool:
    """Discard the cached parts of remote messages, some of them wrong. Return False if all are on this machine."""
    blocks_by_file = _by_file(wanted)
    for file, blocks in blocks_by_file.items():
        file.discard_blocks(blocks())
    return bool(blocks_by_file)


def _by_file(wanted: Iterable[Wanted]) -> dict[RemoteFile, Blocks]:
    """Return a function that computes the required blocks, by remote file."""
    if _REMOTE not in sys.modules:
        return {}
    from fastrack._remote.remote_file import RemoteFile

    parts: dict[RemoteFile, list[_Part]] = {}
    for tensor, ranges in wanted:
        if tensor is not None and isinstance(storage := tensor.location[0], RemoteFile):
            parts.setdefault(storage, []).append((tensor.location[1], tensor.message_size, ranges))
    return {file: partial(_blocks_of, some) for file, some in parts.items()}


def _blocks_of(parts: Sequence[_Part]) -> list[range]:
    """Return the blocks of a file that hold its parts, with the headers of their messages, in ascending order."""
    from fastrack._remote.blocks import BLOCK, block_range, merge

    blocks = []
    for start, size, ranges in parts:
        body, stop = start + HEADER_SIZE, start + size
        blocks.append(block_range(start, stop if ranges is None else body))
        if ranges is not None and ranges is not _NO_BYTES:
            expanded = ranges().expand()
            first, last = expanded.starts, expanded.starts + expanded.sizes - 1
            begins = (body + first // CHUNK_SIZE * SEALED_CHUNK_SIZE) // BLOCK
            ends = np.minimum(body + (last // CHUNK_SIZE + 1) * SEALED_CHUNK_SIZE, stop)
            nonempty = expanded.sizes > 0
            spans = set(zip(begins[nonempty].tolist(), ((ends[nonempty] - 1) // BLOCK + 1).tolist(), strict=True))
            blocks += [range(begin, end) for begin, end in spans]
    return merge(blocks)
