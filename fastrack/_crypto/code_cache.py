"""Keep object code on disk, where only this user and root can write to it: it runs in every process that finds it.

After a first line a file has one of JSON, the *key* of the code with its digest, and then the code. The key names all
that the code depends on; a file with another key, or one that is cut short or altered, is not used, and replaced.
"""

from __future__ import annotations

import json
import os
import stat
import warnings
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from fastrack._util.atomic import is_trusted_owner, new_file

VARIABLE = "FASTRACK_CACHE_DIR"

_MAGIC = b"\0fastrack code 1\n"  # with a zero, so that nothing takes a file for text
_MAX_SIZE = 64 << 20
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

Key = Mapping[str, object]


def folders() -> list[Path]:
    """Return the folders to look for code in; new code is written to the first that can be written to.

    They are that of the environment variable `FASTRACK_CACHE_DIR`, or else one in the package, and one of the user.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        folder = Path(os.path.expanduser(chosen)) / "fastrack"  # noqa: PTH111 - without a home it would raise
        with suppress(FileNotFoundError):  # there is no absolute path in a working directory that was removed
            folder = folder.absolute()
        return [folder]
    package = Path(__file__).parents[1] / "__pycache__" / "code"
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111
    return [package, user / "fastrack"] if user.is_absolute() else [package]  # a container's user may have no home


def read(name: str, key: Key) -> tuple[bytes, Path] | None:
    """Return the code in the file `name` of the first folder that has it under `key`, and the path of that file."""
    for folder in folders():
        path = folder / name
        try:
            data = _read_trusted(path)
        except OSError:
            continue
        _, _, code = data.removeprefix(_MAGIC).partition(b"\n")
        if data == _head(key, code) + code:
            return code, path
    return None


def write(name: str, key: Key, code: bytes) -> Path:
    """Write code to the file `name`, in the first folder that can be written to, and return its path.

    Raise the OSError of the first folder if there is none.
    """
    errors = []
    for folder in folders():
        path = folder / name
        try:
            _make_folder(folder)
            path.unlink(missing_ok=True)  # a new file would keep the mode of the one that it replaces
            with new_file(path, mode=0o644) as file:
                file.write(_head(key, code) + code)
        except OSError as error:
            errors.append(error)
        else:
            return path
    raise errors[0]


def writable_folder() -> Path | None:
    """Return the first folder that code can be written to, or None. Nothing is made or written."""
    for folder in folders():
        existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110 - as for `~`
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            continue
        if existing == folder and not _is_trusted(folder.stat()):
            continue
        if all(map(_is_trusted, _links(existing).values())):
            return folder
    return None


def _head(key: Key, code: bytes) -> bytes:
    text = json.dumps({**key, "sha256": sha256(code).hexdigest()}, sort_keys=True)
    return _MAGIC + text.encode() + b"\n"


def _make_folder(folder: Path) -> None:
    """Make a folder that others may read and only this user may write to, whatever the umask."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o755, exist_ok=True)
    _require_trusted(folder, folder.stat())
    _require_trusted_links(folder)


def _read_trusted(path: Path) -> bytes:
    """Read a file, after a check that none but this user and root could have written it or put it there."""
    if os.name != "posix":
        return path.read_bytes()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _require_trusted(path.parent, os.fstat(folder))
        _require_trusted_links(path.parent)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path.name, flags, dir_fd=folder), "rb") as file:
            status = os.fstat(file.fileno())
            _require_trusted(path, status)
            return file.read(_MAX_SIZE) if stat.S_ISREG(status.st_mode) else b""
    finally:
        os.close(folder)


def _require_trusted(path: Path, status: os.stat_result) -> None:
    """Raise PermissionError, after a warning, if others may have written to a file or folder."""
    if _is_trusted(status):
        return
    message = (
        f"compiled code in {path} is not used: expected what only this user or root can write to, got mode "
        f"{stat.S_IMODE(status.st_mode):04o} and owner {status.st_uid}. Remove it, or set {VARIABLE} to another folder"
    )
    warnings.warn(message, RuntimeWarning, stacklevel=2)
    raise PermissionError(message)


def _require_trusted_links(folder: Path) -> None:
    """Raise PermissionError, after a warning, if another user made a symbolic link that the path goes through.

    It may lead to files of this user that others have written, such as an unpacked archive.
    """
    for path, status in _links(folder).items():
        _require_trusted(path, status)


def _links(folder: Path) -> dict[Path, os.stat_result]:
    """Return the symbolic links that a path goes through."""
    statuses = {path: path.lstat() for path in (folder, *folder.parents)}
    return {path: status for path, status in statuses.items() if stat.S_ISLNK(status.st_mode)}


def _is_trusted(status: os.stat_result) -> bool:
    if os.name != "posix" or stat.S_ISLNK(status.st_mode):  # the mode of a link means nothing
        return is_trusted_owner(status)
    return is_trusted_owner(status) and not status.st_mode & _WRITABLE_BY_OTHERS
