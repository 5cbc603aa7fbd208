"""Try again after failures that may pass, when and as often as that may help."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

AGAIN = {408, 425, 429, 500, 502, 503, 504}
"""Statuses of a server that is busy: another attempt may succeed."""

T = TypeVar("T")


class TransientError(OSError):
    """A transient failure, of the connection or a busy server. `delay` is the time that the server asked for."""

    def __init__(self, message: str, delay: float = 0.0) -> None:
        super().__init__(message)
        self.delay = delay


def retry(attempt: Callable[[], T], *, attempts: int, first: float, longest: float, end: float = math.inf) -> T:
    """Call a function until it raises no `TransientError`, with random delays that grow from `first` to `longest`.

    A delay is no shorter than a server asks for. Raise the last error after all attempts, or where a delay would pass
    `end` on the monotonic clock.
    """
    for number in range(1, attempts):
        try:
            return attempt()
        except TransientError as error:
            demanded = error.delay
            wait = max(demanded, min(longest, first) * random.uniform(0.5, 1))  # noqa: S311 - no secret
            if time.monotonic() + wait > end:
                raise
        if number > 1 or demanded:  # a closed connection is tried again without a delay
            time.sleep(wait)
            first *= 2
    return attempt()


def read_delay(told: str | None) -> float:
    """Return the seconds to wait of a ``Retry-After``; 0 if there is none, or if it is no number of them."""
    text = (told or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0
