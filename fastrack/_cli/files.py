"""Checks of paths, keys and files before a command begins."""

import errno
import fnmatch
import logging
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastrack._cli.console import clean
from fastrack._cli.errors import reading_keys, refuse_options
from fastrack._util.atomic import require_replaceable
from fastrack._util.locations import Location, Url, locate, require_local
from fastrack.errors import AuthenticationError, FormatError, UnknownKeyError

if TYPE_CHECKING:
    from fastrack._files.reader import SealedFile
    from fastrack._keys.keyring import KeyRing


KEPT = "it exists and is left as it was; choose another name"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?=[^/])")


def is_stream(path: object) -> bool:
    """Return True if a path stands for standard input or output."""
    return str(path) == "-"


def is_sealed_folder(path: Path) -> bool:
    """Return True if a path is a folder with an index, which `seal` made."""
    from fastrack._sets.folder import INDEX

    return (path / INDEX).is_file()


def as_location(path: Path) -> Location:
    """Return an argument as a path or, if it was written with ``scheme://``, as a URL: `Path` joins slashes."""
    match = _URL.match(str(path))
    return path if match is None else locate(f"{match[1]}://{str(path)[match.end() :]}")


def check_target(path: Path, *, force: bool, many: bool = False) -> None:
    """Refuse to replace a file without `force`, and anything that is no regular file. A server checks URLs itself.

    Of many files, the targets that exist may be left: the error names that option too.
    """
    if isinstance(as_location(path), Url):
        return
    if not many:  # whose folders are made
        check_directory(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file, so it is not replaced; choose another name", str(path))
    if os.path.lexists(path):
        if not force:
            advice = "exists already; --force replaces it" + (", --skip-existing leaves it" if many else "")
            raise FileExistsError(errno.EEXIST, advice, str(path))
        require_replaceable(path)


def check_new(path: Path, advice: str = "exists, and no folder is replaced. Name one that does not exist") -> None:
    """Refuse to replace a folder, or what the error advises about."""
    check_directory(path)
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, advice, str(path))


def check_source(path: Path) -> int:
    """Return the size of a file to read, in bytes. Refuse a pipe or a device, whose size would be 0."""
    require_local(path)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file; put what it gives into one first", str(path))
    return status.st_size


def check_directory(path: Path) -> None:
    """Refuse a path in a directory that does not exist."""
    require_local(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such directory; make it first", str(path.parent))


def open_ring(sources: str | Sequence[str] | None, *, to: Literal["open", "seal"] = "open") -> "KeyRing":
    """Return the keys of the sources that ``--key`` names, or else of the source that the environment names.

    Without keys, the advice of the error depends on `to`, because a new key opens nothing.
    """
    from fastrack._keys.keyring import KeyRing

    named = key_sources(sources, to=to)
    with reading_keys():
        return KeyRing.resolve(named or None)


def key_sources(sources: str | Sequence[str] | None, *, to: Literal["open", "seal"] = "open") -> list[str]:
    """Return the sources that ``--key`` names; none if the environment names one. Refuse keys, and no source at all."""
    from fastrack._keys.keyring import KEY_FILE_VARIABLE
    from fastrack._util.key_text import looks_secret

    named = [sources] if isinstance(sources, str) else list(sources or ())
    advice = "which other users can read on a command line. Make a new key"
    refuse_options({"--key": any(map(looks_secret, named))}, f"expected the path of a key file, got a key, {advice}")
    refuse_options({"--key": not all(named)}, "expected the path of a key file, got an empty text")
    if not named and not os.environ.get(KEY_FILE_VARIABLE):
        made, identified = "`fastrack keygen` makes one", "`fastrack inspect` shows the id of the key that opens a file"
        advice = made if to == "seal" else identified
        raise UnknownKeyError(f"no key was given; name a key file with --key or {KEY_FILE_VARIABLE}. {advice}")
    return named


def check_sealed(file: "SealedFile", ring: "KeyRing") -> None:
    """Refuse a file without sealed tensors, or one whose key was not given."""
    if not file:
        raise FormatError(f"{file.path}: expected sealed tensors, got none; `fastrack seal` seals a file")
    try:
        ring[file.key_id or ""]
    except UnknownKeyError as error:
        ids = ", ".join(key.id for key in ring)
        reason = f"expected key {file.key_id}, got {ids}; name its source with --key" if ids else str(error)
        raise UnknownKeyError(f"{clean(str(file.path))}: {reason}") from error


def match_names(patterns: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names that match a pattern, in their order, and the patterns without a match."""
    chosen = {pattern: [pattern] if pattern in names else fnmatch.filter(names, pattern) for pattern in patterns}
    selected = {name for matched in chosen.values() for name in matched}
    return [name for name in names if name in selected], [pattern for pattern, matched in chosen.items() if not matched]


def check_expected(file: "SealedFile", names: Sequence[str] | None) -> None:
    """Refuse a file that lacks one of these tensors, or stores it unencrypted."""
    for name in names or ():
        if name not in file:
            state = "an unencrypted tensor" if name in file.plain else "no such tensor"
            raise AuthenticationError(
                f"{file.path}: expected {name!r} to be sealed in it, got {state}; get the file that its owner sealed",
                tensor=name,
                path=file.path,
            )


def load_engine(verb: str) -> None:
    """Load the native code of a command, so that its reported time excludes the loading."""
    from fastrack._crypto.engine import get_engine

    if verb != "reading":
        logging.getLogger("fastrack").debug("engine %s", get_engine().name)
