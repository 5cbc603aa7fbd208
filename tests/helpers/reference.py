"""Runs of chunks by plain AES-GCM from pyca/cryptography, and nothing of the code under test."""

from __future__ import annotations

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

CHUNK_SIZE, TAG_SIZE = 16384, 16
SEALED_CHUNK_SIZE = CHUNK_SIZE + TAG_SIZE


def nonce_of(base, chunk):
    return (int.from_bytes(base) ^ chunk).to_bytes(12)


def seal(key, base, plain, first=0, *, ends=True):
    """Seal `plain` as chunks from number `first` on; `ends` adds the empty last one where the message needs it."""
    cipher = AESGCM(key)
    starts = range(0, len(plain) + 1 if ends else max(1, len(plain)), CHUNK_SIZE)
    parts = (
        cipher.encrypt(nonce_of(base, first + index), plain[start : start + CHUNK_SIZE], None)
        for index, start in enumerate(starts)
    )
    return b"".join(parts)


def open_each(key, base, sealed, first=0):
    """Open every chunk of a run on its own: its plaintext, or None where the tag is wrong."""
    cipher = AESGCM(key)
    chunks = []
    for index, start in enumerate(range(0, len(sealed), SEALED_CHUNK_SIZE)):
        try:
            chunks.append(
                cipher.decrypt(nonce_of(base, first + index), sealed[start : start + SEALED_CHUNK_SIZE], None)
            )
        except InvalidTag:
            chunks.append(None)
    return chunks


def noise(size, seed=0):
    """Reproducible bytes, none of them zero: zeros are what a refused chunk leaves."""
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8)
