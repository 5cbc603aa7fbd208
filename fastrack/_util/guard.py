"""Count callers inside a closeable object, so that closing can wait for them."""

from __future__ import annotations

import threading

from fastrack._util.fork import register_fork_reset
from fastrack.errors import ClosedError


class CloseGuard:
    """A context manager that callers of a closeable object enter, and that refuses them once it is closed.

    Thread-safe. A caller after `close_and_drain` gets a `ClosedError` with `closed_message`.
    """

    def __init__(self, closed_message: str) -> None:
        self._closed_message = closed_message
        self.is_open = True
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Forget all callers: none of their threads exists in a forked child."""
        self._callers = 0
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)

    def close_and_drain(self) -> bool:
        """Refuse new callers, wait for current ones, and return whether it was open."""
        with self._lock:
            was_open, self.is_open = self.is_open, False
            self._left.wait_for(lambda: not self._callers)
        return was_open

    def __enter__(self) -> None:
        with self._lock:
            if not self.is_open:
                raise ClosedError(self._closed_message)
            self._callers += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._callers -= 1
            if not self.is_open:
                self._left.notify_all()
