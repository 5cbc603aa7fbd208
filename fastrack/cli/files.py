"""What commands check before they touch a file or a key."""

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fastrack.cli.console import clean
from fastrack.errors import FormatError, UnknownKeyError

if TYPE_CHECKING:
    from fastrack.files import SealedFile
    from fastrack.keys import KeyRing

__all__ = ["check_directory", "check_sealed", "check_target", "open_ring"]

_LOOKS_SECRET = re.compile(r"(fastrack-key-1:.*)|([0-9a-fA-F]{32}){1,2}")


def check_target(path: Path, *, force: bool) -> None:
    """Refuse to write over what is there, unless told to; never over what is no regular file.

    Raises
    ------
    OSError
        If there is something at the path, or no directory to put it in.
    """
    check_directory(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file, so it is not written over; choose another name", str(path))
    if os.path.lexists(path) and not force:
        raise FileExistsError(errno.EEXIST, "exists already; --force replaces it", str(path))


def check_directory(path: Path) -> None:
    """Refuse a path in a directory that is not there.

    Raises
    ------
    FileNotFoundError
        Then.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such directory; make it first", str(path.parent))


def open_ring(paths: Path | Sequence[Path] | None) -> "KeyRing":
    """The keys of the files that ``--key`` names, or else of the one that the environment names.

    Raises
    ------
    FastrackError, OSError
        If there is none, or one cannot be used.
    typer.BadParameter
        If it is the key itself. It is not repeated.
    """
    from fastrack.keys import KEY_FILE_VARIABLE, KeyRing

    given = [paths] if isinstance(paths, Path) else list(paths or ())
    if any(_LOOKS_SECRET.fullmatch(str(path)) and not path.exists() for path in given):
        raise typer.BadParameter(
            "this takes the path of a key file, not a key: others can read a command line. Make a new key",
            param_hint="--key",
        )
    if not given and not os.environ.get(KEY_FILE_VARIABLE):
        raise UnknownKeyError(
            f"no key was given: --key PATH names a key file, or set {KEY_FILE_VARIABLE}; `fastrack keygen` makes one"
        )
    return KeyRing.resolve(given or None)


def check_sealed(file: "SealedFile", ring: "KeyRing") -> None:
    """Refuse a file in which nothing is sealed, or whose key is not at hand.

    Raises
    ------
    FormatError, UnknownKeyError
        Then.
    """
    if file.key_id is None:
        raise FormatError(f"{file.path}: nothing in it is sealed; `fastrack seal` seals it")
    if file.sealed and file.key_id not in ring:
        given = ", ".join(key.id for key in ring)
        raise UnknownKeyError(
            f"{clean(str(file.path))} was sealed under key {file.key_id}, which was not given (given: {given}); "
            "--key PATH names its file"
        )
