"""Sealed tensors that somebody altered."""

from __future__ import annotations

import numpy as np

from fastrack.sealed import SealedTensor


def tampered(sealed, *places):
    """The same sealed tensor with one bit of its message flipped at each of these bytes."""
    message = np.frombuffer(bytes(sealed.message), np.uint8).copy()
    for place in places:
        message[place] ^= 1
    return SealedTensor(sealed.claim, message, sealed.key_id)
