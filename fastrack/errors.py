"""Exceptions of fastrack.

Every message says what failed and what to do next, and none contains a secret. All exceptions can be pickled, since a
worker process may raise them.
"""

# FastrackError
# ├── AuthenticationError      a message was altered, or sealed under another key or context
# ├── RollbackError            older than, or another than, the expected file or manifest (also an AuthenticationError)
# ├── FormatError              not a sealed message, file, key, key file or evidence     (also a ValueError)
# ├── UnknownKeyError          sealed under a key that was not given                     (also a LookupError)
# ├── KeyPermissionError       a key file that others may read, or what they may replace (also a PermissionError)
# ├── SignatureError           a signed document that was altered, or that no trusted key signed
# ├── GrantError               a grant that has expired, or is not for this recipient or file
# ├── AttestationError         evidence of a confidential machine that does not prove what it should
# ├── ProviderError            a token, TPM, vault or passphrase that is absent, or does not unwrap a key
# ├── DeviceError              the device is absent, busy or incapable of an operation
# ├── ClosedError              used after it was closed or wiped
# └── LeaseError               a key whose lease ended                                   (also a ClosedError)

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

__all__ = [
    "AttestationError",
    "AuthenticationError",
    "ClosedError",
    "DeviceError",
    "FastrackError",
    "FormatError",
    "GrantError",
    "KeyPermissionError",
    "LeaseError",
    "ProviderError",
    "RollbackError",
    "SignatureError",
    "UnknownKeyError",
]


class FastrackError(Exception):
    """The base class of all exceptions of fastrack.

    Attributes
    ----------
    path : path-like or None
        The sealed file, a `pathlib.Path` or the URL of a server, that the error is about, if known.
    """

    path: os.PathLike[str] | None = None


class AuthenticationError(FastrackError):
    """A message that was altered, or sealed under another key or context.

    Parameters
    ----------
    message : str
        What failed, and what to do next.
    tensor : str, optional
        The name of the tensor, kept as ``.tensor``; None if the message has no name.
    chunk : int, optional
        The first chunk that failed, counted from 0, kept as ``.chunk``; None if the header failed.
    path : path-like, optional
        The file that holds the message, kept as ``.path``; None if it is not in a file.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "data.sealed"
    ...     fastrack.save_file({"x": np.arange(10)}, path, key=key)
    ...     content = bytearray(path.read_bytes())
    ...     content[-1] ^= 1
    ...     _ = path.write_bytes(content)
    ...     try:
    ...         fastrack.verify_file(path, keys=key)
    ...     except fastrack.AuthenticationError as error:
    ...         print(error.tensor, error.chunk)
    x 0
    """

    tensor: str | None
    chunk: int | None

    def __init__(
        self, message: str, *, tensor: str | None = None, chunk: int | None = None, path: os.PathLike[str] | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.tensor = tensor
        self.chunk = chunk


class RollbackError(AuthenticationError):
    """A file or manifest that may be genuine, but is not the expected one: older, forked, of another set, or missing.

    It has the attributes of `AuthenticationError`.
    """


class AttestationError(FastrackError):
    """Evidence of a confidential machine that does not prove what it should.

    Parameters
    ----------
    message : str
        What failed, and what to do next.
    evidence : str, optional
        The structure that failed, such as "TDX quote" or "GPU 3 report", kept as ``.evidence``.
    field : str, optional
        The field of that structure, kept as ``.field``.
    found : object, optional
        The value that it has, kept as ``.found``.
    wanted : object, optional
        The value, or a description of the values, that it should have, kept as ``.wanted``.

    Examples
    --------
    >>> import fastrack
    >>> try:
    ...     raise fastrack.AttestationError("the debug bit is set", evidence="TDX quote", field="debug", found=True)
    ... except fastrack.AttestationError as error:
    ...     print(error.evidence, error.field, error.found)
    TDX quote debug True
    """

    evidence: str | None
    field: str | None
    found: object
    wanted: object

    def __init__(
        self,
        message: str,
        *,
        evidence: str | None = None,
        field: str | None = None,
        found: object = None,
        wanted: object = None,
    ) -> None:
        super().__init__(message)
        self.evidence = evidence
        self.field = field
        self.found = found
        self.wanted = wanted


class FormatError(FastrackError, ValueError):
    """Bytes that are no sealed message, sealed file, key, key file or evidence, though one was expected."""


class UnknownKeyError(FastrackError, LookupError):
    """A missing key: none was given, or not the one that a tensor was sealed under."""


class KeyPermissionError(FastrackError, PermissionError):
    """A key file that others may read, or a file that decides something and that they may replace; it is not used."""


class SignatureError(FastrackError):
    """A signed document that was altered, or that no trusted key signed; nothing of it was used."""


class GrantError(FastrackError):
    """A grant that has expired, or is not for this recipient or file."""


class ProviderError(FastrackError):
    """A token, TPM or vault that is absent, not configured, or does not wrap or unwrap a key.

    ``.is_refusal`` is True if a PIN, a token or other credentials were refused, have expired or were not found.
    """

    is_refusal: bool = False


class DeviceError(FastrackError):
    """A device that is absent, busy or incapable of the requested operation."""


class ClosedError(FastrackError):
    """An object that was used after it had been closed or wiped."""


class LeaseError(ClosedError):
    """A key that was used after its lease had ended: the owner did not renew it, or the machine did not ask in time."""


for _name in __all__:
    globals()[_name].__module__ = "fastrack"  # the path that users import them from
