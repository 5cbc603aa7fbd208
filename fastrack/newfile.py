"""A new file that is whole and on disk before anyone sees it under its name."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["new_file", "sync_directory"]


_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_LARGE = 1 << 20


@contextlib.contextmanager
def new_file(path: Path, size: int = 0) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends well, and vanishes if it does not.

    Room is made for `size` bytes first, if so many are known to come and the file system can: a disk that is too full
    is then found out before anything is written, and ext4, for one, is quicker so.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "this is a directory; name a file in it", str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "this is no ordinary file, and would be replaced by one; name another", str(path))
    path = path.resolve()  # a link stays, and the file it leads to is replaced
    temporary = path.with_name(f".fastrack-{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb", buffering=0) as raw:
            if path.exists():
                temporary.chmod(stat.S_IMODE(path.stat().st_mode))
            _make_room(raw.fileno(), size)
            yield _Whole(raw)  # type: ignore[misc]
            os.fsync(raw.fileno())
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: free some space and try again; nothing was left of it",
                str(path),
            ) from error
        raise
    sync_directory(path.parent)


class _Whole:
    """A raw file whose `write` writes everything. What is large is on its way to the disk while the next is made."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._place = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        done = 0
        while done < len(view):
            done += self._raw.write(view[done:])
        if done >= _LARGE and _sync_file_range is not None:  # what comes of it is told by `fsync`
            _sync_file_range(self._raw.fileno(), self._place, done, _WRITE)
        self._place += done
        return done

    def flush(self) -> None:
        """Nothing is held back."""


def _make_room(descriptor: int, size: int) -> None:
    """Set room aside, where the file system can."""
    if size < _LARGE or _fallocate is None:
        return
    if _fallocate(descriptor, _KEEP_SIZE, 0, size):
        problem = ctypes.get_errno()
        if problem in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise OSError(problem, os.strerror(problem))


def _from_libc(name: str, *types: type) -> Any:
    """A function of the C library on Linux, whose numbers of 64 bits would be cut short elsewhere."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = types
    return function


_fallocate = _from_libc("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_sync_file_range = _from_libc("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def sync_directory(directory: Path) -> None:
    """Make the new name last. The file is whole already, so a directory that cannot be synced is no failure."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
