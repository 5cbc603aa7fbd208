"""The keys of messages: `MessageKeys` for one call, and `MessageKeyCache` for messages that are read repeatedly."""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, Self
from weakref import ReferenceType, ref

from fastrack._crypto.cobblestone import DERIVED_SIZE, MessageKey
from fastrack._crypto.secret_bytes import SecretBytes
from fastrack._util.fork import register_fork_reset
from fastrack.errors import ClosedError
from fastrack.format import COMMITMENT_SIZE, NONCE_SIZE

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LIMIT: Final = 4096
"""The number of message keys in the cache of a key; the least recently used are dropped."""

_NOTHING: Final = memoryview(b"")
_ROW_SIZE: Final = DERIVED_SIZE  # bytes from one key to the next


class MessageKeys:
    """The secrets of a call's messages, by message number, in one buffer. Deleting the object overwrites the buffer.

    Raise ClosedError if the secrets are used after `wipe`, or in another process than their own.

    Row `i` of `memory` begins with the AES key of message `i`, of `bits[i]` bits, and its base nonce, of 12 bytes. Its
    commitment follows if the key was derived there. Native code reads the rows from `address` on.
    """

    __slots__ = ("_flat", "_is_wiped", "_process", "_view", "bits")

    def __init__(self, count: int) -> None:
        self._flat = array("B", bytes(count * _ROW_SIZE))
        self._view = memoryview(self._flat)
        self._process = os.getpid()
        self._is_wiped = False
        self.bits = [0] * count  # 0 for a row without a key

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
        import numpy as np  # not before: keys are made and kept without it

        return np.frombuffer(self._flat, np.uint8).reshape(-1, _ROW_SIZE)

    def reserve(self, rows: Sequence[int], bits: int) -> memoryview:
        """Set the key size of some rows, and return the memory of all rows to derive the AES keys into."""
        for row in rows:
            self.bits[row] = bits
        return self._view

    def put(self, row: int, material: bytearray) -> None:
        """Copy an AES key and its base nonce into a row."""
        start = row * _ROW_SIZE
        self._view[start : start + len(material)] = material
        self.bits[row] = 8 * (len(material) - NONCE_SIZE)

    def material(self, row: int) -> SecretBytes:
        """Return a copy of an AES key and its base nonce. The caller wipes the copy."""
        self._require_usable(self.bits[row : row + 1])
        start = row * _ROW_SIZE
        return SecretBytes(self._view[start : start + self.bits[row] // 8 + NONCE_SIZE])

    def key(self, row: int) -> MessageKey:
        """Return a copy of the message key in a row. The caller wipes the copy."""
        return MessageKey(self.material(row))

    def commitment(self, row: int) -> bytes:
        """Return the commitment that was derived with the key in a row. It is public."""
        self._require_usable(self.bits[row : row + 1])
        start = row * _ROW_SIZE + self.bits[row] // 8 + NONCE_SIZE
        return bytes(self._view[start : start + COMMITMENT_SIZE])

    def wipe(self) -> None:
        """Overwrite all keys with zeros."""
        self._is_wiped = True
        if self._view:  # empty after an earlier `wipe`, and no key can be written without it
            self._view[:] = bytes(len(self._view))
            self._view = _NOTHING

    def _require_usable(self, bits: Sequence[int]) -> None:
        # Zeros would be known keys, and a forked process may seal other data under the same keys.
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


def check_rows(rows: Sequence[int], target: memoryview) -> None:
    """Raise ValueError unless the target is writable and has all rows of derived keys.

    Native code relies on this check.
    """
    if rows and not (min(rows) >= 0 and (max(rows) + 1) * DERIVED_SIZE <= target.nbytes and not target.readonly):
        raise ValueError(
            f"expected rows in {target.nbytes} bytes that can be written to, got rows {min(rows)} to {max(rows)}"
        )


class _Kept(NamedTuple):
    message: ReferenceType[object]
    proof: object
    secret: SecretBytes


class MessageKeyCache:
    """A cache of the message keys derived from one owner's key.

    Any object may stand for a message. A message key is overwritten with zeros when the object of its message is
    deleted, when the owner's key is wiped or deleted, in a forked child, and when more than `LIMIT` other keys were
    used since. The cache cannot be pickled. Several threads may use it.
    """

    __slots__ = ("__weakref__", "_entries", "_is_wiped", "_process")

    def __init__(self) -> None:
        self._is_wiped = False
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Drop all keys, which belong to the parent process."""
        # No lock: `wipe` may interrupt any of these methods. Each step on the mapping is atomic in the
        # interpreter.
        self._entries: OrderedDict[int, _Kept] = OrderedDict()  # the most recently used comes last
        self._process = os.getpid()

    def load(self, message: object, proof: object, keys: MessageKeys, row: int) -> bool:
        """Copy the key of a message to a row, and return whether the cache had it with an equal proof."""
        number = id(message)  # which a later object may have, so the owner is compared below
        kept = self._entries.get(number)
        if kept is None:
            return False
        owner, known, secret = kept
        if owner() is not message or known != proof or self._is_wiped or self._process != os.getpid():
            return False
        try:  # `suppress` would take longer than the whole method
            self._entries.move_to_end(number)
        except KeyError:  # another thread just dropped it
            return False
        keys.put(row, secret)
        # Checked last: `wipe` sets the flag before it overwrites a secret, and zeros would be a known key.
        return not self._is_wiped

    def store(self, message: object, proof: object, keys: MessageKeys, row: int) -> None:
        """Keep a copy of the key in a row. `proof` holds all values that were compared to authenticate it."""
        if not self._is_usable():
            return
        number = id(message)
        forget = partial(_forget, ref(self), number)
        self._entries[number] = _Kept(ref(message, forget), proof, keys.material(row))
        while len(self._entries) > LIMIT:
            with suppress(KeyError):
                self._entries.popitem(last=False)
        if not self._is_usable():  # another thread wiped the cache
            self.wipe()

    def wipe(self) -> None:
        """Overwrite all keys with zeros, and keep none from now on."""
        self._is_wiped = True
        while self._entries:
            with suppress(KeyError):
                self._entries.popitem()[1].secret.wipe()

    def _is_usable(self) -> bool:
        return not self._is_wiped and self._process == os.getpid()

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> NoReturn:
        raise TypeError("kept message keys cannot be pickled: derive the keys there again")


def _forget(owner: ReferenceType[MessageKeyCache], number: int, _: object) -> None:
    kept = owner()
    if kept is not None:
        kept._entries.pop(number, None)  # noqa: SLF001 - its own
