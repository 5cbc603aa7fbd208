"""Read ranges of objects on servers, and try again when that may help."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

from fastrack._net import retries
from fastrack._net.retries import TransientError
from fastrack._remote.objects import RemoteObject, Sink
from fastrack._util.locations import Url

ATTEMPTS = 6
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0  # seconds

T = TypeVar("T")


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
    """Call a function until it raises no `TransientError`, or give up with an error that has its text."""
    try:
        return retries.retry(attempt, attempts=ATTEMPTS, first=_FIRST_DELAY, longest=_LONGEST_DELAY)
    except TransientError as error:
        failure = str(error)
    advice = "check the connection and the server, and try again"
    raise OSError(errno.EIO, f"reading failed {ATTEMPTS} times, the last time with: {failure}; {advice}", str(url))
