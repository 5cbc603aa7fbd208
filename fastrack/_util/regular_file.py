"""Open regular files for reading, and refuse pipes, devices and files of unstable size."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path

from fastrack._util.key_text import NOT_A_PATH, looks_secret
from fastrack._util.locations import Location, require_local, require_path, without_password
from fastrack.errors import FormatError

_LISTED = 1000  # names of a folder to look for the one that was meant


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file for reading. A pipe is refused, and never waited for."""
    return _open(path, stat.S_ISREG)


def open_pipe_or_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file or a pipe for reading. A pipe without a writer reads as empty, and is not waited for."""
    file = _open(path, lambda mode: stat.S_ISREG(mode) or stat.S_ISFIFO(mode))
    os.set_blocking(file.fileno(), True)
    return file


def _open(path: str | os.PathLike[str], is_expected: Callable[[int], bool]) -> io.FileIO:
    name = require_path(path)
    require_local(name)
    try:
        file = io.FileIO(name, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    except IsADirectoryError:
        raise IsADirectoryError(errno.EISDIR, "expected a file, got a folder", name) from None
    except (OSError, ValueError) as error:
        if not looks_secret(name):
            if isinstance(error, FileNotFoundError):
                raise not_found(name) from None
            raise
    else:
        if not is_expected(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "not a regular file; put what it gives into one first", name)
        return file
    raise FormatError(NOT_A_PATH)  # outside the handler, so that its context is not the error with the path


def not_found(path: str | os.PathLike[str]) -> FileNotFoundError:
    """Return the error for a path that is not there. It names one that is, of almost the same name."""
    import difflib  # deferred, like glob: few processes need them
    import glob

    missing, advice = Path(path), ""
    while missing.parent != missing and not os.path.lexists(missing.parent):
        missing = missing.parent
    if glob.has_magic(missing.name):
        advice = ". No name matches the pattern"
        if any(glob.iglob(os.fspath(path), recursive=True)):  # noqa: PTH207 - of any pattern, absolute too
            advice = ". It is a pattern, which is not matched here: name the file"
    else:
        with contextlib.suppress(OSError), os.scandir(missing.parent) as entries:
            found = sorted(map(Path, itertools.islice(entries, _LISTED)))
            # By the stem, as suffixes alone make names alike. Of one stem, take the name of the same suffix.
            names = {each.stem: each.name for each in sorted(found, key=lambda each: each.suffix == missing.suffix)}
            near = difflib.get_close_matches(missing.stem, names, n=1, cutoff=0.7)
            advice = f". Did you mean {missing.with_name(names[near[0]])}?" if near else ""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT) + advice, os.fspath(path))


def matches(path: Path) -> list[Path]:
    """Return the paths that a pattern matches, in order; a path that is there, or is no pattern, as it is."""
    import glob

    # What was a URL before it was made a path is refused as a file, without its password.
    if not glob.has_magic(str(path)) or os.path.lexists(path) or without_password(str(path)) != str(path):
        return [path]
    if found := sorted(map(Path, glob.glob(str(path), recursive=True))):  # noqa: PTH207 - of any pattern, absolute too
        return found
    raise no_match(path)


def no_match(pattern: Location) -> FileNotFoundError:
    """Return the error for a pattern that matches nothing."""
    return FileNotFoundError(errno.ENOENT, "expected files that match this pattern, got none. Check it", str(pattern))
