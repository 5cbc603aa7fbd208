"""The keys of several messages in one buffer, which one call derives, hands to native code, and wipes."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import Final, NoReturn, Self

import numpy as np
import numpy.typing as npt

from fastrack._crypto.cobblestone import DERIVED_SIZE, MessageKey
from fastrack._crypto.secret_bytes import SecretBytes
from fastrack.errors import ClosedError
from fastrack.format import NONCE_SIZE

_NOTHING: Final = memoryview(b"")
_ROW_SIZE: Final = DERIVED_SIZE  # bytes from one key to the next


class MessageKeys:
    """The secrets of messages, by their number. They are overwritten when the object is deleted.

    They are used in the process that they were made in, and not after `wipe`: ClosedError is raised then.

    Row `i` of `memory` begins with the AES key of message `i`, of `bits[i]` bits, and its base nonce, of 12 bytes. What
    follows in the row has no meaning. Native code reads the rows from `address` on.
    """

    __slots__ = ("_flat", "_is_wiped", "_process", "_view", "bits")

    def __init__(self, count: int) -> None:
        self._flat = array("B", bytes(count * _ROW_SIZE))
        self._view = memoryview(self._flat)
        self._process = os.getpid()
        self._is_wiped = False
        self.bits = [0] * count  # of rows without a key

    @classmethod
    def of(cls, keys: Sequence[MessageKey]) -> Self:
        """Return a copy of message keys."""
        copy = cls(len(keys))
        for row, key in enumerate(keys):
            copy.put(row, key.material)
        return copy

    @property
    def address(self) -> int:
        """The address of the first row."""
        self._require_usable(self.bits)
        return self._flat.buffer_info()[0]

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The rows, as uint8 (n, 80)."""
        self._require_usable(self.bits)
        return np.frombuffer(self._flat, np.uint8).reshape(-1, _ROW_SIZE)

    def reserve(self, rows: Sequence[int], bits: int) -> memoryview:
        """Return the memory of all rows, into some of which AES keys of so many bits are to be derived."""
        for row in rows:
            self.bits[row] = bits
        return self._view

    def put(self, row: int, material: bytearray) -> None:
        """Copy an AES key and its base nonce into a row."""
        start = row * _ROW_SIZE
        self._view[start : start + len(material)] = material
        self.bits[row] = 8 * (len(material) - NONCE_SIZE)

    def material(self, row: int) -> SecretBytes:
        """Return a copy of an AES key and its base nonce, which has to be wiped too."""
        self._require_usable(self.bits[row : row + 1])
        start = row * _ROW_SIZE
        return SecretBytes(self._view[start : start + self.bits[row] // 8 + NONCE_SIZE])

    def key(self, row: int) -> MessageKey:
        """Return a copy of one of them, which has to be wiped too."""
        return MessageKey(self.material(row))

    def wipe(self) -> None:
        """Overwrite all of them with zeros."""
        self._is_wiped = True
        if self._view:  # else it was done, and nothing was written since, as that takes the view
            self._view[:] = bytes(len(self._view))
            self._view = _NOTHING

    def _require_usable(self, bits: Sequence[int]) -> None:
        # Zeros would be known keys, and the other process may seal something else under the same keys.
        if self._is_wiped or self._process != os.getpid():
            raise ClosedError("expected message keys of this process, got wiped ones or another's; derive new ones")
        if 0 in bits:
            raise ClosedError("expected a key of each message, got a row without one; derive all of them first")

    def __len__(self) -> int:
        return len(self.bits)

    def __del__(self) -> None:
        if getattr(self, "_view", None):
            self.wipe()

    def __reduce__(self) -> NoReturn:
        raise TypeError("message keys cannot be pickled: send the messages and derive the keys there again")

    def __repr__(self) -> str:
        return f"<MessageKeys of {len(self)} messages>"
