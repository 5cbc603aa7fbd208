"""Keys for transfers: one for each, from a secret that never leaves this process."""

from __future__ import annotations

import os
import threading
from typing import NoReturn

from fastrack._crypto import cobblestone
from fastrack._crypto.cobblestone import MessageKey
from fastrack._util.fork import register_fork_reset
from fastrack.errors import ClosedError

_CONTEXT = b"fastrack/transfer@1\0"
_FRESH = 16  # random bytes of each salt; the others are a counter


class Session:
    """A random secret and a counter. No two transfers get the same key, and neither survives a fork or a pickle.

    Every salt has fresh random bytes as well, so that copies of a process that Python knows nothing of, such as virtual
    machines that were started from one snapshot, get different keys too.

    Parameters
    ----------
    bits : {256, 128}
        The size of the AES keys.
    """

    def __init__(self, bits: int = 256) -> None:
        self._bits = bits
        self._secret: bytearray | None = bytearray(os.urandom(bits // 8))
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Start over with a fresh secret, unless the session was wiped."""
        self._lock = threading.Lock()
        self._replace()

    def _replace(self) -> None:
        self._owner = os.getpid()
        self._counter = 0
        if self._secret is not None:
            self._secret[:] = os.urandom(len(self._secret))

    def next_key(self) -> MessageKey:
        """Derive the message key of one transfer, in raw mode: the salt is the counter and fresh random bytes.

        Raises
        ------
        ClosedError
            If the session was wiped.
        """
        with self._lock:
            if self._owner != os.getpid():  # a fork that Python was not told of
                self._replace()
            if self._secret is None:
                raise ClosedError("this session was wiped; open another channel")
            self._counter += 1
            salt = self._counter.to_bytes(cobblestone.SALT_SIZE - _FRESH, "big") + os.urandom(_FRESH)
            return cobblestone.derive(self._secret, salt, _CONTEXT)

    def wipe(self) -> None:
        """Overwrite the secret: no more keys."""
        with self._lock:
            if self._secret is not None:
                self._secret[:] = bytes(len(self._secret))
            self._secret = None

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.wipe()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a session's secret stays in its process; open a channel where it is needed")
