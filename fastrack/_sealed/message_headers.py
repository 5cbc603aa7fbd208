"""Authenticate the headers of a call's messages and derive their keys, before anything is allocated or moved.

The required parts of remote messages are downloaded in parallel, headers first, before native code reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fastrack._crypto import derivation
from fastrack._crypto.cobblestone import MessageKey
from fastrack._crypto.gather import EvenRanges, LazyRanges
from fastrack._crypto.message_keys import MessageKeyCache, MessageKeys
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._sealed.storage import Ranges, RemoteStorage, Storage, StoredBytes
from fastrack._sealed.tensor import Proof, SealedTensor, move_tensor
from fastrack._util.registry import REMOTE, module_of
from fastrack.errors import AuthenticationError, GrantError, UnknownKeyError
from fastrack.format import CHUNK_SIZE, HEADER_SIZE, SEALED_CHUNK_SIZE

Wanted = tuple[SealedTensor | None, LazyRanges | None]  # a tensor or None, and its byte ranges; None for all bytes
_Part = tuple[int, int, LazyRanges | None]  # the start of a message in its file, its size, and its byte ranges
# A key, whether it is restricted, its cache, and the rows, headers and contexts of its messages that the cache lacks.
_Group = tuple[Key, bool, MessageKeyCache | None, list[int], list[bytes], list[bytes]]
# Loaded when a remote file is opened: until then local ones do not pay for a look at each.
_REMOTE = module_of(REMOTE["open"])
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
    is_remote = _REMOTE in sys.modules and fetch_headers(tensors)
    try:
        open_local_headers(tensors, ring, keys, cacheable)
    except AuthenticationError:
        if not is_remote:
            raise
        discard((tensor, _NO_BYTES) for tensor in tensors)
        fetch_headers(tensors)
        open_local_headers(tensors, ring, keys, cacheable)
    return is_remote


def open_local_headers(
    tensors: Sequence[SealedTensor | None], ring: KeyRing, keys: MessageKeys, cacheable: Collection[int] = ()
) -> None:
    """Authenticate header and binding of each message, like `open_headers`, where all headers are on this machine."""
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
                group = groups[tensor.key_id] = (key, key.is_restricted, cache, [], [], [])
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
    for cache, owner, proof, row in storing:  # not before: by now all headers are authentic
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
    ranges_by_file = _by_file(wanted)
    if not ranges_by_file:
        return None
    fetched = next(iter(ranges_by_file)).fetch_files(ranges_by_file)
    present: dict[Storage, StoredBytes] = {file: StoredBytes(content) for file, content in fetched.items()}
    tensors = [tensor for tensor, _ in wanted]
    for number, tensor in enumerate(tensors):
        if tensor is not None and (storage := tensor.location[0]) in present:
            tensors[number] = move_tensor(tensor, present[storage])
    return tensors


def fetch_headers(tensors: Iterable[SealedTensor | None]) -> bool:
    """Download the headers of messages in parallel. Return False if all messages are on this machine."""
    ranges_by_file = _by_file((tensor, _NO_BYTES) for tensor in tensors)
    if ranges_by_file:
        next(iter(ranges_by_file)).fetch_files(ranges_by_file)
    return bool(ranges_by_file)


def prefetch(wanted: Iterable[Wanted]) -> int | None:
    """Begin to download the missing parts of messages, and return their size; None if all are on this machine."""
    ranges_by_file = _by_file(wanted)
    return next(iter(ranges_by_file)).prefetch_files(ranges_by_file) if ranges_by_file else None


def is_remote(tensor: SealedTensor) -> bool:
    """Return whether a message is in a remote file."""
    return _REMOTE in sys.modules and tensor.location[0].is_remote


def discard(wanted: Iterable[Wanted]) -> bool:
    """Discard the cached parts of remote messages, some of them wrong. Return False if all are on this machine."""
    ranges_by_file = _by_file(wanted)
    for file, ranges in ranges_by_file.items():
        file.discard(ranges().tolist())
    return bool(ranges_by_file)


def _by_file(wanted: Iterable[Wanted]) -> dict[RemoteStorage, Ranges]:
    """Return a function that computes the required ranges of bytes, by remote file."""
    if _REMOTE not in sys.modules:
        return {}
    parts: dict[Storage, list[_Part]] = {}
    for tensor, ranges in wanted:
        if tensor is not None and (storage := tensor.location[0]).is_remote:
            parts.setdefault(storage, []).append((tensor.location[1], tensor.message_size, ranges))
    return {cast(RemoteStorage, file): partial(_ranges_of, some) for file, some in parts.items()}


def _ranges_of(parts: Sequence[_Part]) -> NDArray[np.int64]:
    """Return the ranges of a file that hold its parts, with the headers of their messages."""
    found = []
    for start, size, ranges in parts:
        body, stop = start + HEADER_SIZE, start + size
        found.append(np.array([(start, stop if ranges is None else body)]))
        if ranges is not None and ranges is not _NO_BYTES:
            expanded = ranges().expand()
            first, last = expanded.starts, expanded.starts + expanded.sizes - 1
            begins = body + first // CHUNK_SIZE * SEALED_CHUNK_SIZE
            ends = np.minimum(body + (last // CHUNK_SIZE + 1) * SEALED_CHUNK_SIZE, stop)
            found.append(np.stack([begins, ends], axis=1)[expanded.sizes > 0])
    return np.concatenate(found)
