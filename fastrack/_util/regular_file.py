"""Open regular files for reading, and refuse pipes, devices and files of unstable size."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable

from fastrack._util.key_text import NOT_A_PATH, looks_secret
from fastrack._util.locations import require_local
from fastrack.errors import FormatError


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file for reading. A pipe is refused, and never waited for."""
    return _open(path, stat.S_ISREG)


def open_pipe_or_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file or a pipe for reading. A pipe without a writer reads as empty, and is not waited for."""
    file = _open(path, lambda mode: stat.S_ISREG(mode) or stat.S_ISFIFO(mode))
    os.set_blocking(file.fileno(), True)
    return file


def _open(path: str | os.PathLike[str], is_expected: Callable[[int], bool]) -> io.FileIO:
    name = os.fspath(path)
    require_local(name)
    try:
        file = io.FileIO(name, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    except IsADirectoryError:
        raise IsADirectoryError(errno.EISDIR, "expected a file, got a folder", name) from None
    except (OSError, ValueError):
        if not looks_secret(name):
            raise
    else:
        if not is_expected(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "not a regular file; put what it gives into one first", name)
        return file
    raise FormatError(NOT_A_PATH)  # outside the handler, so that its context is not the error with the path


def require_end(file: io.FileIO, size: int, path: str | os.PathLike[str]) -> None:
    """Raise OSError if a file has more than `size` bytes, like files of /proc and growing files."""
    file.seek(size)
    if file.read(1):
        message = f"expected {size} bytes as its size says, got more; copy it, and use the copy"
        raise OSError(errno.EINVAL, message, os.fspath(path))
