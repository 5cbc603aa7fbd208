"""What all works and slots of a CUDA device share: its streams, and the one thread that puts things on them."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from fastrack.devices.driver import Driver
from fastrack.errors import ClosedError, DeviceError
from fastrack.forks import renew_after_fork

__all__ = ["Pipeline"]

Job = Callable[[], None]


class Pipeline:
    """A driver, its streams and its copy thread.

    In confidential mode an asynchronous copy blocks the thread that asks for it, until all that was put on its stream
    before is done. So one thread asks for them all, and nobody else is held up. Nothing relies on streams that run side
    by side.

    Attributes
    ----------
    forked : bool
        Whether this is a copy in a forked child. The driver must not be touched there, not even to free what it gave.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.uploads = driver.stream(urgent=True)
        self.downloads = driver.stream(urgent=True)
        self.kernels = driver.stream(urgent=False)
        self.forked = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._broken: BaseException | None = None
        renew_after_fork(self)
        weakref.finalize(self, self._jobs.put, None)  # a pipeline that is dropped unclosed leaves no thread behind

    def renew(self) -> None:
        """Find oneself in a forked child."""
        self.forked = True

    def require_usable(self) -> None:
        """Raise what says why nothing can be done here, if so."""
        name = self.driver.name
        if self.forked:
            raise DeviceError(
                f"{name} was opened before this process was forked, and CUDA does not survive a fork: start workers "
                "by the 'spawn' or 'forkserver' method, or open the channel in the child only"
            )
        if self._closed:
            raise ClosedError(f"{name} was closed; open another channel")
        if self._broken is not None:
            message = f"{name} failed and does not answer any more: {self._broken}; start the process again"
            raise DeviceError(message) from self._broken

    def submit(self, job: Job) -> None:
        """Have the copy thread call `job`, after those it was given before. A job raises nothing."""
        self.require_usable()  # in a forked child, before a lock that a lost thread may hold
        with self._lock:
            self.require_usable()
            if self._thread is None:
                name = f"fastrack {self.driver.name}"
                thread = threading.Thread(target=_serve, args=(self._jobs, self.driver), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise DeviceError(f"{name} has no thread to copy with: {error}; end some others") from error
                self._thread = thread
            self._jobs.put(job)

    def submit_after_all(self, job: Job) -> None:
        """Have the copy thread call `job`, after an interrupt that hides whether it was given another before."""
        self._jobs.put(job)

    def settle(self) -> None:
        """Wait, after something failed, until nothing is under way, so that all that was in use is free.

        If that fails too, nothing is known of the device any more, and it is given up.
        """
        try:
            for stream in (self.uploads, self.kernels, self.downloads):
                event = self.driver.event()
                self.driver.record(event, stream)
                self.driver.synchronize(event)
        except Exception as error:  # noqa: BLE001 - whatever it was, the device is in no known state
            self._broken = error

    def close(self) -> bool:
        """End the copy thread when it has done what it was given. Says whether this was the first time."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        return True


def _serve(jobs: queue.SimpleQueue[Job | None], driver: Driver) -> None:
    with suppress(Exception):  # every call makes sure of the device anyway
        driver.adopt()
    while (job := jobs.get()) is not None:
        # One that raises after all has told whoever waits for it, and no verdict means a bad one.
        with suppress(Exception):
            job()
        del job  # it holds a slot and an array, and the next one may be long in coming
