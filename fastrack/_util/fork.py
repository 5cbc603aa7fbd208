"""Reset state in forked children: secrets that must not be used twice, and locks that a parent's thread may hold."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Resettable(Protocol):
    """An object that can start over in a forked child."""

    def reset_after_fork(self) -> None: ...


def register_fork_reset(*instances: Resettable) -> None:
    """Call `reset_after_fork()` of each object in every child that is forked while the object lives."""
    _instances.update(instances)


def per_process(owner: object, name: str, make: Callable[[], T]) -> T:
    """Return the value of an attribute of an object or a module, which each forked child makes anew: a lock or threads.

    A thread of the parent may hold the lock, which no thread of the child would release.
    """
    _made.setdefault(owner, {})[name] = make
    return make()


def after_fork(action: Callable[[], None]) -> None:
    """Call `action` in every forked child."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)


def before_fork(action: Callable[[], None], undo: Callable[[], None] = lambda: None) -> None:
    """Call `action` in a process that is about to fork, and `undo` in it when it has forked."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=action, after_in_parent=undo)


def _reset_all() -> None:
    for owner, made in list(_made.items()):
        for name, make in made.items():
            setattr(owner, name, make())
    for instance in list(_instances):
        instance.reset_after_fork()


_instances: weakref.WeakSet[Resettable] = weakref.WeakSet()
_made: weakref.WeakKeyDictionary[object, dict[str, Callable[[], object]]] = weakref.WeakKeyDictionary()
after_fork(_reset_all)


# Failures and losses that no call is left to raise: a `ResourceWarning`, and a line of the logger "fastrack".


def report(message: str) -> None:
    """Report a failure or a loss where no caller could handle an exception."""
    import logging  # deferred: few processes need it

    logging.getLogger("fastrack").warning(message)
    _Unraised(message)


class _Unraised:
    """A warning that is issued on deletion, so that a filter that turns it into an error reaches no caller."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __del__(self) -> None:
        warnings.warn(self._message, ResourceWarning, stacklevel=2)
