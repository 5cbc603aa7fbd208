"""Owners of operations. They raise the failures of operations that no call waited for."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fastrack._devices.base import NO_VERDICT, DeviceOperation
from fastrack._sealed.messages import bad_chunk
from fastrack._util.fork import report
from fastrack._util.locations import Location
from fastrack.errors import FastrackError

Name = tuple[str | None, Location | None]  # of a tensor, and of its file; None for a plain tensor
_OUTCOME = "its part of the array that was returned holds zeros"
_UNKNOWN_OUTCOME = "the arrays that were returned by that call may hold anything"
_EXIT_TIMEOUT = 5  # seconds that the end of the process waits for operations
_ADVICE = "Call synchronize() in the thread that starts transfers before it ends, or leave non_blocking=True away"


class Owners:
    """The owners of one channel's operations: each thread, and each group. Thread-safe.

    A failure is raised once, to its owner only. A failure that cannot be raised any more, because the owner's
    thread ended, another thread closed the channel, or the channel or the process ended, is reported as a
    `ResourceWarning` and to the logger "fastrack". A forked child starts without owners: the operations go on in its
    parent.
    """

    def __init__(self) -> None:
        self._owners: list[Owner] = []
        self.reset_after_fork()
        weakref.finalize(self, _give_up, self._owners).atexit = False  # `_give_up_at_exit` waits first
        _all_owners.add(self)

    def reset_after_fork(self) -> None:
        """Forget all owners."""
        for owner in self._owners:  # a group's may be used on
            owner.reset_after_fork()
        self._owners.clear()
        self._sweeping = threading.Lock()
        self._local = threading.local()

    def current(self) -> Owner:
        """Return the owner of operations that the calling thread starts outside of groups."""
        self._sweep()
        caller: _Caller | None = getattr(self._local, "caller", None)
        if caller is None:
            caller = self._local.caller = _Caller()
            caller.owner = Owner(f"thread {threading.current_thread().name!r}", weakref.ref(caller))
            self._owners.append(caller.owner)
        return caller.owner

    def open_group(self) -> Owner:
        """Return a new owner, which is kept until `close_group`."""
        owner = Owner("a group of transfers", lambda: True)  # never gone: its block ends it
        self._owners.append(owner)
        return owner

    def close_group(self, owner: Owner) -> None:
        """Drop an owner whose failures were taken."""
        if owner in self._owners:  # closing the channel drops all of them
            self._owners.remove(owner)

    def close(self) -> None:
        """Wait for all operations. Report the failures of other owners, and raise the failures of this thread."""
        current, others = self.current(), self._owners.copy()
        for owner in others:
            owner.drain()
        others.remove(current)
        for owner in others:
            owner.report()
        self._owners.clear()
        _raise(current.take())

    def give_up(self, timeout: float) -> None:
        """Report the failures of all owners, after waiting up to `timeout` seconds for their operations."""
        _give_up(self._owners, timeout)

    def _sweep(self) -> None:
        """Drop owners whose thread has ended, when the last of their operations is done, and report their failures."""
        if not self._sweeping.acquire(blocking=False):  # another thread is sweeping
            return
        try:
            for owner in [owner for owner in self._owners if owner.is_gone]:
                is_idle = owner.poll()
                owner.report()
                if is_idle:
                    self._owners.remove(owner)
        finally:
            self._sweeping.release()


class Owner:
    """The operations that one caller started, and their failures. `caller` returns None once the caller has ended.

    Few operations are kept: the owner's next call drops the finished ones and raises their failures, and the
    channel's staging buffers bound the number of unfinished ones.
    """

    def __init__(self, name: str, caller: Callable[[], object]) -> None:
        self._name = name
        self._caller = caller
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Leave all operations to the parent."""
        self._lock = threading.RLock()  # a daemon thread may still use the owner while the process ends
        self._started: list[_Started] = []
        self._failures: list[FastrackError] = []

    @property
    def is_gone(self) -> bool:
        return self._caller() is None

    def add(self, operation: DeviceOperation, names: Sequence[Name]) -> None:
        """Add an operation that opens messages, with the name and path of each."""
        self._started.append(_Started(operation, names))

    def poll(self) -> bool:
        """Collect the results of operations that are done, without waiting, and return whether none is left."""
        if self._lock.acquire(blocking=False):  # else another thread collects them
            try:
                for started in [started for started in self._started if started.operation.done()]:
                    self._collect_results(started)
            finally:
                self._lock.release()
        return not self._started

    def drain(self) -> None:
        """Wait for all operations, and collect their results."""
        with self._lock:
            for last in self._started[-1:]:  # it ends last as a rule, and one download then brings all verdicts
                with suppress(FastrackError):  # which is raised again
                    last.operation.result()
            for started in self._started.copy():
                self._collect_results(started)

    def take(self) -> list[FastrackError]:
        """Return the known failures, and forget them."""
        with self._lock:
            failures, self._failures = self._failures, []
        return failures

    def check(self) -> None:
        """Raise the known failures, without waiting."""
        self.poll()
        _raise(self.take())

    def wait(self) -> None:
        """Wait for all operations, and raise their failures."""
        self.drain()
        _raise(self.take())

    def report(self) -> None:
        """Report the known failures, which no call is left to raise."""
        for failure in self.take():
            report(f"a transfer of {self._name} failed, and no call was left to raise it: {failure}. {_ADVICE}")

    def give_up(self) -> None:
        """Report the known failures, and the unfinished operations."""
        self.report()
        unfinished, self._started = self._started, []
        for started in unfinished:
            name, path = started.names[0]
            prefix = "" if path is None else f"{path}: "
            more = f" and {len(started.names) - 1} more are" if len(started.names) > 1 else " is"
            report(
                f"a transfer of {self._name} may fail, and no call was left to raise it: {prefix}tensor "
                f"{name!r:.200}{more} on its way. {_ADVICE}"
            )

    def _collect_results(self, one: _Started) -> None:
        failure: FastrackError | None = None
        try:
            bad = one.operation.result()
            if bad is not None:
                name, path = one.names[bad.message]
                outcome = _UNKNOWN_OUTCOME if bad.chunk == NO_VERDICT else _OUTCOME
                failure = bad_chunk(name, bad.chunk, outcome, path=path)
        except FastrackError as error:
            failure = error.with_traceback(None)  # the frames would keep the operation alive
        if one in self._started:  # else a signal handler has collected it
            if failure is not None:
                self._failures.append(failure)
            self._started.remove(one)  # last, so that an interrupt loses no failure


@dataclass(frozen=True, slots=True, eq=False)
class _Started:
    operation: DeviceOperation
    names: Sequence[Name]  # of its messages, at least one


class _Caller:
    """An object that lives as long as a thread, whose `threading.local` has the only reference."""

    owner: Owner


def _raise(failures: list[FastrackError]) -> None:
    """Raise the first failure, with a note for each of the others, if there are any."""
    if failures:
        first, *others = failures
        add_notes(first, others)
        raise first


def add_notes(error: BaseException, failures: list[FastrackError]) -> None:
    """Add a note to an error for each failure that is raised with it."""
    for failure in failures:
        error.add_note(f"Another transfer failed as well: {failure}")


def _give_up(owners: list[Owner], timeout: float = 0) -> None:
    deadline = time.monotonic() + timeout
    for owner in owners:
        while not owner.poll() and time.monotonic() < deadline:
            time.sleep(0.001)
        owner.give_up()


_all_owners: weakref.WeakSet[Owners] = weakref.WeakSet()


@atexit.register
def _give_up_at_exit() -> None:
    for owners in list(_all_owners):
        owners.give_up(_EXIT_TIMEOUT)
