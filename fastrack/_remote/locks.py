"""Locks on bytes of a file: shared by any number of users in any number of processes, or held by one alone."""

from __future__ import annotations

import fcntl
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fastrack._util.fork import register_fork_reset


class Locks:
    """The locks on bytes of one file. There is one object for each file in a process.

    The kernel counts locks by process, and releases those of a process that ends; users within this one are counted
    here. A forked child has none of its parent's locks. With `is_inherited` it takes them too, until it ends.
    """

    def __init__(self, path: Path, *, is_inherited: bool = False) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._is_inherited = is_inherited
        self._users: dict[int, int] = {}
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Take the locks of the parent as well, or forget them."""
        self._mutex = threading.Lock()
        self._released: deque[list[int]] = deque()
        if not self._is_inherited:
            self._users = {}
        for offset in self._users:
            fcntl.lockf(self._file, fcntl.LOCK_SH, 1, offset)

    def share(self, offsets: Iterable[int]) -> Lease:
        """Lock bytes together with others, as long as the object that is returned is alive."""
        lease = Lease(self, self._released)
        with self._mutex:
            if self._released:
                self._drain()
            for offset in offsets:
                users = self._users.get(offset, 0)
                if not users:
                    fcntl.lockf(self._file, fcntl.LOCK_SH, 1, offset)
                self._users[offset] = users + 1
                lease.locked.append(offset)
        self._release_ended()
        return lease

    @contextmanager
    def alone(self, offset: int) -> Iterator[bool]:
        """Lock a byte for the ``with`` block, which gets True, unless it has another user."""
        with self._mutex:
            self._drain()
            is_alone = offset not in self._users and self._try(offset)
            try:
                yield is_alone
            finally:
                if is_alone:
                    fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)
        self._release_ended()

    def _try(self, offset: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
        except OSError:
            return False
        return True

    def release(self, locked: list[int], released: deque[list[int]]) -> None:
        """End a lease, unless it is the parent's. A destructor calls this, at any time and in any thread."""
        if released is self._released:
            released.append(locked)
            self._release_ended()

    def _release_ended(self) -> None:
        while self._released and self._mutex.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._mutex.release()

    def _drain(self) -> None:
        while self._released:
            for offset in self._released.popleft():
                users = self._users[offset] - 1
                if users:
                    self._users[offset] = users
                else:
                    del self._users[offset]
                    fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)


class Lease:
    """Bytes that stay locked as long as this object is alive."""

    __slots__ = ("__weakref__", "_owner", "_released", "locked")

    def __init__(self, owner: Locks, released: deque[list[int]]) -> None:
        self._owner = owner
        self._released = released  # that of another process is another one: asking for its id would take longer
        self.locked: list[int] = []

    def __del__(self) -> None:
        if self.locked:
            self._owner.release(self.locked, self._released)
