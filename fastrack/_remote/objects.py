"""Objects on servers, of which ranges are read: their protocol, and what all clients check."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fastrack._util.locations import Url
from fastrack.errors import FormatError

HEAD = 1 << 18  # bytes that opening an object reads
LARGEST = 5 << 40  # bytes of an object: the limit of S3

_CODE = re.compile(r"[A-Za-z_]{3,40}|[1-5]\d\d")  # which no signature is

Sink = Callable[[int, bytes | memoryview], None]
"""Takes bytes of an object, which stay until it returns, and where in it they begin."""


@dataclass(frozen=True, slots=True)
class Version:
    """The version of an object: its size, and the validator of its server.

    validator : the entity tag, or the time of modification; None if the server gives neither
    """

    size: int
    validator: str | None


class RemoteObject(Protocol):
    """One version of a file on a server. Its methods may be called by several threads."""

    url: Url
    version: Version
    head: bytes
    """The first `HEAD` bytes, or all of fewer, which were read to open it."""

    def read(self, start: int, stop: int, sink: Sink) -> None:
        """Give a range of bytes to `sink`, in order and in pieces.

        Raise TransientError if another attempt may succeed, where the pieces that were given are right; FormatError if
        the object has another version now, or the server cannot give ranges; else OSError.
        """
        ...


def error_code(error: BaseException) -> str:
    """Return the class of an error of another library, and its number or code.

    Its text is left out: it may hold signed URLs, credentials, or text of a server. For the same reason errors are
    raised outside the handlers of the errors that they replace, which keeps these out of their chain.
    """
    details: list[str] = []
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None) or ""
        details += [reason] if _CODE.fullmatch(reason) else []
    elif isinstance(error, socket.gaierror):
        details.append("the name of the host was not resolved")
    elif isinstance(error, OSError) and type(error.errno) is int and error.errno > 0:
        details.append(os.strerror(error.errno))
    details += codes_of(error)
    return f"{type(error).__name__} ({', '.join(details)})" if details else type(error).__name__


def codes_of(error: BaseException) -> list[str]:
    """Return the codes of an error of another library and of its cause: letters, or the number of a status."""
    found: list[object] = []
    for source in (error, error.__cause__):
        with contextlib.suppress(LookupError, TypeError):
            found.append(getattr(source, "response", {})["Error"]["Code"])  # of botocore
        for each in (source, getattr(source, "response", None)):  # of Azure, aiohttp and gcsfs; of Hugging Face
            found += [getattr(each, name, None) for name in ("error_code", "status", "status_code", "code")]
        found += [403] if str(source).startswith("Forbidden: ") else []  # of gcsfs
    texts = [code[:] if isinstance(code, str) else f"{code:d}" for code in found if isinstance(code, str | int)]
    return [code for code in dict.fromkeys(texts) if _CODE.fullmatch(code)]


def require_plain(coding: str | None, url: Url) -> None:
    """Refuse an object whose Content-Encoding would have clients decode it: ranges of it are of no use then."""
    if coding not in {None, "", "identity", "aws-chunked"}:  # the last of bytes as they are, by stores that keep it
        raise FormatError(f"{url}: expected an object without Content-Encoding, got one with it. Store it without")


def changed(url: Url) -> FormatError:
    """Return the error for an object that has changed on the server."""
    return FormatError(f"{url} was replaced or changed since it was opened. Open it, or the dataset, again")


def check_size(size: int, url: Url) -> int:
    """Refuse an impossible size of a file, before a cache file of that size is made."""
    if not 0 <= size <= LARGEST:
        raise FormatError(f"{url}: expected a file of up to {LARGEST} bytes, got one of {size} by its server")
    return size
