"""Seal messages: sections "The message", "Keys" and "Context" of the page."""

import json

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

CHUNK = 16384
HEADER = 56
TAG = 16


def expand(key: bytes, info: bytes, size: int) -> bytes:
    """Return HKDF-Expand-SHA-512."""
    return HKDFExpand(SHA512(), size, info).derive(key)


def key_id(key: bytes) -> str:
    """Return the id of an owner's key."""
    return expand(key, b"fastrack/key-id@1\0" + bytes([len(key)]), 16).hex()


def derive(key: bytes, salt: bytes, context: bytes) -> tuple[bytes, bytes, bytes]:
    """Return message key, base nonce and commitment."""
    name = {16: b"AEAD_AES_128_GCM", 32: b"AEAD_AES_256_GCM"}[len(key)]
    text = expand(key, b"c2sp.org/chunked-encryption@v1+" + name + b"\0" + salt + context, len(key) + 12 + 32)
    return text[: len(key)], text[len(key) : len(key) + 12], text[len(key) + 12 :]


def seal(key: bytes, salt: bytes, context: bytes, plaintext: bytes) -> bytes:
    """Return a message."""
    message_key, base, commitment = derive(key, salt, context)
    cipher = AESGCM(message_key)
    chunks = [plaintext[at : at + CHUNK] for at in range(0, len(plaintext) + 1, CHUNK)]
    sealed = (cipher.encrypt(nonce(base, number), chunk, None) for number, chunk in enumerate(chunks))
    return salt + commitment + b"".join(sealed)


def nonce(base: bytes, number: int) -> bytes:
    """Return the nonce of a chunk."""
    return (int.from_bytes(base, "big") ^ number).to_bytes(12, "big")


def message_size(plaintext: int) -> int:
    """Return the size of a message for that many bytes of plaintext."""
    return HEADER + plaintext + TAG * (plaintext // CHUNK + 1)


def context_of(purpose: str, members: dict[str, object]) -> bytes:
    """Return the context of a tensor: purpose, zero byte, JSON in UTF-8."""
    text = json.dumps(members, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return purpose.encode() + b"\0" + text.encode()


def binding(key: bytes, salt: bytes, holder: str, context: bytes) -> bytes:
    """Return salt and commitment that bind a moved message to the file that holds it."""
    bound = b"fastrack/binding@1\0" + holder.encode() + b"\0" + context
    return salt + derive(key, salt, bound)[2]
