"""Derive message keys by HKDF-Expand-SHA-512, as c2sp.org/chunked-encryption specifies, and authenticate headers.

The engine of the process derives the keys of several messages in one call.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Final

from fastrack._crypto.cobblestone import DERIVED_SIZE, MISMATCH, PREFIXES, Bytes, MessageKey
from fastrack._crypto.engine import make_engine, selected_engine
from fastrack.errors import AuthenticationError, FormatError
from fastrack.format import COMMITMENT_SIZE, HEADER_SIZE, NONCE_SIZE, SALT_SIZE

_BATCH: Final = 1024  # messages per call: native code holds the GIL for half a millisecond
_NO_COMMITMENT: Final = bytes(COMMITMENT_SIZE)
_ZEROS: Final = bytes(max(PREFIXES))


def derive_rows(
    secret: Bytes, headers: Sequence[Bytes], contexts: Sequence[Bytes], rows: Sequence[int], target: memoryview
) -> int | None:
    """Derive the keys of messages from the salts in their headers and from their contexts.

    Each row of `target` has `DERIVED_SIZE` bytes and receives the AES key, base nonce and commitment of one message.
    Return the first message whose header holds another commitment, or None.

    `secret` is the owner's key: 16 bytes for Cobblestone-128, 32 bytes for Cobblestone-256. Raise FormatError if it or
    a header has another length, or if the secret is all zeros.
    """
    if len(secret) not in PREFIXES:
        raise FormatError(f"expected a key of 16 or 32 bytes, got {len(secret)}")
    for header in headers:
        if len(header) != HEADER_SIZE:
            raise FormatError(f"expected a header of {HEADER_SIZE} bytes, got {len(header)}: the message was cut short")
    engine, count = make_engine(selected_engine().name, 1), len(rows)
    if count <= _BATCH:
        bad = engine.derive_keys(secret, headers, contexts, rows, target)
    else:
        bad = None
        for start in range(0, count, _BATCH):
            part = slice(start, start + _BATCH)
            bad_in_part = engine.derive_keys(secret, headers[part], contexts[part], rows[part], target)
            if bad is None and bad_in_part is not None:
                bad = start + bad_in_part
    # After the derivation: another thread may have wiped the secret during it.
    if hmac.compare_digest(secret, _ZEROS[: len(secret)]):
        getattr(getattr(secret, "obj", None), "require_in_force", int)()  # raises if it is of a lease, which ended
        raise FormatError(
            "deriving a key failed: expected random bytes, got zeros only, as a wiped key leaves; load it again"
        )
    return bad


def new_header(salt: Bytes) -> bytes:
    """Return a header with a salt and an empty commitment."""
    if len(salt) != SALT_SIZE:
        raise FormatError(f"expected a salt of {SALT_SIZE} bytes, got {len(salt)}")
    return b"".join((salt, _NO_COMMITMENT))


def derive(secret: Bytes, salt: Bytes, context: Bytes) -> MessageKey:
    """Derive a message key and its commitment.

    `salt` has 24 bytes: new and random to seal a message; the first bytes of a message to open it. `context` is the
    data that the message is bound to, of any length. Raise FormatError if the secret or the salt has another length, or
    the secret is all zeros.
    """
    return _derive(secret, new_header(salt), context)[0]


def open_header(header: Bytes, secret: Bytes, context: Bytes) -> MessageKey:
    """Derive the key of a message from its header, its first 56 bytes, and check the commitment in the header.

    `context` is the data that the message was bound to when it was sealed. Raise AuthenticationError if the key or the
    context differs, or the header was altered, before any chunk is decrypted. Raise FormatError if the header or the
    secret has another length.
    """
    message_key, is_authentic = _derive(secret, header, context)
    if not is_authentic:
        message_key.wipe()
        raise AuthenticationError(MISMATCH)
    return message_key


def _derive(secret: Bytes, header: Bytes, context: Bytes) -> tuple[MessageKey, bool]:
    # Every step writes in place: a temporary `bytes` cannot be wiped, and shrinking a bytearray may move it.
    derived = bytearray(DERIVED_SIZE)
    view = memoryview(derived)
    end = len(secret) + NONCE_SIZE
    try:
        bad = derive_rows(secret, (header,), (context,), (0,), view)
        material = bytearray(end)
        memoryview(material)[:] = view[:end]
        return MessageKey(material, bytes(view[end : end + COMMITMENT_SIZE])), bad is None
    finally:
        view[:] = bytes(DERIVED_SIZE)
