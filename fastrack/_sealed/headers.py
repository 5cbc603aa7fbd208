"""Authenticate the headers of all messages of a call, and derive their keys, before anything is allocated or moved."""

from __future__ import annotations

from collections.abc import Container, Sequence

from fastrack._crypto.derivation import derive_keys
from fastrack._crypto.message_key_cache import MessageKeyCache
from fastrack._crypto.message_keys import MessageKeys
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._sealed.contexts import Binding, MessageContext
from fastrack._sealed.fetching import discard_headers, fetch_headers, has_remote
from fastrack._sealed.tensor import SealedTensor
from fastrack.errors import AuthenticationError, GrantError, UnknownKeyError

_Proof = tuple[bytes, MessageContext, Binding | None]  # all values that authenticate a key


def open_headers(
    tensors: Sequence[SealedTensor | None], ring: KeyRing, keys: MessageKeys, cacheable: Container[int] = ()
) -> None:
    """Derive the key of each message into its row of `keys`, after header and binding were authenticated.

    Headers on servers are downloaded first, all at once, and once more if one is wrong that was kept on this machine.
    Rows of None are left out. The keys of the rows in `cacheable` are kept for the next call, as long as tensor and
    owner's key exist; they are used only if header, context and binding are then the same. Errors are those of
    `SealedTensor.open_header`.
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


def _open_headers(
    tensors: Sequence[SealedTensor | None], ring: KeyRing, keys: MessageKeys, cacheable: Container[int]
) -> None:
    found = ring if len(tensors) == 1 else _Found(ring)
    waiting: dict[str, tuple[Key, list[int], list[bytes], list[bytes]]] = {}
    storing: list[tuple[MessageKeyCache, SealedTensor, _Proof, int]] = []
    for row, tensor in enumerate(tensors):
        if tensor is None:
            continue
        try:
            key_id = tensor.key_id
            key = found[key_id]
            header = tensor.header
            if row in cacheable:
                kept, proof = key.message_keys, (header, tensor.context, tensor.binding)
                if kept.load(tensor, proof, keys, row):
                    tensor.check_grant(key)
                    continue
                storing.append((kept, tensor, proof, row))
            tensor.check_origin(key)
            group = waiting.get(key_id)
            if group is None:
                group = waiting[key_id] = key, [], [], []
            _, rows, headers, contexts = group
            rows.append(row)
            headers.append(header)
            contexts.append(tensor.encoded_context)
        except (AuthenticationError, GrantError, UnknownKeyError) as error:
            tensor.add_path(error)
            raise
    for key, rows, headers, contexts in waiting.values():
        bad = derive_keys(keys, key.material(), headers, contexts, rows)
        if bad is not None:
            tensor = tensors[rows[bad]]
            assert tensor is not None
            mismatch = tensor.context.mismatch()
            tensor.add_path(mismatch)
            raise mismatch
    for kept, owner, proof, row in storing:
        kept.store(owner, proof, keys, row)


def authenticate_headers(tensors: Sequence[SealedTensor], ring: KeyRing, cacheable: Container[int] = ()) -> None:
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


class _Found(dict[str, Key]):
    """The keys of a call by their ids. The ring is asked once for each."""

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    def __missing__(self, key_id: str) -> Key:
        key = self[key_id] = self._ring[key_id]
        return key
