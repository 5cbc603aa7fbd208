"""The folder on the local disk that keeps ranges of remote files, as they are on their servers, within a bound.

A file of a server has two files here, whose names are a hash of its URL and version. One is as large as the file, but
sparse: it has the blocks that were read. The other is the index, one byte for each block, and the time of the last use
of each region. Processes share both. What is in them is not trusted: tags tell wrong bytes, and then they are dropped.

A region in use is locked, by a byte of the file `lock`. Regions that were used least recently are evicted when there is
too much: their blocks are marked as absent, and their place in the file becomes a hole. The maps of the file stay
valid. An entry that is open is locked too, by a byte of the file `open`. One without blocks that no process has open is
removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastrack._remote.blocks import BLOCK
from fastrack._remote.locks import Lease, Locks
from fastrack._remote.objects import Version
from fastrack._tensors.arrays import Bytes
from fastrack._tensors.mapped_file import map_file
from fastrack._util.fork import register_fork_reset
from fastrack._util.locations import Url
from fastrack._util.rights import require_own
from fastrack._util.units import format_size
from fastrack.errors import ClosedError

VARIABLE = "FASTRACK_CACHE_DIR"
SIZE_VARIABLE = "FASTRACK_CACHE_SIZE"
REGION = 1 << 26  # bytes that are locked, and evicted, together
_BLOCKS = REGION // BLOCK
_MAGIC = b"fastrack ranges1"
_SIZE = re.compile(r"(\d{1,6})([KMGT])i?B?", re.IGNORECASE)
_UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}
_PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE
_SCAN_AFTER = 64  # the bytes kept are counted again when this part of the bound was added
_PIECE = 1 << 16  # bytes of an index that are read at a time
_PAUSES = (0, 0.01, 0.1, 0.5)  # seconds: another thread may be about to let go of what its call has used
_KEEP_FREE = 10  # a call that has to evict evicts this part of the bound as well

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(frozen=True, slots=True)
class Entry:
    """The two files of one version of a remote file, both mapped.

    inodes : those of the file with the blocks, and of the index
    lease : keeps the entry from being removed
    first_lock : the byte of the lock file that stands for the first region; those of others follow
    flags : one byte for each block, 1 if it is present
    """

    path: Path
    size: int
    inodes: tuple[int, int]
    lease: Lease
    first_lock: int
    content: Bytes
    stamps: np.ndarray[tuple[int], np.dtype[np.uint32]]
    flags: memoryview

    def open_data(self) -> int:
        """Return a descriptor of the file with the blocks, to write to."""
        return self._open(self.path, self.inodes[0])

    def open_index(self) -> int:
        """Return a descriptor of the index, to write to."""
        return self._open(self.path.with_suffix(".index"), self.inodes[1])

    def _open(self, path: Path, inode: int) -> int:
        """Open one of the files that are mapped, and no other that has its name by now."""
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            if os.fstat(descriptor).st_ino == inode:
                return descriptor
            os.close(descriptor)
        raise ClosedError(f"{self.path} was removed from the cache. Open its remote file, or the data set, again")

    def write_flags(self, index: int, blocks: range, value: int) -> None:
        """Mark blocks as present or absent, by a descriptor of the index."""
        os.pwrite(index, bytes([value]) * len(blocks), _flags_start(self.size) + blocks.start)

    def write_stamp(self, index: int, region: int, now: int) -> None:
        """Note when a region was used, by a descriptor of the index."""
        os.pwrite(index, now.to_bytes(4, "little"), _START + 4 * region)


class _Region(NamedTuple):
    """A region with blocks: the time of its last use, the path of the index, its number, and the size of the file."""

    used: int
    path: Path
    number: int
    size: int


class Cache:
    """The entries of a folder. There is one object for each folder in a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        _make_private(folder)
        self._added = 0
        self._kept: int | None = None
        self._regions = Locks(folder / "lock")
        self._entries = Locks(folder / "open", is_inherited=True)
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Forget what the parent's threads do."""
        self._mutex = threading.Lock()

    def open(self, url: Url, version: Version) -> Entry:
        """Return the entry of a version of a file. One that cannot be told from others is shared with no one."""
        require_own(self._folder)  # again, as paths are resolved again: rights may have changed
        told = version.validator or secrets.token_hex(16)
        identity = "\0".join((url.full, told, str(version.size), _boot_id()))
        digest = sha256(identity.encode("utf-8", "surrogatepass")).digest()
        data, index = (self._folder / f"{digest[:20].hex()}.{kind}" for kind in ("data", "index"))
        start = _flags_start(version.size)
        size = start + _count(version.size, BLOCK)
        lease = self._entries.share([_entry_lock(digest)])  # before there is anything to remove
        _make_sparse(index, size, _MAGIC + version.size.to_bytes(8, "little"))
        _make_sparse(data, version.size, b"")
        described, index_inode = _map(index, size)
        content, data_inode = _map(data, version.size)
        stamps = described[_START:start].view(np.uint32)
        inodes = data_inode, index_inode
        first = _first_lock(digest)
        return Entry(data, version.size, inodes, lease, first, content, stamps, described[start:].data)

    def lease(self, entry: Entry, regions: Iterable[int]) -> Lease:
        """Keep regions from being evicted, by any process, as long as the object that is returned is alive."""
        return self._regions.share([entry.first_lock + region for region in regions])

    def touch(self, entry: Entry, regions: Iterable[int]) -> None:
        """Note that regions were used."""
        now = int(time.time())
        old = [region for region in regions if now - int(entry.stamps[region]) > 1]
        if old:
            index = entry.open_index()
            try:
                for region in old:
                    entry.write_stamp(index, region, now)
            finally:
                os.close(index)

    def reserve(self, missing: int, needed: int) -> None:
        """Make room for `missing` bytes of the `needed` ones of a call: evict what was used least recently."""
        with self._mutex:
            bound = self._bound()
            if self._kept is None or self._added > bound // _SCAN_AFTER:
                self._count()
            assert self._kept is not None
            if self._kept + self._added + missing > bound:
                for pause in _PAUSES if needed <= bound else ():
                    time.sleep(pause)
                    self._evict(bound, max(needed, bound // _KEEP_FREE))
                    if self._kept + missing <= bound:
                        break
                if self._kept + missing > bound or needed > bound:
                    raise OSError(
                        errno.ENOSPC,
                        f"one call needs {format_size(needed)}, but the cache may keep {format_size(bound)} and others "
                        f"use {format_size(self._kept)}; open less at once, or raise {SIZE_VARIABLE}",
                        str(self._folder),
                    )
            self._added += missing

    def _bound(self) -> int:
        text = os.environ.get(SIZE_VARIABLE)
        if text:
            match = _SIZE.fullmatch(text)
            if match is None:
                raise ValueError(f"{SIZE_VARIABLE}: expected a size such as 500M or 100G, got {text!r:.40}")
            return int(match[1]) << _UNITS[match[2].upper()]
        if self._kept is None:
            self._count()
        assert self._kept is not None
        return (shutil.disk_usage(self._folder).free + self._kept) // 2

    def _count(self) -> None:
        """Count the bytes that the folder keeps."""
        kept = 0
        with os.scandir(self._folder) as files:
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    kept += file.stat(follow_symlinks=False).st_blocks * 512
        self._kept, self._added = kept, 0

    def _evict(self, bound: int, room: int) -> None:
        """Evict regions that no call uses until there is `room` within the bound, or none is left."""
        with self._eviction():
            self._count()
            assert self._kept is not None
            candidates = []
            for path in self._folder.glob("*.index"):
                with contextlib.suppress(OSError, ValueError):
                    candidates += _list_regions(path) or self._remove(path)
            for _, path, region, size in sorted(candidates, key=lambda one: one[0]):
                if self._kept <= max(bound - room, 0):
                    break
                with contextlib.suppress(FileNotFoundError):
                    self._kept -= self._evict_region(path, region, size)

    @contextlib.contextmanager
    def _eviction(self) -> Iterator[None]:
        """Let one process evict at a time."""
        descriptor = os.open(self._folder / "evict", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _remove(self, index: Path) -> list[_Region]:
        """Remove an entry, unless it is open or has blocks by now, and return its regions with blocks."""
        with self._entries.alone(_entry_lock(bytes.fromhex(index.stem))) as is_alone:
            regions = _list_regions(index)
            if is_alone and not regions:
                index.with_suffix(".data").unlink(missing_ok=True)
                index.unlink()
        return regions

    def _evict_region(self, path: Path, region: int, size: int) -> int:
        """Make a region a hole, unless a call uses it, and return the number of bytes that were freed."""
        with self._regions.alone(_first_lock(bytes.fromhex(path.stem)) + region) as is_alone:
            if not is_alone:
                return 0
            data = os.open(path.with_suffix(".data"), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            index = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                count = min(_BLOCKS, _count(size, BLOCK) - region * _BLOCKS)
                before = os.fstat(data).st_blocks
                os.pwrite(index, bytes(count), _flags_start(size) + region * _BLOCKS)
                if _LIBC.fallocate(data, _PUNCH_HOLE, region * REGION, REGION):
                    code = ctypes.get_errno()
                    advice = f"the file system of the cache cannot free parts of files; name another with {VARIABLE}"
                    raise OSError(code, advice, str(self._folder))
                return (before - os.fstat(data).st_blocks) * 512
            finally:
                os.close(data)
                os.close(index)


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
    """Make a folder that only this user can use: what it holds may be unencrypted, or unauthenticated."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    require_own(folder)
    if (mode := folder.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermissionError(
            errno.EACCES,
            f"expected a folder that this user alone may read, got mode {stat.S_IMODE(mode):04o}. Remove it, or name "
            f"another with {VARIABLE}",
            str(folder),
        )


def _make_sparse(path: Path, size: int, prefix: bytes) -> None:
    """Make a file of holes after a prefix, unless it is there; replace one that is no such file."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size == size and _begins_with(path, prefix):
            return
        path.unlink(missing_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, prefix, 0)
        try:
            os.ftruncate(descriptor, size)
        except OSError as error:
            advice = f"a file of {size} bytes, as its server says, does not fit; name another folder with {VARIABLE}"
            raise OSError(error.errno, advice, str(path.parent)) from None
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(temporary, path)
    finally:
        os.close(descriptor)
        temporary.unlink()


def _begins_with(path: Path, prefix: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(prefix)) == prefix


def _map(path: Path, size: int) -> tuple[Bytes, int]:
    """Map a file, and return its inode as well."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return map_file(descriptor, size) if size else np.empty(0, np.uint8), os.fstat(descriptor).st_ino
    finally:
        os.close(descriptor)


# The index: magic, size of the file, times of the last use of regions, presence of blocks.

_START = len(_MAGIC) + 8


def _flags_start(size: int) -> int:
    return _START + 4 * _count(size, REGION)


def _count(size: int, unit: int) -> int:
    return -(-size // unit)


def _list_regions(path: Path) -> list[_Region]:
    """Return the regions with blocks by an index, of which no more is read than was written."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = _size_of(descriptor)
        start = position = _flags_start(size)
        regions: set[int] = set()
        with contextlib.suppress(OSError):  # at the end
            while True:
                position = os.lseek(descriptor, position, os.SEEK_DATA)
                flags = np.frombuffer(os.pread(descriptor, _PIECE, position), np.uint8)
                regions |= set(np.unique((np.flatnonzero(flags) + (position - start)) // _BLOCKS).tolist())
                position += flags.size
        stamps = [os.pread(descriptor, 4, _START + 4 * region) for region in regions]
        return [
            _Region(int.from_bytes(stamp, "little"), path, number, size)
            for stamp, number in zip(stamps, regions, strict=True)
        ]
    finally:
        os.close(descriptor)


def _size_of(descriptor: int) -> int:
    """Return the size of the file that an index is of."""
    head = os.pread(descriptor, _START, 0)
    size = int.from_bytes(head[len(_MAGIC) :], "little")
    if head[: len(_MAGIC)] != _MAGIC or os.fstat(descriptor).st_size != _flags_start(size) + _count(size, BLOCK):
        raise ValueError("no index")
    return size


def _entry_lock(digest: bytes) -> int:
    """Return the byte of the file `open` of an entry."""
    return int.from_bytes(digest[:7], "little")


def _first_lock(digest: bytes) -> int:
    """Return the byte of the lock file of the first region. Regions are counted in the lowest 22 bits."""
    return int.from_bytes(digest[:5], "little") + 1 << 22


def _boot_id() -> str:
    """Return what tells this boot of the machine from others: a block that is present may be lost when it crashes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return ""
