"""Refuse trusted files that another user may replace or write to."""

from __future__ import annotations

import functools
import io
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from fastrack._util.atomic import is_trusted_owner, new_file
from fastrack._util.key_text import refuse_key_text
from fastrack._util.locations import require_path
from fastrack._util.regular_file import open_regular
from fastrack.errors import KeyPermissionError

_MAX_LINKS = 40
_OVERFLOW_UID = 65534  # stands for every user that a user namespace does not map, including root
_ALL_MAPPED = ["0", "0", "4294967295"]


def open_own(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file that no other user may write to or replace."""
    file = open_regular(path)
    try:
        require_own(path, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def require_own(path: str | os.PathLike[str], status: os.stat_result | None = None) -> None:
    """Raise KeyPermissionError if a user other than this one and root owns, may write to or may replace a path.

    A user may replace a file or folder by owning a link on the way to it, or by owning or writing to a folder above
    it; write access to a folder with the sticky bit, such as ``/tmp``, does not count. `status` is the status of an
    open file. Nothing is checked on systems without such rights.
    """
    if os.name != "posix":
        return
    path = Path(path)
    _require(path, path, path.stat() if status is None else status)
    require_own_folder(path)


def new_own_file(path: str | os.PathLike[str], *, mode: int = 0o600) -> AbstractContextManager[BinaryIO]:
    """Open a new file like `new_file`, where `require_own` will take it. No file is ever replaced."""
    name = require_path(path)
    refuse_key_text(name, may_be_id=True)
    require_own_folder(name)
    return new_file(Path(name), mode=mode, overwrite=False)


def require_own_folder(path: str | os.PathLike[str]) -> None:
    """Raise KeyPermissionError if `require_own` would refuse a new file of this name, for the folders above it."""
    if os.name != "posix":
        return
    path = Path(path)
    for parent, above in _way(path.absolute(), _MAX_LINKS):
        if not (above.st_uid == _OVERFLOW_UID and _is_root_unmapped()):
            _require(path, parent, above)


def make_own(folder: Path, mode: int = 0o700) -> None:
    """Make a folder that no other user may write to, and those above it that are missing, whatever the umask."""
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode, exist_ok=True)


def _way(path: Path, links: int) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the folders and links that lead to an absolute path, each with its status, from the root on.

    The order matters: once no other user can replace a folder, its entries are the ones that this process opened.
    """
    for part in (*reversed(path.parents), path):
        try:
            status = part.lstat()
        except FileNotFoundError:  # a link of /proc to an unnamed file, such as a pipe
            return
        is_link = stat.S_ISLNK(status.st_mode)
        if is_link or part != path:
            yield part, status
        if is_link and links:
            yield from _way(part.parent / part.readlink(), links - 1)


def _require(path: Path, place: Path, status: os.stat_result) -> None:
    is_above = place is not path
    if is_trusted_owner(status) and not _others_may_write(place, status, is_above=is_above):
        return
    raise KeyPermissionError(
        f"{path} may be replaced by others on this machine: expected {place if is_above else 'it'} to belong to uid "
        f"{f'{user} or 0' if (user := os.geteuid()) else 0}, the only user who may write, got uid {status.st_uid} and "
        f"mode {stat.S_IMODE(status.st_mode):04o}. Look at what it holds, and then "
        + (f"chmod go-w {place}" if is_trusted_owner(status) else "copy it to a folder of your own")
    )


def _others_may_write(place: Path, status: os.stat_result, *, is_above: bool) -> bool:
    mode = status.st_mode
    if stat.S_ISLNK(mode) or (is_above and mode & stat.S_ISVTX):
        return False
    return bool(mode & stat.S_IWOTH) or (bool(mode & stat.S_IWGRP) and not _is_alone(place, status.st_gid))


def _is_alone(place: Path, group: int) -> bool:
    """Return whether a group has no member but this user and root, which is usual with the umask 002."""
    # The mode shows the rights of an access control list as rights of the group.
    has_list = hasattr(os, "listxattr") and "system.posix_acl_access" in os.listxattr(place)
    return not has_list and _members(group) <= {os.geteuid(), 0}


@functools.cache
def _members(group: int) -> set[int]:
    import grp
    import pwd

    try:
        named = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        return {-1}  # its members are unknown
    return {user.pw_uid for user in pwd.getpwall() if user.pw_gid == group or user.pw_name in named}


@functools.cache
def _is_root_unmapped() -> bool:
    """Return whether this user namespace maps no number to the machine's root."""
    try:
        return Path("/proc/self/uid_map").read_text(encoding="ascii").split() != _ALL_MAPPED
    except OSError:
        return False
