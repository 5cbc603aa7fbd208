"""A file on a server as a storage: a sparse file of the cache, mapped, that is filled block by block."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import numpy as np

from fastrack._crypto.base import HostMemory
from fastrack._remote.blocks import BLOCK, blocks_of, count, steps
from fastrack._remote.cache import Cache, CachedFile, Writer, open_cache
from fastrack._remote.objects import RemoteObject
from fastrack._remote.retries import read_range
from fastrack._sealed.storage import Ranges
from fastrack._tensors.arrays import Bytes
from fastrack._util.fork import per_process, register_fork_reset
from fastrack._util.locations import Url

PARALLEL = 64  # requests at a time
_REQUEST = 4 << 20  # bytes that one request asks for at most
_LONGEST = 16 << 20  # the same, of a long run: an eighth of it, as each request costs a server something
_JOINED = 1 << 20  # bytes of adjacent runs that one request joins: each waits for all of them


class RemoteFile:
    """`Storage` of a file on a server. Blocks that were fetched stay on the local disk, for all processes."""

    __slots__ = ("__weakref__", "_copy", "_lock", "_object", "cache", "size")
    is_remote = True

    def __init__(self, url: Url, remote: RemoteObject) -> None:
        self._object = remote
        self._lock = threading.Lock()
        self._copy: _Copy | None = None
        self.cache: Cache = open_cache()
        self.size = self._object.version.size
        self.cache.add_user(self)
        self.copy()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Forget the downloads of the parent's threads."""
        self._lock = threading.Lock()
        copy = self._copy
        self._copy = None if copy is None else _Copy(self._object, copy.entry)

    def copy(self) -> _Copy:
        """Return the copy on the local disk, or begin another if it was evicted, and note that it is used."""
        copy = self._copy
        if copy is None or not copy.entry.touch():
            with self._lock:  # else each thread would download into a copy of its own
                copy = self._copy
                if copy is None or copy.entry.is_evicted:
                    copy = self._copy = _Copy(self._object, self.cache.open(self._object.url, self._object.version))
                    copy.entry.touch()
        return copy

    def release_evicted(self) -> None:
        """Release an evicted copy. Running calls and existing arrays keep it until they end."""
        with self._lock:
            if self._copy is not None and self._copy.entry.is_evicted:
                self._copy = None

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> Bytes:
        """Download the missing blocks of byte ranges (start, stop), in parallel. Return the file that holds them."""
        return self.fetch_files({self: lambda: np.array(ranges)})[self]

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Begin to download the missing blocks of ranges, without waiting, and return the number of bytes."""
        return self.prefetch_files({self: lambda: np.array(ranges)})

    def discard(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Forget ranges whose bytes are wrong, so that they are downloaded again."""
        writer = self.copy().entry.open_writer()
        if writer is not None:
            for run in blocks_of(ranges):
                writer.mark(run, 0)
        return True

    def read(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.size)
        entry = self.copy().entry
        is_there = all(entry.flags(start // BLOCK, -(-stop // BLOCK)))
        return (entry.content if is_there else self.fetch([(start, stop)]))[start:stop].tobytes()

    def view(self, start: int, stop: int) -> Bytes:
        return self.fetch([(start, min(stop, self.size))])[start:stop]

    def memory(self, start: int, stop: int) -> HostMemory:
        return HostMemory.of(self.view(start, stop))

    @staticmethod
    def fetch_files(wanted: Mapping[RemoteFile, Ranges]) -> dict[RemoteFile, Bytes]:
        """Download the missing blocks of ranges of files, in parallel. Return the cached files that hold them."""
        for attempt in itertools.count():
            copies = {file: file.copy() for file in wanted}
            blocks = {file: blocks_of(wanted[file]()) for file, copy in copies.items() if not copy.entry.is_complete}
            missing = {file: number for file, some in blocks.items() if (number := copies[file].count_missing(some))}
            if missing and attempt < 2:  # a call that fills the cache to the last byte may have to exceed it a little
                needed = sum(map(count, blocks.values())) * BLOCK
                for cache in {file.cache for file in missing}:
                    room = sum(number for file, number in missing.items() if file.cache is cache)
                    cache.reserve(room * BLOCK, needed)
            writers = {file: writer for file in missing if (writer := copies[file].entry.open_writer())}
            if len(writers) == len(missing):  # else this call evicted one of its own files to make room
                break
        begun = {file: copies[file].begin(next(steps(blocks[file])), writer)[0] for file, writer in writers.items()}
        for file, writer in writers.items():
            copies[file].fill(blocks[file], writer, begun[file])
        return {file: copy.entry.content for file, copy in copies.items()}

    @staticmethod
    def prefetch_files(wanted: Mapping[RemoteFile, Ranges]) -> int:
        """Begin to download missing blocks of ranges of files, without waiting, and return the number of bytes.

        Only the beginning of a large file is downloaded, and only the first files if the cache cannot keep all.
        """
        by_cache: dict[Cache, list[tuple[_Copy, list[range], int]]] = {}
        for file, ranges in wanted.items():
            copy = file.copy()
            if not copy.entry.is_complete:
                step = next(steps(blocks_of(ranges())), [])
                by_cache.setdefault(file.cache, []).append((copy, step, copy.count_missing(step) * BLOCK))
        begun = 0
        for cache, parts in by_cache.items():
            if not any(missing for *_, missing in parts):
                continue
            ends = itertools.accumulate(count(step) * BLOCK for _, step, _ in parts)
            room = cache.bound()  # beyond it a file would give way to one behind it, and be downloaded twice
            chosen = [part for part, end in zip(parts, ends, strict=True) if end <= room]
            size = sum(missing for *_, missing in chosen)
            cache.reserve(size, size)
            for copy, step, missing in chosen:
                if missing and (writer := copy.entry.open_writer()):
                    copy.begin(step, writer)
                    begun += missing
        return begun

    def keep_head(self, head: bytes) -> None:
        """Keep the bytes that were read to open the file."""
        blocks = range(-(-self.size // BLOCK) if len(head) == self.size else len(head) // BLOCK)
        entry = self.copy().entry
        if not all(entry.flags(0, blocks.stop)):
            self.cache.reserve(len(blocks) * BLOCK, len(blocks) * BLOCK)
            if writer := entry.open_writer():
                writer.write(0, head)
                writer.mark(blocks)


def open_object(url: Url) -> RemoteObject:
    """Open an object by its URL: its version and its first bytes are read."""
    if url.scheme in {"http", "https"}:
        from fastrack._remote.http import HttpObject

        return HttpObject(url)
    from fastrack._remote.filesystem import open_with_fsspec

    return open_with_fsspec(url)


def open_remote(url: Url) -> tuple[RemoteFile, Callable[[int, int], bytes]]:
    """Open a file on a server. Return a function as well that reads its fresh beginning from memory."""
    remote = open_object(url)
    head = remote.head
    remote.head = b""  # thousands of files may be open
    file = RemoteFile(url, remote)
    file.keep_head(head)

    def read(start: int, stop: int) -> bytes:
        return head[start:stop] if stop <= len(head) else file.read(start, stop)

    return file, read


class _Copy:
    """An entry of the cache, and the downloads of this process into it: at most one for each block."""

    def __init__(self, remote: RemoteObject, entry: CachedFile) -> None:
        self.entry = entry
        self._object = remote
        self._lock = threading.Lock()
        self._pending: dict[int, _Task] = {}  # by block; a thread takes each, or has begun it

    def count_missing(self, blocks: Sequence[range]) -> int:
        return sum(self.entry.flags(run.start, run.stop).count(0) for step in steps(blocks) for run in step)

    def fill(self, blocks: Sequence[range], writer: Writer, begun: list[Future[None]]) -> None:
        """Download the missing blocks. `begun` are the downloads of the first blocks."""
        _finish(begun)
        for step in steps(blocks):
            while self.count_missing(step):
                downloads, others = self.begin(step, writer)
                wait(others)  # failed downloads are begun again
                _finish(downloads)

    def begin(self, blocks: Iterable[range], writer: Writer) -> tuple[list[Future[None]], set[Future[None]]]:
        """Begin to download the missing blocks. Return the new downloads and the pending ones of other calls."""
        downloads: list[Future[None]] = []
        with self._lock:  # which a thread takes before it looks for its task
            runs, others = self._runs(blocks)
            for run in runs:
                task = _Task(run, writer)
                downloads.append(task.future)
                _threads.submit(partial(self._run, task))
                # In one step of the interpreter, and last: others wait for what stands here, so it has a thread.
                self._pending.update(dict.fromkeys(run, task))
        return downloads, others

    def _runs(self, blocks: Iterable[range]) -> tuple[list[range], set[Future[None]]]:
        """Return runs of missing blocks, of a request's size at most, without those that are pending elsewhere."""
        runs: list[range] = []
        others: set[Future[None]] = set()
        for candidates in blocks:
            runs.append(candidates[:0])
            most = max(_REQUEST // BLOCK, min(len(candidates) // 8, _LONGEST // BLOCK))
            # Before `pending`, as downloaded blocks are in both.
            flags = self.entry.flags(candidates.start, candidates.stop)
            for block, is_present in zip(candidates, flags, strict=True):
                if is_present:
                    continue
                if (other := self._pending.get(block)) is not None:
                    others.add(other.future)
                elif runs[-1].stop == block and len(runs[-1]) < most:
                    runs[-1] = range(runs[-1].start, block + 1)
                else:
                    runs.append(range(block, block + 1))
        return [run for run in runs if run], others

    def _run(self, task: _Task) -> None:
        """Download a run of blocks together with its neighbours, unless it was downloaded with one of them."""
        tasks = self._take(task)
        if not tasks:
            return
        blocks = range(tasks[0].run.start, tasks[-1].run.stop)
        failure: BaseException | None = None
        try:
            stop = min(blocks.stop * BLOCK, self.entry.size)
            read_range(self._object, blocks.start * BLOCK, stop, task.writer.write)
            task.writer.mark(blocks)
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            failure = error
        with self._lock:
            for block in blocks:
                self._pending.pop(block, None)
        for joined in tasks:
            if failure is None:
                joined.future.set_result(None)
            else:
                joined.future.set_exception(failure)

    def _take(self, task: _Task) -> list[_Task]:
        """Return a task with its neighbours, in ascending order; nothing if it was begun, or its call gave it up."""
        with self._lock:
            if task.is_begun or self._pending.get(task.run.start) is not task:
                return []
            tasks, room = [task], _JOINED // BLOCK - len(task.run)
            while after := self._waiting(tasks[-1].run.stop, room):
                tasks.append(after)
                room -= len(after.run)
            while before := self._waiting(tasks[0].run.start - 1, room):
                tasks.insert(0, before)
                room -= len(before.run)
            for taken in tasks:
                taken.is_begun = True
        return tasks

    def _waiting(self, block: int, room: int) -> _Task | None:
        """Return the task of a block if no thread has begun it, and it has `room` blocks at most."""
        task = self._pending.get(block)
        return None if task is None or task.is_begun or len(task.run) > room else task


def _finish(downloads: list[Future[None]]) -> None:
    """Wait for downloads, and raise the error of one that failed."""
    wait(downloads)
    for download in downloads:
        download.result()


@dataclass(slots=True, eq=False)
class _Task:
    """A run of blocks to download."""

    run: range
    writer: Writer
    future: Future[None] = field(default_factory=Future)
    is_begun: bool = False


class _Threads:
    """The threads of this process that download. They do not keep it from ending. A forked child has none of them."""

    def __init__(self) -> None:
        self._lock = per_process(self, "_lock", threading.Lock)
        self._count = per_process(self, "_count", int)
        self._tasks: SimpleQueue[Callable[[], None]] = per_process(self, "_tasks", SimpleQueue)

    def submit(self, function: Callable[[], None]) -> None:
        """Run a function that does not raise in one of the threads. Raise RuntimeError if there can be none."""
        with self._lock:
            if self._count < PARALLEL:
                try:
                    threading.Thread(target=self._run, args=(self._tasks,), name="fastrack-remote", daemon=True).start()
                except RuntimeError:  # no more threads or memory are allowed: those that there are do the work
                    if not self._count or sys.is_finalizing():
                        raise
        self._tasks.put(function)  # what raises before leaves nothing behind

    def _run(self, tasks: SimpleQueue[Callable[[], None]]) -> None:
        with self._lock:  # counted by itself: `start` may be interrupted once there is a thread, or before
            if self._count >= PARALLEL:
                return
            self._count += 1
        while True:
            function = tasks.get()
            function()
            del function


_threads = _Threads()
