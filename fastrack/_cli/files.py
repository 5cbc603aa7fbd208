"""What commands see to before they touch a file or a key."""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from fastrack._cli.console import clean
from fastrack.errors import AuthenticationError, FormatError, UnknownKeyError

if TYPE_CHECKING:
    from fastrack._crypto.keys import KeyRing
    from fastrack._sealed.reader import SealedFile


def check_target(path: Path, *, force: bool) -> None:
    """Refuse to write over what is there, unless told to; never over what is no regular file.

    Raises
    ------
    OSError
        If there is something at the path, or no directory to put it in.
    """
    _refuse_stream(path, "TARGET")
    check_directory(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file, so it is not written over; choose another name", str(path))
    if os.path.lexists(path) and not force:
        raise FileExistsError(errno.EEXIST, "exists already; --force replaces it", str(path))


def check_source(path: Path) -> int:
    """The size of a file to read, in bytes. A pipe or a device would pass for an empty file, so it is refused.

    Raises
    ------
    OSError
        Then, or if there is nothing at the path.
    """
    _refuse_stream(path, "SOURCE")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file; put what it gives into one first", str(path))
    return status.st_size


def _refuse_stream(path: Path, hint: str) -> None:
    if str(path) == "-":
        raise typer.BadParameter(
            "expected the path of a file, got -, and no stream is read or written", param_hint=hint
        )


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
    from fastrack._crypto.keys import KEY_FILE_VARIABLE, KeyRing, looks_secret

    given = [paths] if isinstance(paths, Path) else list(paths or ())
    if any(map(looks_secret, given)):
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
    if not file:
        raise FormatError(f"{file.path}: nothing in it is sealed; `fastrack seal` seals it")
    if file.key_id not in ring:
        given = ", ".join(key.id for key in ring)
        raise UnknownKeyError(
            f"{clean(str(file.path))} was sealed under key {file.key_id}, which was not given (given: {given}); "
            "--key PATH names its file"
        )


def check_expected(file: "SealedFile", names: Sequence[str] | None) -> None:
    """Refuse a file that lacks one of these tensors, or stores it in plain.

    Raises
    ------
    AuthenticationError
        Then.
    """
    for name in names or ():
        if name not in file:
            state = "is stored in plain" if name in file.plain else "is not there"
            raise AuthenticationError(
                f"{file.path}: expected {name!r} to be sealed in it, but it {state}; get the file that "
                "its owner sealed",
                tensor=name,
                path=file.path,
            )


def load_engine(what: Literal["seal", "open", "verify"]) -> None:
    """Do it once to nothing, so that loading native code is no part of the time that a command shows."""
    import numpy as np

    from fastrack._crypto import engine as aead
    from fastrack._crypto.cobblestone import TAG_SIZE, MessageKey

    engine = aead.get_engine()
    schedule = engine.expand_key(MessageKey.raw(bytes(16), bytes(12)))
    empty, tag = np.empty(0, np.uint8), np.empty(TAG_SIZE, np.uint8)
    if what == "seal":
        engine.seal_run(schedule, empty, tag, 0)
    elif what == "open":
        engine.open_run(schedule, tag, empty, 0)
    else:
        engine.verify_run(schedule, tag, 0)
    schedule.wipe()
