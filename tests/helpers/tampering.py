"""Sealed tensors that somebody altered."""

from __future__ import annotations

import numpy as np

import fastrack
from fastrack.sealed import SealedTensor


def tampered(sealed, *places):
    """The same sealed tensor with one bit of its message flipped at each of these bytes."""
    message = np.frombuffer(bytes(sealed.message), np.uint8).copy()
    for place in places:
        message[place] ^= 1
    return SealedTensor(sealed.claim, message, sealed.key_id)


def tamper_file(path, name, *places):
    """Flip one bit of that tensor's message in a sealed file, at each of these bytes."""
    with fastrack.load_file(path) as file:
        message = bytes(file[name].message)
    data = bytearray(path.read_bytes())
    start = data.index(message)
    for place in places:
        data[start + place] ^= 1
    path.write_bytes(data)
