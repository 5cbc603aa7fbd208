"""Derive one key for each transfer, from a secret that never leaves this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import NoReturn

from fastrack._crypto import derivation
from fastrack._crypto.cobblestone import MessageKey
from fastrack._crypto.message_keys import MessageKeys
from fastrack._crypto.secret_bytes import SecretBytes
from fastrack._util.fork import per_process, register_fork_reset
from fastrack.errors import ClosedError
from fastrack.format import SALT_SIZE

_CONTEXT = b"fastrack/transfer@1\0"
_RANDOM_SIZE = 16  # random bytes of each salt; the rest is a counter


class Session:
    """A random secret and a counter. No two transfers get the same key, and neither survives a fork or a pickle.

    Every salt contains random bytes as well, so that copies of a process that Python cannot detect, such as virtual
    machines started from one snapshot, get different keys too. `bits` is the size of the AES keys, 256 or 128.
    """

    def __init__(self, bits: int = 256) -> None:
        self._lock = per_process(self, "_lock", threading.Lock)
        self._secret: SecretBytes | None = SecretBytes(bits // 8)
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Start over with a new secret, unless the session was wiped."""
        self._owner = os.getpid()
        self._counter = 0  # may begin again, as the secret is new: no key of before comes back
        if self._secret is not None:
            self._secret[:] = os.urandom(len(self._secret))

    def next_key(self) -> MessageKey:
        """Derive the raw-mode message key of one transfer. The salt is the counter and new random bytes.

        Raise ClosedError if the session was wiped.
        """
        with self._lock:
            secret = self._require_secret()
            return derivation.derive(secret, self._next_count() + os.urandom(_RANDOM_SIZE), _CONTEXT)

    def next_keys(self, keys: MessageKeys, rows: Sequence[int]) -> None:
        """Derive the message keys of several transfers into rows of `keys`, one new salt per key."""
        with self._lock:
            secret = self._require_secret()
            random = os.urandom(_RANDOM_SIZE * len(rows))
            salts = (
                self._next_count() + random[start : start + _RANDOM_SIZE]
                for start in range(0, len(random), _RANDOM_SIZE)
            )
            headers, memory = list(map(derivation.new_header, salts)), keys.reserve(rows, 8 * len(secret))
            derivation.derive_rows(secret, headers, [_CONTEXT] * len(rows), rows, memory)

    def _require_secret(self) -> SecretBytes:
        if self._owner != os.getpid():  # a fork that Python did not detect
            self.reset_after_fork()
        if self._secret is None:
            raise ClosedError("expected an open session, got a wiped one; open another channel")
        return self._secret

    def _next_count(self) -> bytes:
        self._counter += 1
        return self._counter.to_bytes(SALT_SIZE - _RANDOM_SIZE, "big")

    def wipe(self) -> None:
        """Overwrite the secret with zeros. `next_key` raises ClosedError afterwards."""
        with self._lock:
            if self._secret is not None:
                self._secret.wipe()
            self._secret = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a session stays in its process and cannot be pickled; open a channel where it is needed")
