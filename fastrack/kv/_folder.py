"""`BlockFolder`: sealed blocks as files of a folder that several servers may share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fastrack._keys.keyring import KeyLike
from fastrack._tensors.arrays import Bytes, empty_bytes
from fastrack._util.fork import per_process
from fastrack._util.rights import make_own
from fastrack.kv._sealer import BlockContext, BlockSealer, view_of

SUFFIX, _WRITING = ".kv", ".writing"
_KEPT = 8  # buffers for messages, which more threads than that would have to make anew
_ABANDONED = 600  # seconds without a write after which the file of a killed writer is removed
_PART = re.compile(r"([0-9a-f]{2})[0-9a-f]{62}\.kv\.\d+-\d+\.writing")  # the name of a file of `_write`
_BLOCK = re.compile(r"([0-9a-f]{2})[0-9a-f]{62}\.kv")
_COUNTED = "counted"  # the file of a folder with a limit: its bytes, and when they were listed
_LISTED = 300  # seconds after which the files are listed again: others may have removed or, without a limit, added some
_WAIT = 1  # seconds for the lock of that file, so that a stopped server stops no other
_numbers = itertools.count()


class BlockFolder:
    """Sealed blocks of KV caches in the files of a folder. Several threads, processes and machines may share it.

    What cannot be read or does not open is a miss; what cannot be written is not stored. Both are counted, and the
    first of each kind is a warning of the logger "fastrack". No method raises for what the folder holds or the disk
    does, so that a server's loop goes on and computes the block anew. A folder that was removed is made again.

    The names of files tell nothing without the key. Their number, sizes and times can be seen. What does not open is
    removed, and so are files of killed writers. With a limit, the blocks used least recently make room for new ones,
    whichever server stored them; without one, the folder only grows.

    Parameters
    ----------
    path : path
        The folder, which is made if it is missing, only for this user.
    key : KeyLike, optional
        As for `BlockSealer`.
    threads : int, optional
        As for `BlockSealer`.
    limit : int, optional
        Bytes of all files. Each thread that stores a block may be above it by that block, for a moment. The time of a
        file is that of its last use.

    Attributes
    ----------
    sealer : BlockSealer
        Seals and opens the blocks, and has the counts.

    Examples
    --------
    >>> import fastrack
    >>> from fastrack.kv import BlockContext, BlockFolder
    >>> folder = BlockFolder("blocks", fastrack.Key.generate())
    >>> here = BlockContext("llama@1", "uint8 [16]", "0 of 1", b"tokens")
    >>> folder.put(here, b"keys and values!"), folder.has(here)
    (True, True)
    >>> block = bytearray(16)
    >>> folder.get(here, block), bytes(block)
    (True, b'keys and values!')
    >>> folder.get(here._replace(hash=b"others"), block), dict(folder.sealer.counts)
    (False, {'sealed': 1, 'opened': 1, 'absent': 1})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        key: KeyLike | None = None,
        *,
        threads: int | None = None,
        limit: int | None = None,
    ) -> None:
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"limit of a folder of KV blocks: expected a number of bytes from 1 on, got {limit!r:.40}")
        self.path = Path(path).absolute()
        self.sealer = BlockSealer(key, threads=threads)
        self._limit = limit
        make_own(self.path)
        self._buffers: list[Bytes] = []
        self._lock = per_process(self, "_lock", threading.Lock)
        self._list()

    def put(self, context: BlockContext, block: Any) -> bool:
        """Seal a block into its file, unless there is one of its size, and return whether one is there.

        Parameters
        ----------
        context : BlockContext
            What the block is.
        block : buffer
            Contiguous memory.
        """
        size = self.sealer.sealed_size(view_of(block).size)
        name = self._name(context)
        if self._size_of(name) == size:  # another server wrote it; what is wrong with it shows when it is read
            self._touch(name)
            self.sealer.count("present")
            return True
        with self._buffer(size) as message:
            self.sealer.seal(context, block, message)
            return self._write(name, message)

    def get(self, context: BlockContext, target: Any) -> bool:
        """Open a block into memory of its size, or return False, and leave zeros in `target`.

        Parameters
        ----------
        context : BlockContext
            What the block has to be.
        target : buffer
            Contiguous memory of exactly the size of the block.
        """
        plain = view_of(target, writable=True)
        size = self.sealer.sealed_size(plain.size)
        with self._buffer(size) as message:
            if not self._read(self._name(context), message):
                plain.fill(0)
                return False
            is_open = self.sealer.open(context, message, plain)
        if is_open:
            self._touch(self._name(context))
        else:
            self.remove(context)  # so that `put` stores it again
        return is_open

    def has(self, context: BlockContext) -> bool:
        """Return whether there is a file for a block. Only `get` says whether it opens."""
        return self._size_of(self._name(context)) is not None

    def remove(self, context: BlockContext) -> int:
        """Remove the file of a block, and return its size; 0 if there is none."""
        name = self._name(context)
        with contextlib.suppress(OSError), self._opened(name) as at:
            size = os.stat(name, dir_fd=at, follow_symlinks=False).st_size
            os.unlink(name, dir_fd=at)
            return size
        return 0

    def _name(self, context: BlockContext) -> str:
        return context.name(self.sealer.key) + SUFFIX

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Open the subfolder of a file. A link, which another writer of the folder could put there, is refused."""
        folder = os.open(self.path / name[:2], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield folder
        finally:
            os.close(folder)

    def _size_of(self, name: str) -> int | None:
        """Return the size of a regular file; None for anything else, and for what the disk does not tell."""
        with contextlib.suppress(OSError), self._opened(name) as at:
            status = os.stat(name, dir_fd=at, follow_symlinks=False)
            return status.st_size if stat.S_ISREG(status.st_mode) else None
        return None

    def _read(self, name: str, message: Bytes) -> bool:
        """Read a file of exactly the size of a message, into memory: a mapped one may be cut while it is read."""
        try:
            with self._opened(name) as at:
                with open(name, "rb", buffering=0, opener=partial(_open_regular, at)) as file:
                    size, done = os.fstat(file.fileno()).st_size, 0
                    while size == message.size and done < size:
                        count = file.readinto(message.data[done:])
                        size, done = (size, done + count) if count else (done, done)
                if size != message.size:
                    self.sealer.count("refused", f"{self.path}: a block has another size than its layout")
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=at)
        except FileNotFoundError:
            self.sealer.count("absent")
            return False
        except OSError as error:
            self.sealer.count("unreadable", f"{self.path}: a block could not be read: {os.strerror(error.errno or 0)}")
            if isinstance(error, PermissionError):  # or it would be found, and not be read, for ever
                with contextlib.suppress(OSError), self._opened(name) as at:
                    os.unlink(name, dir_fd=at)
            return False
        return size == message.size

    def _write(self, name: str, message: Bytes) -> bool:
        """Write a file that has its name when it is whole. It is not forced to the disk: a lost block is a miss."""
        part = f"{name}.{os.getpid()}-{next(_numbers)}{_WRITING}"
        try:
            make_own(self.path / name[:2])  # also what was removed above it
            if self._limit is not None:
                self._make_room(message.size, self._limit)
            with self._opened(name) as at:
                descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=at)
                try:
                    try:
                        rest = message.data
                        while rest:
                            rest = rest[os.write(descriptor, rest) :]
                    finally:
                        os.close(descriptor)
                    os.replace(part, name, src_dir_fd=at, dst_dir_fd=at)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(part, dir_fd=at)
                    raise
        except OSError as error:
            self.sealer.count("unstored", f"{self.path}: a block was not stored: {os.strerror(error.errno or 0)}")
            return False
        self.sealer.count("stored")
        return True

    @contextlib.contextmanager
    def _buffer(self, size: int) -> Iterator[Bytes]:
        """Lend memory for a message, which others have touched: fresh memory costs more than the cipher."""
        with self._lock:
            memory = min((each for each in self._buffers if each.size >= size), key=len, default=None)
            self._buffers = [each for each in self._buffers if each is not memory]
        if memory is None:
            memory = empty_bytes(size)
        try:
            yield memory[:size]
        finally:
            with self._lock:
                self._buffers = [memory, *self._buffers][:_KEPT]

    def _touch(self, name: str) -> None:
        """Note that a block was used: the time of the last access may be off, or as old as a day."""
        if self._limit is not None:
            with contextlib.suppress(OSError), self._opened(name) as at:
                os.utime(name, dir_fd=at, follow_symlinks=False)

    def _make_room(self, size: int, limit: int) -> None:
        """Count a block in before it is written, so that no two writers take the same room.

        Files are listed once there is no room by the count, which may be too high: killed writers and removed files are
        in it. Each listing frees a sixteenth of the limit, so that not every block needs one.
        """
        if size > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self.path / _COUNTED, flags, 0o600)
        try:
            _lock(descriptor)
            counted, listed = _parse(os.pread(descriptor, 64, 0))
            if counted + size > limit or abs(time.time() - listed) > _LISTED:
                counted, listed = self._evict(size, limit), int(time.time())
            if counted + size > limit:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            os.pwrite(descriptor, b"%020d %020d\n" % (counted + size, listed), 0)
        finally:
            os.close(descriptor)

    def _evict(self, size: int, limit: int) -> int:
        """Remove the blocks used least recently if there is no room for another, and return the bytes that are left."""
        files = self._list()
        left = sum(each for _, each, _ in files)
        if left + size > limit:
            files = sorted((each for each in files if _BLOCK.fullmatch(each[2])), reverse=True)
            while files and left + size > limit - limit // 16:
                _, freed, name = files.pop()
                with contextlib.suppress(OSError), self._opened(name) as at:
                    os.unlink(name, dir_fd=at)
                    left -= freed
                    self.sealer.count("evicted")
        return left

    def _list(self) -> list[tuple[float, int, str]]:
        """Return time, size and name of each file that this class wrote, and remove those of killed writers."""
        found, limit = [], time.time() - _ABANDONED
        for folder in self.path.glob("[0-9a-f][0-9a-f]"):
            with contextlib.suppress(OSError), self._opened(folder.name) as at:
                for name in os.listdir(at):  # noqa: PTH208 - a descriptor
                    part = _PART.fullmatch(name)
                    match = part or _BLOCK.fullmatch(name)
                    if match is None or match[1] != folder.name:
                        continue
                    with contextlib.suppress(OSError):  # another server was first
                        status = os.stat(name, dir_fd=at, follow_symlinks=False)
                        if part and status.st_mtime < limit:
                            os.unlink(name, dir_fd=at)
                        elif stat.S_ISREG(status.st_mode):
                            found.append((status.st_mtime, status.st_size, name))
        return found


def _lock(descriptor: int) -> None:
    end = time.monotonic() + _WAIT
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.001)


def _parse(counted: bytes) -> tuple[int, int]:
    """Return the bytes of a folder and when they were listed: never, if it is not told in this form."""
    match = re.fullmatch(rb"(\d{20}) (\d{20})\n", counted)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _open_regular(folder: int, name: str, flags: int) -> int:
    """Open a file of a folder, and nothing that would have to be waited for."""
    descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return descriptor
