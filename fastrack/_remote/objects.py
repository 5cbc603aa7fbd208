"""Objects on servers, read by ranges: the protocol, retries, and the choice of a client by the URL."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fastrack._util.locations import Url
from fastrack.errors import FormatError

ATTEMPTS = 6
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0  # seconds
HEAD = 1 << 18  # bytes that opening an object reads
LARGEST = 5 << 40  # bytes of an object: the limit of S3

_CODE = re.compile(r"[A-Za-z_]{3,40}")  # which no signature is

T = TypeVar("T")
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

    @property
    def url(self) -> Url: ...

    @property
    def version(self) -> Version: ...

    head: bytes
    """The first `HEAD` bytes, or all of fewer, which were read to open it."""

    def read(self, start: int, stop: int, sink: Sink) -> None:
        """Give a range of bytes to `sink`, in order and in pieces.

        Raise TransientError if another attempt may succeed, where the pieces that were given are right; FormatError if
        the object has another version now, or the server cannot give ranges; else OSError.
        """
        ...


class TransientError(OSError):
    """A transient failure, of the connection or a busy server. `delay` is the time that the server asked for."""

    def __init__(self, message: str, delay: float = 0.0) -> None:
        super().__init__(message)
        self.delay = delay


def read_range(remote: RemoteObject, start: int, stop: int, sink: Sink) -> None:
    """Read a range like `RemoteObject.read`. After a `TransientError`, continue where it was cut."""

    def give(offset: int, piece: bytes | memoryview) -> None:
        nonlocal start
        sink(offset, piece)
        start = offset + len(piece)

    def attempt() -> None:
        if start < stop:
            remote.read(start, stop, give)

    retry(attempt, remote.url)


def retry(attempt: Callable[[], T], url: Url) -> T:
    """Call a function until it raises no `TransientError`, with longer and longer random delays, or give up."""
    delay = _FIRST_DELAY
    for number in range(1, ATTEMPTS + 1):
        try:
            return attempt()
        except TransientError as error:
            failure, demanded = str(error), error.delay
        if number < ATTEMPTS and (number > 1 or demanded):  # a closed connection is tried again without a delay
            time.sleep(min(_LONGEST_DELAY, max(demanded, delay)) * random.uniform(0.5, 1))  # noqa: S311
            delay *= 2
    advice = "check the connection and the server, and try again"
    raise OSError(errno.EIO, f"reading failed {ATTEMPTS} times, the last time with: {failure}; {advice}", str(url))


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
    for source in (error, error.__cause__):
        with contextlib.suppress(KeyError, TypeError):
            code = getattr(source, "response", {})["Error"]["Code"]  # of botocore
            details += [code] if _CODE.fullmatch(code) else []
        status = getattr(source, "status", None)  # of aiohttp
        details += [str(status)] if type(status) is int else []
    return f"{type(error).__name__} ({', '.join(details)})" if details else type(error).__name__


def changed(url: Url) -> FormatError:
    """Return the error for an object that has changed on the server."""
    return FormatError(f"{url} was replaced or changed since it was opened. Open it, or the data set, again")


def check_size(size: int, url: Url) -> int:
    """Refuse an impossible size of a file, before a cache file of that size is made."""
    if not 0 <= size <= LARGEST:
        raise FormatError(f"{url}: expected a file of up to {LARGEST} bytes, got one of {size} by its server")
    return size
