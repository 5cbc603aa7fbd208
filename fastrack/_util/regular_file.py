"""Open regular files for reading, and refuse pipes, devices and files of unstable size."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file for reading; a pipe is refused rather than waited for.

    Raises
    ------
    IsADirectoryError
        If it is a directory.
    OSError
        If it is anything else than a regular file, such as a pipe or a device, or cannot be opened.
    """
    return _open(path, stat.S_ISREG)


def open_pipe_or_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file or a pipe for reading. A pipe that no process writes to is empty, and not waited for.

    Raises
    ------
    OSError
        If it is anything else, or cannot be opened.
    """
    file = _open(path, lambda mode: stat.S_ISREG(mode) or stat.S_ISFIFO(mode))
    os.set_blocking(file.fileno(), True)
    return file


def _open(path: str | os.PathLike[str], is_expected: Callable[[int], bool]) -> io.FileIO:
    file = io.FileIO(path, opener=_open_at_once)
    if not is_expected(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file; put what it gives into one first", os.fspath(path))
    return file


def _open_at_once(path: str | os.PathLike[str], flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def require_end(file: io.FileIO, size: int, path: str | os.PathLike[str]) -> None:
    """Raise if a file has more than `size` bytes, as files of /proc and growing files do.

    Raises
    ------
    OSError
        If a byte follows.
    """
    file.seek(size)
    if file.read(1):
        raise OSError(
            errno.EINVAL,
            f"expected {size} bytes as its size says, got more; copy it, and use the copy",
            os.fspath(path),
        )
