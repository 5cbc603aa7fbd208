"""Read ranges of objects on servers, and try again when that may help."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from typing import TypeVar

from fastrack._remote.objects import RemoteObject, Sink
from fastrack._util.locations import Url

ATTEMPTS = 6
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0  # seconds

T = TypeVar("T")


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
