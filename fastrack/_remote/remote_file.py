"""A file on a server as a storage: a sparse file of the cache, mapped, that is filled range by range."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from fastrack._crypto.base import HostMemory, address
from fastrack._remote.blocks import BLOCK, blocks_of, count, steps
from fastrack._remote.cache import REGION, Cache, Entry, open_cache
from fastrack._remote.locks import Lease
from fastrack._remote.objects import RemoteObject, read_range
from fastrack._tensors.arrays import Bytes
from fastrack._util.fork import register_fork_reset
from fastrack._util.locations import Url

PARALLEL = 64  # requests at once
_REQUEST = 4 << 20  # bytes that one request asks for at most
_JOINED = 1 << 20  # of runs that came one by one: a run waits for all that comes with it
_BLOCKS = REGION // BLOCK
_FEW = 4096  # blocks
_SHORT = 4096  # bytes that are copied without a lease


class RemoteFile:
    """`Storage` of a file on a server. Ranges that were fetched stay on the local disk, for all processes.

    A range is in its place as long as the object that `fetch` returned, or an array or memory of it, is alive.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_cache",
        "_ends",
        "_entry",
        "_lock",
        "_object",
        "_pending",
        "_starts",
        "_whole",
        "size",
    )

    def __init__(self, url: Url, remote: RemoteObject) -> None:
        self._object = remote
        self._cache: Cache = open_cache()
        self._entry = self._cache.open(url, self._object.version)
        self._address = address(self._entry.content)
        self.size = self._object.version.size
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Forget the downloads of the parent's threads."""
        self._lock = threading.Lock()
        self._pending: dict[int, Future[None]] = {}  # by block
        self._starts: dict[int, _Task] = {}  # those that no thread has begun, by their first block
        self._ends: dict[int, _Task] = {}  # and by the block behind them
        self._whole: Callable[[], Lease | None] = _no_lease  # that of all regions, if one is alive

    @property
    def url(self) -> Url:
        return self._object.url

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> object:
        """Download what is missing of ranges of bytes (start, stop), in parallel. Keep the object that is returned."""
        return self.fetch_blocks(blocks_of(ranges))

    def fetch_blocks(self, blocks: Sequence[range]) -> object:
        """Download those of these blocks that are missing, as `fetch` does."""
        regions = _regions(blocks)
        lease = self._cache.lease(self._entry, regions)
        missing = self._count_missing(blocks)
        if missing:
            del lease  # what is not needed any more makes room in these regions too
            self._cache.reserve(missing * BLOCK, count(blocks) * BLOCK)
            lease = self._cache.lease(self._entry, regions)
        for step in steps(blocks) if missing else ():
            while runs := self._missing(step):
                own, others = self._begin(runs)
                wait([*own, *others])  # those that other calls began, and that failed, are begun again
                for download in own:
                    download.result()
        self._cache.touch(self._entry, regions)
        return lease

    @property
    def is_complete(self) -> bool:
        """True if all blocks of a file of up to 1 GiB are there, at this moment. It is quicker than a look at some."""
        flags = self._entry.flags
        return len(flags) <= _FEW and not bytes(flags).count(0)

    def lease_all(self) -> object | None:
        """Return what keeps all of the file in its place, as `fetch` does, or None if it is not complete."""
        lease = self._whole()
        if lease is None:
            regions = range(-(-self.size // REGION))
            lease = self._cache.lease(self._entry, regions)
            self._cache.touch(self._entry, regions)
            self._whole = ref(lease)
        return lease if self.is_complete else None

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Begin to download what is missing of ranges, without waiting, and return the number of bytes.

        Of very much only the beginning is downloaded.
        """
        return self.prefetch_blocks(blocks_of(ranges))

    def prefetch_blocks(self, blocks: Sequence[range]) -> int:
        """Begin to download those of these blocks that are missing, as `prefetch` does."""
        runs = self._missing(next(steps(blocks), []))
        missing = count(runs)
        if missing:
            self._cache.reserve(missing * BLOCK, missing * BLOCK)
            self._begin(runs)
        return missing * BLOCK

    def drop(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Forget ranges whose bytes are wrong, so that they are downloaded again."""
        self.drop_blocks(blocks_of(ranges))

    def drop_blocks(self, blocks: Iterable[range]) -> None:
        """Forget blocks whose bytes are wrong, so that they are downloaded again."""
        index = self._entry.open_index()
        try:
            for each in blocks:
                self._entry.write_flags(index, each, 0)
        finally:
            os.close(index)

    def has_blocks(self, blocks: Sequence[range]) -> bool:
        """Return whether all of these blocks are there, at this moment."""
        return not self._count_missing(blocks)

    def _count_missing(self, blocks: Sequence[range]) -> int:
        flags = self._entry.flags
        if count(blocks) <= _FEW:
            return sum([bytes(flags[each.start : each.stop]).count(0) for each in blocks])
        return sum(bytes(flags[each.start : each.stop]).count(0) for step in steps(blocks) for each in step)

    def _missing(self, blocks: Iterable[range]) -> list[range]:
        """Return runs of those of these blocks that are not there, of a request's size at most, in ascending order."""
        flags = self._entry.flags
        runs: list[range] = []
        for each in blocks:
            present = bytes(flags[each.start : each.stop])
            first = present.find(0)
            while first >= 0:
                stop = present.find(1, first, first + _REQUEST // BLOCK)
                if stop < 0:
                    stop = min(first + _REQUEST // BLOCK, len(present))
                runs.append(range(each.start + first, each.start + stop))
                first = present.find(0, stop)
        return runs

    def read(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.size)
        if stop - start <= _SHORT:
            present = self._entry.flags[start // BLOCK : -(-stop // BLOCK)]
            if all(present):
                data = self._entry.content[start:stop].tobytes()
                if all(present):  # an eviction marks blocks as absent before it frees them
                    return data
        lease = self.fetch([(start, stop)])
        data = self._entry.content[start:stop].tobytes()
        del lease
        return data

    def view(self, start: int, stop: int) -> Bytes:
        return self.memory(start, min(stop, self.size)).array

    def memory(self, start: int, stop: int) -> HostMemory:
        lease = self._whole() or self._cache.lease(self._entry, range(start // REGION, -(-stop // REGION)))
        return HostMemory(
            self._address + start,
            stop - start,
            np.asarray(_Part(self._address + start, stop - start, (lease, self._entry.content))),
        )

    def keep_head(self, head: bytes) -> None:
        """Keep the bytes that were read to open the file."""
        blocks = range(-(-self.size // BLOCK) if len(head) == self.size else len(head) // BLOCK)
        if blocks and not all(self._entry.flags[: blocks.stop]):
            lease = self._cache.lease(self._entry, {0})
            self._cache.reserve(len(blocks) * BLOCK, len(blocks) * BLOCK)
            download = _Download(self._entry, lease, 1)
            try:
                download.write(0, head)
                download.mark(blocks)
            finally:
                download.release()

    def _begin(self, missing: Sequence[range]) -> tuple[list[Future[None]], list[Future[None]]]:
        """Begin to download runs of blocks, unless others have. Return the downloads, and those of others."""
        own: list[Future[None]] = []
        with self._lock:
            pending = self._pending
            others = [pending[block] for run in missing for block in run if block in pending]
            runs = missing if not others else _without(missing, pending)
            if runs:
                lease = self._cache.lease(self._entry, _regions(runs))
                download = _Download(self._entry, lease, len(runs))
                for run in runs:
                    task = _Task(run, download, Future())
                    own.append(task.future)
                    pending.update(dict.fromkeys(run, task.future))
                    self._starts[run.start] = self._ends[run.stop] = task
                    _threads.submit(partial(self._run, task))
        return own, others

    def _run(self, task: _Task) -> None:
        """Download a run of blocks, unless it was downloaded with another, and with it those beside it."""
        tasks = self._take(task)
        if not tasks:
            return
        blocks = range(tasks[0].run.start, tasks[-1].run.stop)
        failure: BaseException | None = None
        try:
            read_range(self._object, blocks.start * BLOCK, min(blocks.stop * BLOCK, self.size), task.download.write)
            task.download.mark(blocks)
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            failure = error
        with self._lock:
            for block in blocks:
                self._pending.pop(block, None)
        for each in tasks:
            each.download.release()
            if failure is None:
                each.future.set_result(None)
            else:
                each.future.set_exception(failure)

    def _take(self, task: _Task) -> list[_Task]:
        """Return a task with those that are beside it, in ascending order, unless a thread has begun it."""
        with self._lock:
            if self._starts.get(task.run.start) is not task:
                return []
            tasks = [task]
            left = _JOINED // BLOCK - len(task.run)
            while (after := self._starts.get(tasks[-1].run.stop)) and len(after.run) <= left:
                tasks.append(after)
                left -= len(after.run)
            while (before := self._ends.get(tasks[0].run.start)) and len(before.run) <= left:
                tasks.insert(0, before)
                left -= len(before.run)
            for each in tasks:
                del self._starts[each.run.start], self._ends[each.run.stop]
        return tasks


def open_object(url: Url) -> RemoteObject:
    """Open an object by its URL: its version and its first bytes are read."""
    if url.scheme in {"http", "https"}:
        from fastrack._remote.http import HttpObject

        return HttpObject(url)
    from fastrack._remote.filesystem import open_with_fsspec

    return open_with_fsspec(url)


def open_remote(url: Url) -> tuple[RemoteFile, Callable[[int, int], bytes]]:
    """Open a file on a server. Return a function as well that reads its beginning, which is fresh from the server."""
    remote = open_object(url)
    head = remote.head
    remote.head = b""  # thousands of files may be open
    file = RemoteFile(url, remote)
    file.keep_head(head)

    def read(start: int, stop: int) -> bytes:
        return head[start:stop] if stop <= len(head) else file.read(start, stop)

    return file, read


class _Download:
    """The lease and the descriptors that the runs of blocks of a call need until the last of them has ended."""

    def __init__(self, entry: Entry, lease: Lease, count: int) -> None:
        self._entry = entry
        self._lease: Lease | None = lease
        self._left = count
        self._lock = threading.Lock()
        self._data = entry.open_data()
        try:
            self._index = entry.open_index()
        except BaseException:
            os.close(self._data)
            raise

    def write(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._data, view, offset)
            view, offset = view[count:], offset + count

    def mark(self, blocks: range) -> None:
        """Mark blocks as present."""
        self._entry.write_flags(self._index, blocks, 1)

    def release(self) -> None:
        """End one run."""
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            os.close(self._data)
            os.close(self._index)
            self._lease = None


class _Task(NamedTuple):
    """A run of blocks to download."""

    run: range
    download: _Download
    future: Future[None]


class _Part:
    """Bytes of a map, which keep what they need alive."""

    __slots__ = ("__array_interface__", "_owners")

    def __init__(self, start: int, size: int, owners: Any) -> None:
        self._owners = owners
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (start, True)}


class _Threads:
    """The threads of this process that download. They do not keep it from ending."""

    def __init__(self) -> None:
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Forget the parent's threads."""
        self._lock = threading.Lock()
        self._count = 0
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def submit(self, function: Callable[[], None]) -> None:
        """Run a function that does not raise in one of the threads."""
        self._tasks.put(function)
        with self._lock:
            if self._count < PARALLEL:
                self._count += 1
                threading.Thread(target=self._run, args=(self._tasks,), name="fastrack-remote", daemon=True).start()

    def _run(self, tasks: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            function = tasks.get()
            function()
            del function


_threads = _Threads()


def _no_lease() -> None:
    """Return None, as a reference to an object that is no more."""


def _without(runs: Iterable[range], pending: Container[int]) -> list[range]:
    """Return the runs of those blocks that are not pending."""
    left: list[range] = []
    for run in runs:
        for block in run:
            if block not in pending:
                if left and left[-1].stop == block and block > run.start:
                    left[-1] = range(left[-1].start, block + 1)
                else:
                    left.append(range(block, block + 1))
    return left


def _regions(blocks: Iterable[range]) -> list[int]:
    """Return the regions of blocks that are in ascending order, each once."""
    regions: list[int] = []
    for each in blocks:
        first, last = each.start // _BLOCKS, (each.stop - 1) // _BLOCKS
        regions.extend(range(max(first, regions[-1] + 1) if regions else first, last + 1))
    return regions
