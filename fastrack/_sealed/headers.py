"""Authenticate the headers of all messages of a call, and derive their keys, before anything is allocated or moved."""

from __future__ import annotations

import hmac
from collections.abc import Container, Sequence

from fastrack._crypto import cobblestone
from fastrack._crypto.cobblestone import SALT_SIZE
from fastrack._crypto.keyring import KeyRing
from fastrack._crypto.keys import Key
from fastrack._crypto.message_keys import MessageKeys
from fastrack._sealed.fetching import fetch_headers
from fastrack._sealed.tensor import SealedTensor
from fastrack.errors import AuthenticationError, GrantError, UnknownKeyError


def open_headers(
    tensors: Sequence[SealedTensor | None], ring: KeyRing, keys: MessageKeys, again: Container[int] = ()
) -> None:
    """Derive the key of each message into its row of `keys`, after header and binding were authenticated.

    Rows of None are left out. The keys of the rows in `again` are kept for the next call, as long as tensor and owner's
    key exist; they are used only if header, context and binding are then the same. Errors are those of
    `SealedTensor.open_header`.
    """
    found = ring if len(tensors) == 1 else _Found(ring)
    used: dict[str, memoryview] = {}
    try:
        for row, tensor in enumerate(tensors):
            if tensor is None:
                continue
            try:
                key_id = tensor.key_id
                key = found[key_id]
                header = tensor.header
                context = tensor.context
                is_again = row in again
                if is_again and key.kept.load(tensor, (header, context, tensor.binding), keys, row):
                    tensor.check_grant(key)
                    continue
                tensor.check_origin(key)
                secret = used.get(key_id)
                if secret is None:
                    secret = used[key_id] = key.material()
                commitment = keys.derive(row, secret, header[:SALT_SIZE], tensor.encoded_context)
                if not hmac.compare_digest(commitment, header[SALT_SIZE:]):
                    cobblestone.require_secret(secret)
                    raise context.mismatch()
            except (AuthenticationError, GrantError, UnknownKeyError) as error:
                tensor.add_path(error)
                raise
            if is_again:
                cobblestone.require_secret(secret)
                key.kept.store(tensor, (header, context, tensor.binding), keys, row)
    finally:
        if used:
            cobblestone.overwrite_freed()
    for secret in used.values():
        cobblestone.require_secret(secret)


def authenticate_remote(tensors: Sequence[SealedTensor], ring: KeyRing) -> bool:
    """Authenticate the headers of messages, some of which are on servers, before more of these is downloaded.

    Return False, without a look at the headers, if all messages are on this machine.
    """
    fetched = fetch_headers(tensors)
    if fetched is None:
        return False
    keys = MessageKeys(len(tensors))
    try:
        try:
            open_headers(tensors, ring, keys, again=range(len(tensors)))
        except AuthenticationError:
            fetched.fetch_again()  # what was kept on this machine may have been wrong
            open_headers(tensors, ring, keys, again=range(len(tensors)))
    finally:
        keys.wipe()
    return True


def authenticate_headers(tensors: Sequence[SealedTensor], ring: KeyRing) -> None:
    """Authenticate the headers of messages, and so the sizes of tensors, before room is made for these."""
    if not authenticate_remote(tensors, ring):
        keys = MessageKeys(len(tensors))
        try:
            open_headers(tensors, ring, keys)
        finally:
            keys.wipe()


class _Found(dict[str, Key]):
    """The keys of a call by their ids. The ring is asked once for each."""

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    def __missing__(self, key_id: str) -> Key:
        key = self[key_id] = self._ring[key_id]
        return key
