"""The folder on the local disk that keeps unchanged blocks of remote files, within a bound.

A version of a remote file has one file here, whose name is a hash of its URL and version. It is as large as the remote
file, but sparse: it has the blocks that were read. Behind them are a flag for each block, 1 if it is present; a flag
for each group of blocks, 1 if one of them was present; and a mark. Processes share the file. Its content is not
trusted: blocks that fail authentication are dropped.

Above the bound, the files that were used least recently are removed, open or not. The kernel keeps mapped memory, so a
running call continues on the removed file. The file has lost its mark, and the next call begins another file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import threading
import time
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from fastrack._remote.blocks import BLOCK
from fastrack._remote.objects import Version
from fastrack._tensors.mapped_file import map_file
from fastrack._util.cpus import read_system
from fastrack._util.fork import per_process
from fastrack._util.locations import Url
from fastrack._util.rights import make_own, require_own
from fastrack._util.shown import format_size

VARIABLE = "FASTRACK_CACHE_DIR"
SIZE_VARIABLE = "FASTRACK_CACHE_SIZE"
_MARK = b"fastrack blocks3"
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # a crash may lose blocks that are flagged as present
_SIZE = re.compile(r"(\d{1,6})([KMGT])i?B?", re.IGNORECASE)
_UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}
_GROUP = 4096  # blocks: up to here checking all flags is quicker than checking some
_TOUCH_AFTER = 1.0  # seconds between two notes of the last use
_SCAN_AFTER = 64  # the bytes kept are counted again when this part of the bound was added
_KEEP_FREE = 10  # a call that has to evict evicts this part of the bound as well
_allocate = getattr(os, "posix_fallocate", lambda *_: None)  # macOS has neither it nor a tmpfs


class CachedFile:
    """The mapped file with the present blocks of a remote file. It stays usable after eviction.

    content : the bytes of the remote file, where they are present
    """

    __slots__ = ("_flags", "_groups", "_inode", "_is_lost", "_mark", "_path", "_used_at", "content", "size")

    def __init__(self, path: Path, size: int, descriptor: int) -> None:
        mapped = map_file(descriptor, _end(size))
        self.size = size
        self.content = mapped[:size]
        self._flags = mapped[size : _groups_at(size)].data
        self._groups = mapped[_groups_at(size) : -len(_MARK)].data
        self._mark = mapped[-len(_MARK) :].data
        self._path = path
        self._inode = os.fstat(descriptor).st_ino
        self._is_lost = False
        self._used_at = 0.0

    @property
    def is_evicted(self) -> bool:
        """True if a new file has to be begun in place of this one, in any process."""
        return self._is_lost or not self._mark[0]

    @property
    def is_complete(self) -> bool:
        """True if every block is present. Only checked for files of up to 1 GiB."""
        return len(self._flags) <= _GROUP and not self.flags(0, len(self._flags)).count(0)

    def flags(self, start: int, stop: int) -> bytes:
        """Return a byte for each of some blocks, 1 if it is present.

        Only what has its place is read: on tmpfs to read a hole takes memory, and without any ends the process.
        """
        group = start // _GROUP
        if start < stop <= (group + 1) * _GROUP:
            return bytes(self._flags[start:stop] if self._groups[group] else stop - start)
        numbers = range(group, -(-stop // _GROUP)) if start < stop else ()
        return b"".join(self.flags(max(start, each * _GROUP), min(stop, (each + 1) * _GROUP)) for each in numbers)

    def touch(self) -> bool:
        """Note that the file is used, by the time of its last modification. Return False if it was evicted."""
        now = time.monotonic()
        if now - self._used_at > _TOUCH_AFTER:
            self._used_at = now
            try:
                status = os.lstat(self._path)  # also of its size: to read what another program cut ends the process
                self._is_lost |= (status.st_ino, status.st_size) != (self._inode, _end(self.size))
                os.utime(self._path, follow_symlinks=False)
            except FileNotFoundError:  # removed by another program, which sets no mark
                self._is_lost = True
        return not self.is_evicted

    def open_writer(self) -> Writer | None:
        """Open the mapped file for writing, but no newer file of its name. Return None if it lost its name."""
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)  # glibc reads to allocate on NFS
            writer = Writer(descriptor, self.size)
            if os.fstat(descriptor).st_ino == self._inode:
                return writer
        self._is_lost = True
        return None


class Writer:
    """A descriptor of an entry to write to, which is closed with this object: after the last download that uses it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._close = os.close  # still bound while the interpreter shuts down

    def write(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._descriptor, view, offset)
            view, offset = view[count:], offset + count

    def mark(self, blocks: range, value: int = 1) -> None:
        """Mark blocks as present or absent."""
        if blocks:
            groups, end = range(blocks.start // _GROUP, -(-blocks.stop // _GROUP)), _groups_at(self._size)
            first = self._size + groups.start * _GROUP
            _allocate(self._descriptor, first, min(self._size + groups.stop * _GROUP, end) - first)
            os.pwrite(self._descriptor, b"\1" * len(groups), end + groups.start)  # once there is a place for all flags
            os.pwrite(self._descriptor, bytes([value]) * len(blocks), self._size + blocks.start)

    def __del__(self) -> None:
        self._close(self._descriptor)


class _User(Protocol):
    """An object that holds an entry, and releases it after eviction."""

    def release_evicted(self) -> None: ...


class Cache:
    """The entries of a folder. There is one object for each folder in a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        _make_private(folder)
        self._added = 0
        self._kept: int | None = None
        self._users: WeakSet[_User] = WeakSet()
        self._mutex = per_process(self, "_mutex", threading.Lock)

    def add_user(self, user: _User) -> None:
        """Register an object that releases evicted entries: a map keeps its place on the disk."""
        with self._mutex:
            self._users.add(user)

    def open(self, url: Url, version: Version) -> CachedFile:
        """Return the entry of a version of a file. A version without a validator is not shared."""
        _make_private(self._folder)  # again, because permissions may have changed, or the folder was removed
        told = version.validator or secrets.token_hex(16)
        identity = "\0".join((url.full, told, str(version.size), read_system(_BOOT)))
        path = self._folder / f"{sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:40]}.data"
        while True:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                _make_sparse(path, version.size)
                continue
            try:
                if _is_whole(descriptor, version.size):
                    return CachedFile(path, version.size, descriptor)
            finally:
                os.close(descriptor)
            with contextlib.suppress(FileNotFoundError):  # another process was first
                _remove(path)

    def reserve(self, missing: int, needed: int) -> None:
        """Make room for `missing` bytes of the `needed` ones of a call: evict the least recently used files."""
        with self._mutex:
            bound = self._bound()
            if self._kept is None or self._added > bound // _SCAN_AFTER:
                self._scan()
            assert self._kept is not None
            if self._kept + self._added + missing > bound:
                if needed > bound:
                    raise OSError(
                        errno.ENOSPC,
                        f"one call needs {format_size(needed)}, but the cache may keep {format_size(bound)}; open less "
                        f"at once, or raise {SIZE_VARIABLE}",
                        str(self._folder),
                    )
                self._evict(min(bound - missing, bound - bound // _KEEP_FREE))
            self._added += missing

    def bound(self) -> int:
        """Return the bytes that the folder may keep."""
        with self._mutex:
            return self._bound()

    def _bound(self) -> int:
        _make_private(self._folder)  # the folder may have been removed
        text = os.environ.get(SIZE_VARIABLE)
        if text:
            match = _SIZE.fullmatch(text)
            if match is None:
                raise ValueError(f"{SIZE_VARIABLE}: expected a size such as 500M or 100G, got {text!r:.40}")
            return int(match[1]) << _UNITS[match[2].upper()]
        if self._kept is None:
            self._scan()
        assert self._kept is not None
        return (shutil.disk_usage(self._folder).free + self._kept) // 2

    def _scan(self) -> list[tuple[int, int, Path]]:
        """Count the bytes that the folder keeps. Return the last use of each file, its bytes, and its path."""
        files = []
        with os.scandir(self._folder) as entries:
            for file in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):  # anything else is not the cache's to remove
                        files.append((status.st_mtime_ns, status.st_blocks * 512, Path(file.path)))
        self._kept, self._added = sum(size for _, size, _ in files), 0
        for user in self._users:
            user.release_evicted()  # by other processes
        return files

    def _evict(self, goal: int) -> None:
        """Remove files, those used least recently first, until the folder keeps no more than `goal` bytes."""
        files = sorted(self._scan())
        assert self._kept is not None
        for _, size, path in files:
            if self._kept <= goal:
                break
            with contextlib.suppress(FileNotFoundError):  # another process was first
                _remove(path)
            self._kept -= size
        for user in self._users:
            user.release_evicted()


def open_cache() -> Cache:
    """Return the cache of this process, in the folder that the environment names."""
    return _open_cache(_folder())


@cache
def _open_cache(folder: Path) -> Cache:
    return Cache(folder)


def _folder() -> Path:
    chosen = os.environ.get(VARIABLE) or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.path.expanduser(chosen))  # noqa: PTH111 - without a home it would raise
    if str(folder).startswith("~"):
        raise FileNotFoundError(
            errno.ENOENT, f"no folder to keep ranges of remote files in; name one with {VARIABLE}", str(folder)
        )
    return folder.absolute() / "fastrack" / "remote"


def _make_private(folder: Path) -> None:
    """Make a folder that only this user can use: its content may be unencrypted, or unauthenticated."""
    make_own(folder)
    require_own(folder)
    if (mode := folder.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermissionError(
            errno.EACCES,
            f"expected a folder that only this user may read, got mode {stat.S_IMODE(mode):04o}. Remove it, or name "
            f"another with {VARIABLE}",
            str(folder),
        )


def _groups_at(size: int) -> int:
    """Return where the flags of groups begin: behind the content and a flag for each block."""
    return size - (-size // BLOCK)


def _end(size: int) -> int:
    """Return the size of the file of an entry: the content, the flags of blocks and groups, and the mark."""
    return _groups_at(size) - (-size // (BLOCK * _GROUP)) + len(_MARK)


def _make_sparse(path: Path, size: int) -> None:
    """Try to make the file of an entry without blocks."""
    temporary = path.with_name(f".{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            _allocate(descriptor, _groups_at(size), _end(size) - _groups_at(size))
            os.pwrite(descriptor, _MARK, _end(size) - len(_MARK))
        except OSError as error:
            advice = f"a file of {size} bytes, as its server says, does not fit; name another folder with {VARIABLE}"
            raise OSError(error.errno, advice, str(path.parent)) from None
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # another process made it, or evicted everything
            os.link(temporary, path)
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def _is_whole(descriptor: int, size: int) -> bool:
    status = os.fstat(descriptor)
    is_one = stat.S_ISREG(status.st_mode) and status.st_size == _end(size)
    return is_one and os.pread(descriptor, len(_MARK), _end(size) - len(_MARK)) == _MARK


def _remove(path: Path) -> None:
    """Remove a file, and its mark, so that all processes that have it open know."""
    doomed = path.with_name(f".{secrets.token_hex(8)}")
    path.rename(doomed)  # first, so that the marked file is the removed one
    try:
        with contextlib.suppress(OSError):  # a pipe has no mark, and `touch` also notices a removed file
            descriptor = os.open(doomed, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.pwrite(descriptor, bytes(len(_MARK)), max(os.fstat(descriptor).st_size - len(_MARK), 0))
            finally:
                os.close(descriptor)
    finally:
        doomed.unlink()
