"""Tried saves: what is sealed in one has no content, and goes nowhere if it is for a place outside of its folder.

Dry runs: they end where a file or folder would be made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

_is_dry: ContextVar[bool] = ContextVar("fastrack_dry", default=False)


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


_trial: ContextVar[Trial | None] = ContextVar("fastrack_trial", default=None)


def current() -> Trial | None:
    """Return the trial that this thread or task is in."""
    trial = _trial.get()
    return trial if trial is not None and trial.is_on else None


@contextlib.contextmanager
def trying(folder: Path) -> Iterator[Trial]:
    """Have what this thread or task seals be only tried, in the block."""
    trial = Trial(folder)
    token = _trial.set(trial)
    try:
        yield trial
    finally:
        trial.is_on = False
        _trial.reset(token)


@contextlib.contextmanager
def in_earnest() -> Iterator[None]:
    """Seal with content in the block, within a trial too: what is read again at once, or by another process."""
    if (trial := current()) is not None:
        trial.has_sealed = True
    token = _trial.set(None)
    try:
        yield
    finally:
        _trial.reset(token)


class _Foreseen(Exception):  # noqa: N818 - no error
    """The end of a dry run, with the size of the file that would be made next."""


@contextlib.contextmanager
def foreseeing() -> Iterator[list[int]]:
    """Leave the block where it would make its first file, folder or object, and add the size to the yielded list."""
    token = _is_dry.set(True)
    sizes = list[int]()
    try:
        yield sizes
    except _Foreseen as end:
        sizes += end.args
    finally:
        _is_dry.reset(token)


def end_dry_run(size: int = 0) -> None:
    """End a dry run, if this is one: all that comes before the next file, of this size, was checked."""
    if _is_dry.get():
        raise _Foreseen(size)
