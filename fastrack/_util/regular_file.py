"""Open regular files for reading, and refuse pipes, devices and files of unstable size."""

from __future__ import annotations

import errno
import io
import os
import stat


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file for reading; a pipe is refused rather than waited for."""
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file; put what it gives into one first", os.fspath(path))
    return file


def require_end(file: io.FileIO, size: int, path: str | os.PathLike[str]) -> None:
    """Raise `OSError` if a file has more than `size` bytes, as files of /proc and growing files do."""
    file.seek(size)
    if file.read(1):
        message = f"expected {size} bytes as its size says, got more; copy it, and use the copy"
        raise OSError(errno.EINVAL, message, os.fspath(path))
