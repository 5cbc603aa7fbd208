"""The batches of one iteration of a loader: each on request, or fetched in advance by a thread."""

from __future__ import annotations

import atexit
import copy
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from fastrack._crypto.gather import LazyRanges
from fastrack._keys.keyring import KeyRing
from fastrack._sealed.message_headers import authenticate_remote
from fastrack._sealed.message_headers import prefetch as begin_downloads
from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._training.side_stream import SideStream
from fastrack._transfer.api import to_device
from fastrack._util.fork import per_process, register_fork_reset
from fastrack._util.tree import Tree
from fastrack.errors import ClosedError, FastrackError

_EXIT_TIMEOUT = 5  # seconds that the exit of the process waits for prefetch threads
_AHEAD = 64  # batches with parts on servers that are taken from the loader before they are opened
_AHEAD_BYTES = 128 << 20  # of downloads begun for these batches
_END = object()


class LoaderLock:
    """The lock of a loader, which its iterations have too, without the wrapper: in a forked child it is another one."""

    __slots__ = ("__weakref__", "own")

    def __init__(self) -> None:
        self.own = per_process(self, "own", threading.Lock)


class BatchSource:
    """The batches of one iteration, each fetched and moved on request.

    The loader's lock is held while the loader is used: once another caller has it, a stopped iteration no longer
    uses the loader.
    """

    def __init__(self, loader: Any, stream: Any, lock: LoaderLock, device: str, keys: KeyRing, *, ahead: bool) -> None:
        self._loader = loader
        self._downloads = ahead  # begin downloads in advance, until a batch has no remote parts
        self._ahead: deque[ReadyBatch] = deque()
        # Only authenticated sizes are downloaded.
        self._authenticated: weakref.WeakSet[SealedTensor] = weakref.WeakSet()
        self._lock = lock
        self._device = device
        self._keys = keys
        self.batches: Iterator[Any] | None = None  # released to end the loader's workers
        self._has_state = hasattr(loader, "state_dict")
        self._stream = stream  # a `StreamingSealedDataset` whose batches the loader returns, or None
        self._taken = 0  # batches
        self.is_stopped = False

    def begin(self) -> ReadyBatch:
        with self._lock.own:
            if self._stream is not None:  # its loader's workers may be ahead: batches are counted here
                self._begun = self._stream._position()  # noqa: SLF001 - of this package
                self._stream._rewinds = False  # noqa: SLF001 - a thread may come to the end before the caller
            try:
                self.batches = iter(self._loader)
            finally:
                if self._stream is not None:
                    self._stream._rewinds = True  # noqa: SLF001 - of this package
            try:
                state = self._state()
            except AttributeError:  # from a method without an implementation, as in Accelerate's loaders
                state, self._has_state = None, False
            return ReadyBatch(state=state)

    def fetch(self) -> ReadyBatch:
        try:
            with self._lock.own:
                item = self._next()
            if not item.is_last:
                item.batch = to_device(item.batch, self._device, keys=self._keys)
                return item
        except BaseException:
            self.batches = None
            raise
        self.batches = None
        return item

    def _next(self) -> ReadyBatch:
        """Return the next batch, or the end, with the state after it. Begin downloads for later batches."""
        batches = None if self.is_stopped else self.batches  # read once: another thread may call `stop`
        if batches is None:
            return ReadyBatch(is_last=True)
        ahead = self._ahead
        if not ahead:
            ahead.append(self._take(batches))
        while (
            self._downloads
            and len(ahead) <= _AHEAD
            and not ahead[-1].is_last
            and sum(item.nbytes for item in ahead) < _AHEAD_BYTES
        ):
            ahead.append(self._take(batches))
        item = ahead.popleft()
        if item.error is not None:
            raise item.error
        return item

    def _take(self, batches: Iterator[Any]) -> ReadyBatch:
        try:
            batch = next(batches, _END)
            self._taken += batch is not _END
            state = self._state()
        except BaseException as error:
            if not self._ahead:
                raise
            return ReadyBatch(error=error, is_last=True)
        if batch is _END:
            rewind = None if self._stream is None else partial(self._stream._rewind, *self._begun)  # noqa: SLF001
            return ReadyBatch(state=state, is_last=True, rewind=rewind)
        item = ReadyBatch(batch, state)
        if self._downloads:
            with suppress(OSError, FastrackError):  # opening the batch raises them again
                messages = list(_wanted_of(batch))
                new = [tensor for tensor, _ in messages if tensor not in self._authenticated]
                if new and authenticate_remote(new, self._keys):
                    self._authenticated.update(new)
                nbytes = begin_downloads(messages)
                if self._stream is not None:  # the rest of a window's shards follows, in large requests
                    begin_downloads((tensor, None) for tensor in new)
                self._downloads = nbytes is not None
                item.nbytes = nbytes or 0
        return item

    def _state(self) -> Any:
        """Return the state after the batches that were taken."""
        if self._stream is not None:
            return self._stream._state_after(self._begun, self._taken)  # noqa: SLF001 - of this package
        # A copy, since the state may be a part of the loader, which continues.
        return copy.deepcopy(self._loader.state_dict()) if self._has_state else None

    def stop(self) -> None:
        self.is_stopped = True
        self.batches = None

    def wait(self) -> None:
        pass


class PrefetchThread(threading.Thread):
    """BatchSource that fetches batches in advance, on a thread. The loader's iterator is used and released there.

    The iterator is made in the caller's thread. Workers forked from this thread would destroy torch's caches of the
    other threads, and hang if such a cache is a process group.

    The queues between the threads are written in C: no polling, and `stop` may be called from a destructor.
    """

    def __init__(self, source: BatchSource, prefetch: int, side: SideStream | None) -> None:
        super().__init__(name="fastrack-loader", daemon=True)
        self._source = source
        self._side = side
        self._context = copy_context()  # of the caller, whose block of `use_keys` may have the keys
        self._permits: SimpleQueue[bool] = SimpleQueue()  # a semaphore: True for each batch to fetch, False to stop
        self._ready: SimpleQueue[ReadyBatch] = SimpleQueue()
        self._early = prefetch  # permits that the first call gives with its own, as a sampler draws at its start
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Let the iteration raise in a forked child, which lacks this thread."""
        self._finish_with(
            ReadyBatch(error=ClosedError("this iteration belongs to the parent process. Begin another one here"))
        )

    def begin(self) -> ReadyBatch:
        _stop_at_exit()
        first = self._source.begin()
        self.start()
        return first

    def fetch(self) -> ReadyBatch:
        if self._source.is_stopped:
            return ReadyBatch(is_last=True)
        for _ in range(1 + self._early):  # before an interrupt can occur: a lost permit would never be replaced
            self._permits.put(True)
        self._early = 0
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
            ready.put(ReadyBatch(error=error))
        finally:
            self._source.batches = None
            if self._side is not None:
                self._side.reclaim()
            ready.put(ReadyBatch(is_last=True))

    def _finish_with(self, *items: ReadyBatch) -> None:
        self._ready = SimpleQueue()
        for item in (*items, ReadyBatch(is_last=True)):
            self._ready.put(item)


@dataclass(slots=True)
class ReadyBatch:
    """A batch, of the loader or on the device, with the loader's state after it; an error in its place; or the end."""

    batch: Any = None
    state: Any = None
    error: BaseException | None = None
    is_last: bool = False
    rewind: Callable[[], None] | None = None  # of the stream, once the caller has come to this end
    nbytes: int = 0  # of its downloads


@functools.cache
def _stop_at_exit() -> None:
    """Register the exit handler late: it runs before torch's handlers, which must still be able to end workers."""
    atexit.register(_stop_all)


def _stop_all() -> None:
    deadline = time.monotonic() + _EXIT_TIMEOUT
    threads = [thread for thread in threading.enumerate() if isinstance(thread, PrefetchThread)]
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))


def _wanted_of(tree: Any) -> Iterator[tuple[SealedTensor, LazyRanges | None]]:
    """Yield the messages of a pytree, each with its lazy byte ranges; None for all bytes."""
    for leaf in Tree(tree).leaves:
        if isinstance(leaf, SealedTensor):
            yield leaf, None
        elif isinstance(leaf, SealedRows):
            yield from leaf.slices()
