"""Everything fastrack raises on purpose.

Every message says what was wrong and what to do next, and none holds a secret. All of them survive a pickle, since a
worker process may be the one to raise them.
"""

# FastrackError
# ├── AuthenticationError      a message is not what its owner sealed, or not under this key and context
# ├── FormatError              not a sealed message, sealed file or key file at all      (a ValueError too)
# ├── UnknownKeyError          sealed under a key that was not given                     (a LookupError too)
# ├── KeyPermissionError       a key file that others own or may read                    (a PermissionError too)
# ├── DeviceError              the device is absent, busy or cannot do what was asked
# └── ClosedError              used after it was closed or wiped

from __future__ import annotations

from pathlib import Path

__all__ = [
    "AuthenticationError",
    "ClosedError",
    "DeviceError",
    "FastrackError",
    "FormatError",
    "KeyPermissionError",
    "UnknownKeyError",
]


class FastrackError(Exception):
    """The base of every error that fastrack raises on purpose.

    Attributes
    ----------
    path : pathlib.Path or None
        The sealed file that the error is about, where one is known.
    """

    path: Path | None = None


class AuthenticationError(FastrackError):
    """A message is not what its owner sealed, or was not sealed under this key and context.

    Parameters
    ----------
    message : str
        What happened, and what to do next.
    tensor : str, optional
        The name of the tensor, kept as ``.tensor``; None where the message has no name.
    chunk : int, optional
        The first chunk that failed, counted from 0, kept as ``.chunk``; None where the header failed, before any chunk.
    path : pathlib.Path, optional
        The file that holds the message, kept as ``.path``; None where it is not in a file.
    """

    tensor: str | None
    chunk: int | None

    def __init__(
        self, message: str, *, tensor: str | None = None, chunk: int | None = None, path: Path | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.tensor = tensor
        self.chunk = chunk


class FormatError(FastrackError, ValueError):
    """The bytes cannot be what they were taken for: a sealed message, a sealed file, a key or a key file."""


class UnknownKeyError(FastrackError, LookupError):
    """No key was given, or the key that something was sealed under is not among those given."""


class KeyPermissionError(FastrackError, PermissionError):
    """The key file belongs to another user or may be read by others, so it is not read at all."""


class DeviceError(FastrackError):
    """The device is absent, is busy, or cannot do what was asked of it."""


class ClosedError(FastrackError):
    """It was used after it had been closed or wiped."""


for _name in __all__:
    globals()[_name].__module__ = "fastrack"  # the path that users import it from
