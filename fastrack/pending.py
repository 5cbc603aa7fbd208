"""Transfers that nobody waited for yet, and what went wrong with them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from fastrack.devices import Work
from fastrack.errors import DeviceError, FastrackError
from fastrack.forks import renew_after_fork
from fastrack.sealed import bad_chunk

__all__ = ["Pending"]

_OUTCOME = "its place in the array that was returned holds zeros"


class Pending:
    """Work that has ended and may not be done. Failures are kept until somebody waits. May be shared by threads.

    A forked child starts with none: the work goes on in its parent.
    """

    def __init__(self) -> None:
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        """Forget everything."""
        self._lock = threading.Lock()
        self._started: list[_Started] = []
        self._failures: list[FastrackError] = []

    def add(self, work: Work, name: str | None) -> None:
        """Remember the work that opens the tensor of that name."""
        self._started.append(_Started(work, name))

    def prune(self) -> None:
        """Let go of the work that is done. Waits for nothing."""
        if not self._started or not self._lock.acquire(blocking=False):  # whoever has it lets go of that work
            return
        try:
            for one in [one for one in self._started if one.work.done()]:
                self._judge(one)
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Wait for all the work that was added before.

        Raises
        ------
        AuthenticationError, DeviceError
            The first failure, with a note if there were others. All are forgotten then.
        """
        if not self._started and not self._failures:
            return
        with self._lock:
            for one in self._started.copy():
                self._judge(one)
            failures, self._failures = self._failures, []
        if failures:
            first, *others = failures
            if others:
                first.add_note(f"{len(others)} more of the transfers that were not waited for failed")
            raise first

    def _judge(self, one: _Started) -> None:
        try:
            bad = one.work.verdict()
        except DeviceError as error:
            self._failures.append(error.with_traceback(None))  # whose frames would keep the work
        else:
            if bad is not None:
                self._failures.append(bad_chunk(one.name, bad, _OUTCOME))
        self._started.remove(one)  # last: while it is there, others who wait do not pass by


@dataclass(frozen=True, slots=True, eq=False)
class _Started:
    work: Work
    name: str | None
