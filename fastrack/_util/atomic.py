"""Write files atomically: they are complete and on disk before they get their names."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fastrack._util.key_text import refuse_key_text
from fastrack._util.locations import require_local
from fastrack._util.registry import IRREPLACEABLE
from fastrack._util.regular_file import open_regular
from fastrack._util.trial import end_dry_run
from fastrack.errors import ClosedError

DESCRIPTORS = "/proc/self/fd"
HAS_DESCRIPTORS = Path(DESCRIPTORS).is_dir()
_HELD = re.compile(rf"{DESCRIPTORS}/\d+(/.*)?", re.DOTALL)  # an open folder, which only the kernel resolves
_UNNAMED: int = getattr(os, "O_TMPFILE", 0) if HAS_DESCRIPTORS else 0
_MAX_LINKS = 40
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_LARGE = 1 << 20

_BEGINNING = 64  # bytes that show whether a file may be irreplaceable
_DOCUMENT = 16 << 20  # bytes of the largest irreplaceable file
_MARGIN = re.compile(rb"(\xef\xbb\xbf)?\s*")  # an editor may add these in front


@contextlib.contextmanager
def new_file(
    path: Path,
    size: int = 0,
    *,
    mode: int = 0o666,
    overwrite: bool = True,
    succeeds: Callable[[bytes], bool] | None = None,
) -> Iterator[BinaryIO]:
    """Open a file for writing that gets the name `path` when the block ends well, and vanishes if it does not.

    Until then the file has no name (``O_TMPFILE``) if the file system supports that: no other user can open it, and a
    killed process leaves nothing behind. On other file systems it has a temporary name.

    Space for `size` bytes is allocated first if the file system supports that: a full disk is then detected before
    the first write, and some file systems, such as ext4, write faster.

    A symbolic link at `path` is followed if this user or root owns it. Links of other users, directories and special
    files are refused. A new file has `mode`, before the umask; a file of this user keeps its mode when it is replaced.
    Without `overwrite` an existing file is kept, even a file that another process writes in between, and
    `FileExistsError` is raised. A key, an anchor or grants are always kept, unless `succeeds` returns True for their
    content because the new file is the next version.

    A child that is forked in the block leaves the file to its parent: a write, and the end of the block, is an error.
    """
    process = os.getpid()
    refuse_key_text(path, may_be_id=True)
    path = _resolve(path, overwrite=overwrite)
    kept = _mode_to_keep(path)
    require_replaceable(path, succeeds)
    end_dry_run(size)
    is_named = False
    try:
        with under_final_name(path):
            descriptor, temporary = _create(path.parent, mode if kept is None else mode & 0o600)
        try:
            with io.FileIO(descriptor, "w") as raw:
                _allocate(descriptor, size)
                out = OwnWriter(_CompleteWriter(raw))
                yield out  # type: ignore[misc]
                out.require_own()
                if kept is not None:
                    os.fchmod(descriptor, kept)
                os.fsync(descriptor)
                if temporary is None:
                    temporary = temporary_name(path.parent)  # ahead, so that an interrupted link leaves no file
                    is_named = _give_name(descriptor, path, temporary, overwrite=overwrite)
            if not is_named:
                if overwrite:  # another process may have written a key there since the first check
                    require_replaceable(path, succeeds)
                _rename(temporary, path, overwrite=overwrite)
        finally:
            if temporary is not None and os.getpid() == process:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            advice = f"{os.strerror(error.errno)}: free some space and try again; nothing was left of it"
            raise OSError(error.errno, advice, str(path)) from error
        raise
    sync_directory(path.parent)


def _resolve(path: Path, *, overwrite: bool) -> Path:
    """Return the path of a new file with all links resolved, or refuse the path."""
    require_local(path)
    if path.is_dir():
        message = "expected the path of a file, got a directory; name a file in it"
        raise IsADirectoryError(errno.EISDIR, message, str(path))
    path = path if _HELD.fullmatch(str(path.parent)) else path.parent.resolve() / path.name
    if overwrite:
        return _follow(path)
    if os.path.lexists(path):
        raise exists_already(path)
    return path


def require_replaceable(path: Path, succeeds: Callable[[bytes], bool] | None = None) -> None:
    """Raise FileExistsError if `path` is a key, an anchor or grants, unless `succeeds` accepts its content."""
    if not os.path.lexists(path):
        return
    try:
        with open_regular(path) as file:
            beginning = file.read(_BEGINNING)
            if not beginning[_MARGIN.match(beginning).end() :].startswith((b"{", b"#", b"fastrack-")):  # type: ignore[union-attr]
                return
            content = beginning + file.read(_DOCUMENT)
    except FileNotFoundError:
        return
    start = _MARGIN.match(content).end()  # type: ignore[union-attr]
    patterns = ((kind, re.compile(beginning, re.DOTALL)) for kind, beginning in IRREPLACEABLE.items())
    kind = next((kind for kind, pattern in patterns if pattern.match(content, start)), None)
    if kind is not None and (succeeds is None or not succeeds(content)):
        advice = f"holds {kind}, which nothing replaces, and was left as it was. Choose another name, or move it away"
        raise FileExistsError(errno.EEXIST, advice, str(path))


@contextlib.contextmanager
def under_final_name(path: Path) -> Iterator[None]:
    """Replace the temporary path in errors by the final path."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.parent.exists():
            raise FileNotFoundError(errno.ENOENT, "no such directory for it; make it first", str(path)) from None
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from None


def _follow(path: Path) -> Path:
    """Follow symbolic links that this user or root owns. Other users may change where their links lead."""
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
        if (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns):  # else it was replaced: look again
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
    """Open an unnamed file, or else a temporary file. Return its descriptor, and the temporary path or None."""
    if _UNNAMED:
        with contextlib.suppress(OSError):  # file systems without O_TMPFILE; the call below raises any other error
            return os.open(directory, os.O_WRONLY | os.O_CLOEXEC | _UNNAMED, mode), None
    temporary = temporary_name(directory)
    return os.open(temporary, os.O_WRONLY | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), temporary


def temporary_name(directory: Path) -> Path:
    return directory / f".fastrack-{secrets.token_hex(8)}.part"


def _give_name(descriptor: int, path: Path, temporary: Path, *, overwrite: bool) -> bool:
    """Link an unnamed file to `path`, or to a temporary path if `path` exists. Return whether it was not there."""
    try:
        _link(descriptor, path)
    except FileExistsError:
        if not overwrite:
            raise exists_already(path) from None
        _link(descriptor, temporary)
        return False
    return True


def _link(descriptor: int, path: Path) -> None:
    # With a directory Python calls linkat, which can follow the link in /proc; link cannot.
    os.link(f"{DESCRIPTORS}/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)


def _rename(temporary: Path, path: Path, *, overwrite: bool) -> None:
    """Rename a file. Without `overwrite` a link takes the place of the rename, since it never replaces a file."""
    if not overwrite:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise exists_already(path) from None
        except OSError:  # a file system without links: create an empty file at `path`, then replace it
            try:
                path.touch(mode=0o600, exist_ok=False)
            except FileExistsError:
                raise exists_already(path) from None
        else:
            return
    os.replace(temporary, path)  # noqa: PTH105


def exists_already(path: Path) -> FileExistsError:
    advice = "exists and was left as it was. Choose another name, or move it away first"
    return FileExistsError(errno.EEXIST, advice, str(path))


class OwnWriter:
    """A file that only the process that began it writes to.

    A forked child shares its place in the file, and would seal other bytes under the key and nonce of a chunk.
    """

    def __init__(self, out: Any) -> None:
        self._out = out
        self._process = os.getpid()

    def write(self, data: Any) -> Any:
        self.require_own()
        return self._out.write(data)

    def flush(self) -> None:
        """Do nothing: no data is buffered."""

    def require_own(self) -> None:
        """Raise ClosedError in a forked child."""
        if os.getpid() != self._process:
            raise ClosedError(
                "writing a file failed: expected the process that began it, got a child that it forked meanwhile. Let "
                "the parent end it, or write another one"
            )


class _CompleteWriter:
    """A raw file whose `write` writes all bytes and immediately starts to flush large blocks to the disk."""

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


def _allocate(descriptor: int, size: int) -> None:
    """Allocate `size` bytes if the file system supports it."""
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
    """Write a directory to the disk, so that a new name lasts. Failures are ignored: the file itself is on disk."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
