"""A new file that is whole and on disk before anyone sees it under its name."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["new_file", "sync_directory"]


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends well, and vanishes if it does not."""
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
    """A raw file whose `write` writes everything."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        done = 0
        while done < len(view):
            done += self._raw.write(view[done:])
        return done

    def flush(self) -> None:
        """Nothing is held back."""


def sync_directory(directory: Path) -> None:
    """Make the new name last. The file is whole already, so a directory that cannot be synced is no failure."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
