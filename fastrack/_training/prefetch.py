"""Sources of the batches of one iteration: `Source`, and `PrefetchThread`, which fetches them in advance."""

from __future__ import annotations

import atexit
import copy
import functools
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

from fastrack._devices.side_stream import SideStream
from fastrack._keys.keyring import KeyRing
from fastrack._sealed.fetching import prefetch
from fastrack._sealed.headers import authenticate_remote
from fastrack._sealed.tensor import SealedTensor
from fastrack._transfer.api import to_device
from fastrack._transfer.inputs import wanted_of
from fastrack._util.fork import register_fork_reset
from fastrack.errors import ClosedError, FastrackError

_EXIT_TIMEOUT = 5  # seconds that the exit of the process waits for prefetch threads
_AHEAD = 64  # batches with parts on servers that are taken from the loader before they are opened
_AHEAD_BYTES = 128 << 20  # of downloads for them that began
_END = object()


class Source:
    """The batches of one iteration, each fetched and moved on request.

    The lock is that of the loader, and held while it is used: once it is acquired, an iteration that was stopped uses
    the loader no more.
    """

    def __init__(self, loader: Any, lock: threading.Lock, device: str, keys: KeyRing, *, ahead: bool) -> None:
        self._loader = loader
        self._downloads = ahead  # of the batches that follow, until a batch has nothing on a server
        self._ahead: deque[_Taken] = deque()
        self._authenticated: WeakSet[SealedTensor] = WeakSet()  # so that the sizes that are downloaded are no claims
        self._lock = lock
        self._device = device
        self._keys = keys
        self.batches: Iterator[Any] | None = None  # released to end the loader's workers
        self._has_state = hasattr(loader, "state_dict")
        self.is_stopped = False

    def begin(self) -> Fetched:
        with self._lock:
            self.batches = iter(self._loader)
            try:
                state = self._state()
            except AttributeError:  # from a method without an implementation, as in Accelerate's loaders
                state, self._has_state = None, False
            return Fetched(state=state)

    def fetch(self) -> Fetched:
        try:
            with self._lock:
                if self.batches is None or self.is_stopped:
                    batch, state = _END, None
                else:
                    batch, state = self._next(self.batches)
            if batch is not _END:
                return Fetched(to_device(batch, self._device, keys=self._keys), state)
        except BaseException:
            self.batches = None
            raise
        self.batches = None
        return Fetched(state=state, is_last=True)

    def _next(self, batches: Iterator[Any]) -> tuple[Any, Any]:
        """Return the next batch, or the end, with the state after it. Downloads for later ones begin meanwhile."""
        if not self._ahead:
            self._ahead.append(self._take(batches))
        while (
            self._downloads
            and len(self._ahead) <= _AHEAD
            and not self._ahead[-1].is_last
            and sum(one.nbytes for one in self._ahead) < _AHEAD_BYTES
        ):
            self._ahead.append(self._take(batches))
        taken = self._ahead.popleft()
        if taken.error is not None:
            raise taken.error
        return taken.batch, taken.state

    def _take(self, batches: Iterator[Any]) -> _Taken:
        try:
            taken = _Taken(next(batches, _END), self._state())
        except BaseException as error:
            if not self._ahead:
                raise
            return _Taken(error=error, is_last=True)
        taken.is_last = taken.batch is _END
        if self._downloads and not taken.is_last:
            with suppress(OSError, FastrackError):  # which are raised when the batch is opened
                wanted = list(wanted_of(taken.batch))
                new = [tensor for tensor, _ in wanted if tensor not in self._authenticated]
                if new and authenticate_remote(new, self._keys):
                    self._authenticated.update(new)
                nbytes = prefetch(wanted)
                self._downloads = nbytes is not None
                taken.nbytes = nbytes or 0
        return taken

    def stop(self) -> None:
        self.is_stopped = True
        self.batches = None

    def wait(self) -> None:
        pass

    def _state(self) -> Any:
        # A copy, since the state may be a part of the loader, which continues.
        return copy.deepcopy(self._loader.state_dict()) if self._has_state else None


@dataclass(slots=True)
class _Taken:
    """A batch of the loader with the state after it, or an error in its place. `nbytes` began to be downloaded."""

    batch: Any = None
    state: Any = None
    error: BaseException | None = None
    is_last: bool = False
    nbytes: int = 0


class PrefetchThread(threading.Thread):
    """Source that fetches batches in advance, on a thread. The loader's iterator is used and released there.

    The iterator is made in the caller's thread. Workers forked from this thread would destroy torch's caches of the
    other threads, and hang if one of these is a process group.

    The queues between the threads are written in C. They are not polled, and `stop` may be called from a destructor.
    """

    def __init__(self, source: Source, prefetch: int, side: SideStream | None) -> None:
        super().__init__(name="fastrack-loader", daemon=True)
        self._source = source
        self._side = side
        self._context = copy_context()  # of the caller, whose block of `use_keys` may have the keys
        self._permits: SimpleQueue[bool] = SimpleQueue()  # a semaphore: True for each batch to fetch, False to stop
        self._ready: SimpleQueue[Fetched] = SimpleQueue()
        for _ in range(prefetch):
            self._permits.put(True)
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Let the iteration raise in a forked child, which lacks this thread."""
        self._finish_with(
            Fetched(error=ClosedError("this iteration belongs to the parent process. Begin another one here"))
        )

    def begin(self) -> Fetched:
        _stop_at_exit()
        first = self._source.begin()
        self.start()
        return first

    def fetch(self) -> Fetched:
        if self._source.is_stopped:
            return Fetched(is_last=True)
        self._permits.put(True)  # before an interrupt can occur: a lost permit would never be replaced
        item = self._ready.get()
        if item.is_last:
            self._ready.put(item)  # for further calls
            self.join()
        if item.error is not None:
            self.join()
            try:
                raise item.error
            finally:
                del item  # breaks the cycle of the error, its traceback and this frame
        return item

    def stop(self) -> None:
        self._source.is_stopped = True
        self._permits.put(False)

    def wait(self) -> None:
        if threading.current_thread() is not self:
            self.join()
        self._finish_with()

    def run(self) -> None:
        self._context.run(self._fetch_all)

    def _fetch_all(self) -> None:
        ready = self._ready
        try:
            with nullcontext() if self._side is None else self._side.current():
                while self._source.batches is not None and self._permits.get():
                    if self._side is not None:
                        self._side.reclaim()
                    ready.put(self._source.fetch())
        except BaseException as error:  # noqa: BLE001  (raised where the batch is asked for)
            ready.put(Fetched(error=error))
        finally:
            self._source.batches = None
            if self._side is not None:
                self._side.reclaim()
            ready.put(Fetched(is_last=True))

    def _finish_with(self, *items: Fetched) -> None:
        self._ready = SimpleQueue()
        for item in (*items, Fetched(is_last=True)):
            self._ready.put(item)


@dataclass(slots=True)
class Fetched:
    """A batch on the device with the loader's state after it, or an error in its place, or the end."""

    batch: Any = None
    state: Any = None
    error: BaseException | None = None
    is_last: bool = False


@functools.cache
def _stop_at_exit() -> None:
    """Register the exit handler late: it runs before those of torch, which must still be able to end its workers."""
    atexit.register(_stop_all)


def _stop_all() -> None:
    deadline = time.monotonic() + _EXIT_TIMEOUT
    threads = [thread for thread in threading.enumerate() if isinstance(thread, PrefetchThread)]
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
