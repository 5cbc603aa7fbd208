"""Open regular files for reading, and refuse what only looks like one."""

from __future__ import annotations

import errno
import io
import os
import stat


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file for reading, without waiting for the other end of a pipe.

    Raises
    ------
    IsADirectoryError
        If it is a directory.
    OSError
        If it is a pipe, a device or anything else than a regular file, or cannot be opened.
    """
    file = io.FileIO(path, opener=_open_at_once)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file; put what it gives into one first", os.fspath(path))
    return file


def _open_at_once(path: str | os.PathLike[str], flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def require_end(file: io.FileIO, size: int, path: str | os.PathLike[str]) -> None:
    """Refuse a file that gives more bytes than its size says, as files of /proc do, and files that grow.

    Raises
    ------
    OSError
        Then.
    """
    file.seek(size)
    if file.read(1):
        raise OSError(
            errno.EINVAL,
            f"expected {size} bytes as its size says, got more; copy it, and use the copy",
            os.fspath(path),
        )
