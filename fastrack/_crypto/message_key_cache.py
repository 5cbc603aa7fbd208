"""Keep the keys of messages that are read again and again, beside the owner's key that they were derived from."""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn
from weakref import ReferenceType, ref

from fastrack._util.fork import register_fork_reset

if TYPE_CHECKING:
    from fastrack._crypto.message_keys import MessageKeys
    from fastrack._crypto.secret_bytes import SecretBytes

LIMIT: Final = 4096
"""The number of message keys that are kept beside a key, of those that were used last."""


class _Kept(NamedTuple):
    message: ReferenceType[object]
    proof: object
    secret: SecretBytes


class MessageKeyCache:
    """The message keys that were derived from one owner's key, each as long as its message and no longer than that key.

    The owner of a message is any object that stands for it. When that object is deleted, when the owner's key is wiped
    or deleted, in a forked child, and when more than `LIMIT` others were used since, the key is overwritten with zeros.
    It is in no pickle. Several threads may use an object.
    """

    __slots__ = ("__weakref__", "_entries", "_is_wiped", "_process")

    def __init__(self) -> None:
        self._is_wiped = False
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Drop all, as they are keys of another process."""
        # There is no lock, as `wipe` may interrupt any of these methods. Each step on the mapping is one of the
        # interpreter's.
        self._entries: OrderedDict[int, _Kept] = OrderedDict()  # that which was used last comes last
        self._process = os.getpid()

    def load(self, message: object, proof: object, keys: MessageKeys, row: int) -> bool:
        """Copy the key of a message to a row, and return whether it was kept with an equal proof."""
        number = id(message)
        kept = self._entries.get(number)
        if kept is None:
            return False
        owner, known, secret = kept
        if owner() is not message or known != proof or self._is_wiped or self._process != os.getpid():
            return False
        try:  # `suppress` would take longer than all of this
            self._entries.move_to_end(number)
        except KeyError:  # it was just dropped
            return False
        keys.put(row, secret)
        # Only now: `wipe` says so before it overwrites a secret, and zeros would be a known key.
        return not self._is_wiped

    def store(self, message: object, proof: object, keys: MessageKeys, row: int) -> None:
        """Keep a copy of the key in a row, with all values that were compared to authenticate it as its proof."""
        if not self._is_usable():
            return
        number = id(message)
        forget = partial(_forget, ref(self), number)
        self._entries[number] = _Kept(ref(message, forget), proof, keys.material(row))
        while len(self._entries) > LIMIT:
            with suppress(KeyError):
                self._entries.popitem(last=False)
        if not self._is_usable():  # it was wiped meanwhile
            self.wipe()

    def wipe(self) -> None:
        """Overwrite all of them with zeros, and keep none from now on."""
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
