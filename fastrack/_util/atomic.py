"""Write files and folders atomically: they are complete and on disk before they get their names."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fastrack._util.key_text import refuse_key_text
from fastrack._util.locations import require_local

_DESCRIPTORS = "/proc/self/fd"
_UNNAMED: int = getattr(os, "O_TMPFILE", 0) if Path(_DESCRIPTORS).is_dir() else 0
_MAX_LINKS = 40
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_LARGE = 1 << 20


@contextlib.contextmanager
def new_file(path: Path, size: int = 0, *, mode: int = 0o666, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing that gets the name `path` when the block ends well, and vanishes if it does not.

    Until then it has no name (``O_TMPFILE``), where the file system supports that: no other user can open it, and
    nothing is left of it if the process is killed. Elsewhere it has a temporary name meanwhile.

    Space for `size` bytes is allocated first, where the file system supports that: a full disk is then detected before
    anything is written, and some file systems, such as ext4, write faster.

    A symbolic link at `path` that this user or root owns is followed; that of another user is refused, as are
    directories and special files. A new file has `mode`, before the umask, and one that replaces a file of this user
    has the mode of that. Without `overwrite` an existing file is kept, even one that appears meanwhile, and
    `FileExistsError` is raised.
    """
    require_local(path)
    refuse_key_text(path, may_be_id=True)
    if path.is_dir():
        message = "expected the path of a file, got a directory; name a file in it"
        raise IsADirectoryError(errno.EISDIR, message, str(path))
    path = path.parent.resolve() / path.name
    if overwrite:
        path = _follow(path)
    elif os.path.lexists(path):
        raise _exists(path)
    kept = _mode_to_keep(path)
    try:
        with _errors_of(path):
            descriptor, temporary = _create(path.parent, mode if kept is None else mode & 0o600)
        try:
            with io.FileIO(descriptor, "w") as raw:
                _allocate(descriptor, size)
                yield _CompleteWriter(raw)  # type: ignore[misc]
                if kept is not None:
                    os.fchmod(descriptor, kept)
                os.fsync(descriptor)
                if temporary is None:
                    temporary = _give_name(descriptor, path, overwrite=overwrite)
            if temporary is not None:
                _rename(temporary, path, overwrite=overwrite)
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            advice = f"{os.strerror(error.errno)}: free some space and try again; nothing was left of it"
            raise OSError(error.errno, advice, str(path)) from error
        raise
    sync_directory(path.parent)


@contextlib.contextmanager
def new_folder(path: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """Yield an empty folder that gets the name `path` when the block ends well, and vanishes if it does not.

    Until then it has a temporary name, which it keeps if the process is killed, and only this user can open it. Nothing
    is ever replaced. The files in it are on disk by then if `new_file` wrote them. It has `mode`, before the umask.
    """
    require_local(path)
    refuse_key_text(path, may_be_id=True)
    path = path.parent.resolve() / path.name
    if os.path.lexists(path):
        raise _exists(path)
    temporary = _temporary_name(path.parent)
    with _errors_of(path):
        temporary.mkdir(mode=mode)
    try:
        final_mode = stat.S_IMODE(temporary.stat().st_mode)
        temporary.chmod(0o700)
        yield temporary
        for folder, _, _ in os.walk(temporary, topdown=False):
            sync_directory(Path(folder))
        temporary.chmod(final_mode)
        try:
            temporary.rename(path)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                raise _exists(path) from None
            raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(path.parent)


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Have errors name this path, rather than the temporary one beside it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from None


def _follow(path: Path) -> Path:
    """Follow symbolic links that this user or root owns. Another user's link leads to a file of that user's choice."""
    for _ in range(_MAX_LINKS):
        try:
            before = path.lstat()
            if not stat.S_ISLNK(before.st_mode):
                return path
            if not is_trusted_owner(before):
                raise PermissionError(errno.EACCES, "expected no link of another user. Name the file itself", str(path))
            target = path.parent / path.readlink()
            after = path.lstat()
        except FileNotFoundError:
            return path
        if (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns):
            path = target
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def is_trusted_owner(status: os.stat_result) -> bool:
    """Return whether a file belongs to this user or to root."""
    return os.name != "posix" or status.st_uid in {os.geteuid(), 0}


def _mode_to_keep(path: Path) -> int | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "this is no ordinary file, and would be replaced by one; name another", str(path))
    return status.st_mode & 0o777 if is_trusted_owner(status) else None


def _create(directory: Path, mode: int) -> tuple[int, Path | None]:
    """Open an unnamed file, or else one with a temporary name; return its descriptor and that name, or None."""
    if _UNNAMED:
        with contextlib.suppress(OSError):  # file systems without O_TMPFILE; any other error comes again below
            return os.open(directory, os.O_WRONLY | os.O_CLOEXEC | _UNNAMED, mode), None
    temporary = _temporary_name(directory)
    return os.open(temporary, os.O_WRONLY | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), temporary


def _temporary_name(directory: Path) -> Path:
    return directory / f".fastrack-{secrets.token_hex(8)}.part"


def _give_name(descriptor: int, path: Path, *, overwrite: bool) -> Path | None:
    """Link an unnamed file to its name or, if a file has that name, to a temporary one; return that, or None."""
    try:
        _link(descriptor, path)
    except FileExistsError:
        if not overwrite:
            raise _exists(path) from None
        temporary = _temporary_name(path.parent)
        _link(descriptor, temporary)
        return temporary
    return None


def _link(descriptor: int, path: Path) -> None:
    # With a directory Python calls linkat, which can follow the link in /proc; link cannot.
    os.link(f"{_DESCRIPTORS}/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)


def _rename(temporary: Path, path: Path, *, overwrite: bool) -> None:
    """Rename a file, without replacing another one unless `overwrite`: a link never does, unlike a rename."""
    if not overwrite:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise _exists(path) from None
        except OSError:  # a file system without links: create an empty file of that name, then replace it
            try:
                path.touch(mode=0o600, exist_ok=False)
            except FileExistsError:
                raise _exists(path) from None
        else:
            return
    os.replace(temporary, path)  # noqa: PTH105


def _exists(path: Path) -> FileExistsError:
    advice = "exists and was left as it was. Choose another name, or move it away first"
    return FileExistsError(errno.EEXIST, advice, str(path))


class _CompleteWriter:
    """A raw file whose `write` writes everything, and starts writing large blocks to the disk at once."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._offset = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        done = 0
        while done < len(view):
            done += self._raw.write(view[done:])
        if done >= _LARGE and _sync_file_range is not None:  # `fsync` reports its errors
            _sync_file_range(self._raw.fileno(), self._offset, done, _WRITE)
        self._offset += done
        return done

    def flush(self) -> None:
        """Do nothing: no data is buffered."""


def _allocate(descriptor: int, size: int) -> None:
    """Allocate `size` bytes, where the file system supports it."""
    if size >= _LARGE and _fallocate is not None and _fallocate(descriptor, _KEEP_SIZE, 0, size):
        error = ctypes.get_errno()
        if error in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise OSError(error, os.strerror(error))


def _from_libc(name: str, *types: type) -> Any:
    """Return a function of the C library, or None outside 64-bit Linux, where its integers would be truncated."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = types
    return function


_fallocate = _from_libc("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_sync_file_range = _from_libc("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def sync_directory(directory: Path) -> None:
    """Write a directory to the disk, so that a new name lasts. A failure is ignored: the file itself is on disk."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
