"""What must be made anew in a forked child: secrets that may not live twice, and locks a lost thread may hold."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol


class Renewable(Protocol):
    """A thing that can start over in a forked child."""

    def reset_after_fork(self) -> None: ...


def register_fork_reset(thing: Renewable) -> None:
    """Have `thing.renew()` called in every child that is forked while the thing lives."""
    _things.add(thing)


def after_fork(action: Callable[[], None]) -> None:
    """Have `action` called in every forked child."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)


_things: weakref.WeakSet[Renewable] = weakref.WeakSet()


def _renew_all() -> None:
    for thing in list(_things):
        thing.reset_after_fork()


after_fork(_renew_all)
