"""Make folders atomically: they are complete and on disk before they get their names."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fastrack._util import atomic
from fastrack._util.key_text import refuse_key_text
from fastrack._util.locations import require_local
from fastrack._util.trial import current, end_dry_run
from fastrack.errors import FastrackError


@contextmanager
def new_folder(path: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """Yield an empty folder that gets the name `path` when the block ends well, and vanishes if it does not.

    Until then the folder has a temporary name, which remains if the process is killed, and only this user can open it.
    Nothing is ever replaced. Files that `new_file` wrote in it are on disk by the end. `mode` is before the umask.

    The yielded path leads to the folder even if another user, who may write to the parent, renames the folder and puts
    another folder or a link in its place. The name `path` is then not given to any folder.

    A forked child that leaves the block leaves the folder to its parent, which still writes to it.
    """
    process = os.getpid()
    require_local(path)
    if current() is not None:  # its files are read again, and have no content in a trial
        raise FastrackError(
            f"rehearsing a save failed: {path}: expected a save of files, got a new folder. Make "
            "it only where fastrack.is_rehearsing() is False"
        )
    refuse_key_text(path, may_be_id=True)
    path = path.parent.resolve() / path.name
    if os.path.lexists(path):
        raise atomic.exists_already(path)
    end_dry_run()
    name = atomic.temporary_name(path.parent).name
    with ExitStack() as stack:
        with atomic.under_final_name(path):
            parent = _open_folder(path.parent, None, stack)
            os.mkdir(name, mode, dir_fd=parent)
        descriptor = None
        try:
            with atomic.under_final_name(path):
                opened = _open_folder(name, parent, stack)
            status = os.fstat(opened)
            if status.st_uid != os.geteuid() or os.listdir(opened):  # noqa: PTH208 - an open descriptor
                raise _was_swapped(path)  # noqa: TRY301 - the handler must not remove the content of another folder
            descriptor = opened
            os.fchmod(descriptor, 0o700)
            held = Path(atomic.DESCRIPTORS, str(descriptor)) if atomic.HAS_DESCRIPTORS else path.parent / name
            with _name_in_errors(held, path):
                yield held
                if os.getpid() != process:
                    return
                for folder, _, _ in os.walk(held, topdown=False):
                    atomic.sync_directory(Path(folder))
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
            _rename_folder(name, parent, os.fstat(descriptor), path)
        except BaseException:
            if os.getpid() != process:
                raise
            if descriptor is not None:  # the open folder, under any name
                shutil.rmtree(".", ignore_errors=True, dir_fd=descriptor)
            with suppress(OSError):
                os.rmdir(name, dir_fd=parent)
            raise
        atomic.sync_directory(path.parent)


def _open_folder(path: Path | str, parent: int | None, stack: ExitStack) -> int:
    """Open a folder until the stack ends, and refuse a link to a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    stack.callback(os.close, descriptor)
    return descriptor


def _rename_folder(name: str, parent: int, held: os.stat_result, path: Path) -> None:
    """Rename a folder if it still is the open folder `held`. An existing folder is kept, even an empty one."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        raise _was_swapped(path) from None
    if (status.st_dev, status.st_ino) != (held.st_dev, held.st_ino):
        raise _was_swapped(path)
    if os.path.lexists(path):
        raise atomic.exists_already(path)
    try:
        os.rename(name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise atomic.exists_already(path) from None
        raise


@contextmanager
def made_parents(path: Path) -> Iterator[None]:
    """Make the missing folders above a path. If the block fails, remove the new folders that are empty."""
    missing = [parent for parent in (path.parent, *path.parent.parents) if not parent.exists()]
    if missing:
        end_dry_run()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


@contextmanager
def _name_in_errors(held: Path, path: Path) -> Iterator[None]:
    """Replace the temporary folder in the file names of errors by the final folder."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str) and Path(error.filename).is_relative_to(held):
            error.filename = str(path / Path(error.filename).relative_to(held))
        raise


def _was_swapped(path: Path) -> PermissionError:
    advice = "expected the new folder, got another in its place, so nothing was left there. Choose a folder of your own"
    return PermissionError(errno.EACCES, advice, str(path))
