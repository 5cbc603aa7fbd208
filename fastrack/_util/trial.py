"""Tried saves: what is sealed in one has no content, and goes nowhere if it is for a place outside of its folder.

Dry runs: they end where a file or folder would be made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

dry_run: ContextVar[Callable[[int], None] | None] = ContextVar("fastrack_dry", default=None)
"""End a dry run by this function: it raises the end, with the size of the file that would be made next."""


class Trial:
    """A save that one thread or task tries. `is_on` is False after its end: contexts that were copied still have it."""

    __slots__ = ("_folder", "has_sealed", "is_on")

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.realpath(folder) + os.sep
        self.is_on = True
        self.has_sealed = False  # whether anything was, with content or without

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a path is below the folder of the trial."""
        return os.path.realpath(path).startswith(self._folder)


trial_of: ContextVar[Trial | None] = ContextVar("fastrack_trial", default=None)


def current() -> Trial | None:
    """Return the trial that this thread or task is in."""
    trial = trial_of.get()
    return trial if trial is not None and trial.is_on else None


@contextlib.contextmanager
def in_earnest() -> Iterator[None]:
    """Seal with content in the block, within a trial too: what is read again at once, or by another process."""
    if (trial := current()) is not None:
        trial.has_sealed = True
    token = trial_of.set(None)
    try:
        yield
    finally:
        trial_of.reset(token)


def end_dry_run(size: int = 0) -> None:
    """End a dry run, if this is one: all that comes before the next file, of this size, was checked."""
    if (end := dry_run.get()) is not None:
        end(size)
