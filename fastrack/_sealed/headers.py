"""Authenticate the headers of all messages of a call, and derive their keys, before anything is allocated or moved."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from fastrack._crypto.derivation import derive_keys
from fastrack._crypto.message_key_cache import MessageKeyCache
from fastrack._crypto.message_keys import MessageKeys
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._sealed.fetching import discard_headers, fetch_headers, has_remote
from fastrack._sealed.tensor import Proof, SealedTensor
from fastrack.errors import AuthenticationError, GrantError, UnknownKeyError


def open_headers(
    tensors: Sequence[SealedTensor | None], ring: KeyRing, keys: MessageKeys, cacheable: Collection[int] = ()
) -> bool:
    """Derive the key of each message into its row of `keys`, after header and binding were authenticated.

    Headers on servers are downloaded first, all at once, and once more if one is wrong that was kept on this machine.
    Rows of None are left out. The keys of the rows in `cacheable` are kept for the next call, as long as tensor and
    owner's key exist; they are used only if header, context and binding are then the same. Errors are those of
    `SealedTensor.open_header`. Return False if all messages are on this machine.
    """
    is_remote = fetch_headers(tensors)
    try:
        _open_headers(tensors, ring, keys, cacheable)
    except AuthenticationError:
        if not is_remote:
            raise
        discard_headers(tensors)
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
            proof = tensor.proof()
            if cache is not None and row in cacheable:
                if cache.load(tensor, proof, keys, row):
                    if is_restricted:
                        tensor.check_grant(key)
                    continue
                storing.append((cache, tensor, proof, row))
            tensor.check_origin(key)
            rows.append(row)
            headers.append(proof[0])
            contexts.append(proof[1])
        except (AuthenticationError, GrantError, UnknownKeyError) as error:
            tensor.add_path(error)
            raise
    _derive_keys(keys, groups.values(), tensors)
    for cache, owner, proof, row in storing:
        cache.store(owner, proof, keys, row)


def _derive_keys(keys: MessageKeys, groups: Iterable[_Group], tensors: Sequence[SealedTensor | None]) -> None:
    for key, _, _, rows, headers, contexts in groups:
        bad = derive_keys(keys, key.material(), headers, contexts, rows) if rows else None
        if bad is not None:
            tensor = tensors[rows[bad]]
            assert tensor is not None
            mismatch = tensor.context.mismatch()
            tensor.add_path(mismatch)
            raise mismatch


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
    if not has_remote(tensors):
        return False
    authenticate_headers(tensors, ring, cacheable=range(len(tensors)))
    return True
