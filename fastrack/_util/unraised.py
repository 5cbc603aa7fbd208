"""Reports of failures and losses that no call is left to raise: a `ResourceWarning`, and the logger "fastrack"."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any


def report_at_end(owner: object, find_lost: Callable[[], Any]) -> weakref.finalize[..., object]:
    """Report what `find_lost` returns, unless it is empty, when the garbage collector or the process ends `owner`.

    `find_lost` must not refer to `owner`, which would live as long as the process. A forked child reports nothing, as
    what it has is its parent's. ``detach`` of the result ends the watch.
    """
    return weakref.finalize(owner, _report_lost, find_lost, os.getpid())


def _report_lost(find_lost: Callable[[], Any], process: int) -> None:
    lost = find_lost() if os.getpid() == process else None
    if lost:
        report(f"{lost}: expected close() or the end of a with statement, got neither. Use a with statement")


def report(message: str) -> None:
    """Report a failure or a loss where no caller could handle an exception."""
    logging.getLogger("fastrack").warning(message)
    _Unraised(message)


class _Unraised:
    """A warning that is issued on deletion, so that a filter that turns it into an error reaches no caller."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __del__(self) -> None:
        warnings.warn(self._message, ResourceWarning, stacklevel=2)
