"""Authenticate the headers of a call's messages and derive their keys, before anything is allocated or moved.

What the call needs of messages on servers is downloaded in parallel, headers first, before native code reads it.
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

Wanted = tuple[SealedTensor | None, LazyRanges | None]  # a tensor, or nothing, and bytes of it; None for all of them
_Part = tuple[int, int, LazyRanges | None]  # the place of a message in its file, its size, and these bytes
_REMOTE = (
    "fastrack._remote.remote_file"  # not loaded as long as no file on a server was opened: then others pay nothing
)
_NO_BYTES = EvenRanges(np.empty(0, np.int64), 0, 0)


def open_headers(
    tensors: Sequence[SealedTensor | None], ring: KeyRing, keys: MessageKeys, cacheable: Collection[int] = ()
) -> bool:
    """Derive the key of each message into its row of `keys`, after header and binding were authenticated.

    Headers on servers are downloaded first, all at once, and once more if one is wrong that was kept on this machine.
    Rows of None are left out. The keys of the rows in `cacheable` are kept for the next call, as long as tensor and
    owner's key exist; they are used only if header, context and binding are then the same. Errors have the path of the
    file. Return False if all messages are on this machine.
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
    """The messages under one key that are not known yet: their rows, and what their keys are derived from."""

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
    """Return the key of one message, which has to be wiped, after header and binding were authenticated."""
    keys = MessageKeys(1)
    try:
        open_headers([tensor], ring, keys)
        return keys.key(0)
    finally:
        keys.wipe()


def authenticate_headers(tensors: Sequence[SealedTensor], ring: KeyRing, cacheable: Collection[int] = ()) -> None:
    """Authenticate the headers of messages, and so the sizes of tensors, before room is made for these."""
    keys = MessageKeys(len(tensors))
    try:
        open_headers(tensors, ring, keys, cacheable)
    finally:
        keys.wipe()


def authenticate_remote(tensors: Sequence[SealedTensor], ring: KeyRing) -> bool:
    """Authenticate the headers of messages, some of which are on servers, before more of these is downloaded.

    Return False, without a look at the headers, if all messages are on this machine.
    """
    if not _by_file((tensor, None) for tensor in tensors):
        return False
    authenticate_headers(tensors, ring, cacheable=range(len(tensors)))
    return True


def fetch(wanted: Iterable[Wanted]) -> list[SealedTensor | None] | None:
    """Download what is missing of messages, with their headers. Return None if all of them are on this machine.

    Else the tensors are returned in storages where these bytes are present, and stay present.
    """
    wanted = list(wanted)
    found = _by_file(wanted)
    if not found:
        return None
    from fastrack._remote.remote_file import RemoteFile, fetch_files

    present = {file: StoredBytes(entry.content) for file, entry in fetch_files(found).items()}
    tensors = [tensor for tensor, _ in wanted]
    for number, tensor in enumerate(tensors):
        if tensor is not None and isinstance(storage := tensor.location[0], RemoteFile):
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


def _by_file(wanted: Iterable[Wanted]) -> dict[RemoteFile, Blocks]:
    """Return what computes the blocks that are wanted of each remote file."""
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
            wanted = ranges().expand()
            first, last = wanted.starts, wanted.starts + wanted.sizes - 1
            begins = (body + first // CHUNK_SIZE * SEALED_CHUNK_SIZE) // BLOCK
            ends = np.minimum(body + (last // CHUNK_SIZE + 1) * SEALED_CHUNK_SIZE, stop)
            some = wanted.sizes > 0
            spans = set(zip(begins[some].tolist(), ((ends[some] - 1) // BLOCK + 1).tolist(), strict=True))
            blocks += [range(begin, end) for begin, end in spans]
    return merge(blocks)
