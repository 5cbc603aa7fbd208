"""End what a process began: remove its folders, and report what is lost. Its forked children do neither."""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastrack._util.fork import report


def report_at_end(owner: object, find_lost: Callable[[], Any]) -> weakref.finalize[..., object]:
    """Report what `find_lost` returns, unless it is empty, when the garbage collector or the process ends `owner`.

    `find_lost` must not refer to `owner`, which would live as long as the process. A forked child reports nothing, as
    what it has is its parent's. ``detach`` of the result ends the watch.
    """
    process = os.getpid()

    def report_lost() -> None:
        if os.getpid() == process and (lost := find_lost()):
            report(f"{lost}: expected close() or the end of a with statement, got neither. Use a with statement")

    return weakref.finalize(owner, report_lost)


def remove_own(folder: Path, process: int) -> None:
    """Remove a folder with all that is in it, read-only folders too. Do nothing in a forked child of its process."""
    if os.getpid() == process:
        for here, _, _ in os.walk(folder):
            with contextlib.suppress(OSError):
                Path(here).chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
