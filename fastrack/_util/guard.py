"""Who is inside a thing that can be closed."""

from __future__ import annotations

import threading

from fastrack._util.fork import register_fork_reset
from fastrack.errors import ClosedError


class CloseGuard:
    """Enter with a ``with`` statement, as long as it is not shut. May be shared by threads.

    Parameters
    ----------
    refusal : str
        What whoever comes too late is told.
    """

    def __init__(self, closed_message: str) -> None:
        self._refusal = closed_message
        self.is_open = True
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Forget who is inside: a forked child lost them."""
        self._inside = 0
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)

    def close_and_drain(self) -> bool:
        """Let nobody in any more, and wait until all have left. Whether it was open."""
        with self._lock:
            was_open, self.is_open = self.is_open, False
            self._left.wait_for(lambda: not self._inside)
        return was_open

    def __enter__(self) -> None:
        with self._lock:
            if not self.is_open:
                raise ClosedError(self._refusal)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self.is_open:
                self._left.notify_all()
