"""The keys of several messages in one buffer, which one call derives, hands to native code, and wipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn, Self

import numpy as np

from fastrack._crypto.base import Bytes, address
from fastrack._crypto.cobblestone import NONCE_SIZE, MessageKey

ROW_SIZE: Final = 80  # bytes from one key to the next: a 256-bit key, a nonce and a commitment are 76


class MessageKeys:
    """The secrets of messages, by their number. They are overwritten when the object is deleted.

    Row `i` of `memory` begins with the AES key of message `i`, of `bits[i]` bits, and its base nonce, of 12 bytes. What
    follows in the row has no meaning. Native code reads the rows at `address`.
    """

    __slots__ = ("_flat", "address", "bits", "memory")

    def __init__(self, count: int) -> None:
        self._flat: Bytes = np.zeros(count * ROW_SIZE, np.uint8)
        self.memory: Bytes = self._flat.reshape(count, ROW_SIZE)
        self.address = address(self._flat)
        self.bits = [256] * count

    @classmethod
    def of(cls, keys: Sequence[MessageKey]) -> Self:
        """Return a copy of message keys."""
        copy = cls(len(keys))
        for row, key in enumerate(keys):
            copy.put(row, key)
        return copy

    def put(self, row: int, key: MessageKey) -> None:
        """Copy a message key into a row."""
        material = key.material
        self.memory[row, : len(material)] = np.frombuffer(material, np.uint8)
        self.bits[row] = 8 * (len(material) - NONCE_SIZE)

    def key(self, row: int) -> MessageKey:
        """Return a copy of one of them, which has to be wiped too."""
        size = self.bits[row] // 8
        view = self.memory[row].data
        return MessageKey.raw(view[:size], view[size : size + NONCE_SIZE])

    def wipe(self) -> None:
        """Overwrite all of them with zeros."""
        self._flat.fill(0)

    def __len__(self) -> int:
        return len(self.bits)

    def __del__(self) -> None:
        if hasattr(self, "_flat"):
            self.wipe()

    def __reduce__(self) -> NoReturn:
        raise TypeError("message keys cannot be pickled: send the messages and derive the keys there again")

    def __repr__(self) -> str:
        return f"<MessageKeys of {len(self)} messages>"
