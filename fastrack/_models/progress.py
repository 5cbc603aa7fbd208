"""Progress of a load: a line on a terminal, or a function of the caller."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from fastrack._files.writer import Progress
from fastrack._util.shown import format_size

VARIABLE = "FASTRACK_PROGRESS"  # 0 shows none
_DELAY, _INTERVAL, _WIDTH = 1.0, 0.1, 60  # seconds before the line appears, and between its changes; columns


@contextlib.contextmanager
def reported(total: int, progress: Progress | bool | None) -> Iterator[Progress]:
    """Yield a function to call with each number of bytes opened, out of `total`: that of the caller, if it is one.

    Else these are shown on a terminal's stderr by the first process of a job, unless `progress` is False.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # as torchrun numbers those of a machine
    if callable(progress):
        yield progress
    elif progress is False or not is_first or os.environ.get(VARIABLE) == "0" or not _has_terminal():
        yield lambda _: None
    else:
        line = _Line(total)
        try:
            yield line.advance
        finally:
            line.end()


def _has_terminal() -> bool:
    with contextlib.suppress(AttributeError, ValueError):  # of a program without one, or that has closed it
        return sys.stderr.isatty()
    return False


class _Line:
    """A line that is written over, and is gone at the end. Without control sequences, which a terminal may not have."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._is_shown = total, 0, False
        self._start = time.monotonic()
        self._next = self._start + _DELAY

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now < self._next:
            return
        self._next, self._is_shown = now + _INTERVAL, True
        share = 100 * self._done // max(self._total, 1)
        rate = self._done / (now - self._start) / 1e9
        text = f"fastrack: {share} % of {format_size(self._total)} opened, {rate:.2f} GB/s"
        self._write(f"\r{text:<{_WIDTH}}")

    def end(self) -> None:
        if self._is_shown:
            self._write(f"\r{'':{_WIDTH}}\r")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a load does not fail for a terminal that has gone
            sys.stderr.write(text)
            sys.stderr.flush()
