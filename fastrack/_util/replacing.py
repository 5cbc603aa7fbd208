"""Replace functions and classes of other libraries, for the whole process and for good."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable
from typing import Any

_replaced: list[tuple[Any, str, Any]] = []  # owner, name and what it held, in the order of the replacements
_ABSENT = object()


def replace(owner: Any, name: str, new: Any) -> Any:
    """Set an attribute of a module or class, and return what it held. `AttributeError` if it has none of that name.

    A class that inherits the attribute gets its own, so that its bases keep theirs.
    """
    old = getattr(owner, name)
    _replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, new)
    return old


def replace_everywhere(old: Any, new: Any) -> int:
    """Replace an object in every module that holds it under any name, and return the number of places.

    Modules that are imported later copy the new one from where it is defined. Those of fastrack keep the old one.
    """
    return replace_all_everywhere([(old, new)])


def replace_all_everywhere(pairs: Iterable[tuple[Any, Any]]) -> int:
    """Replace several objects as `replace_everywhere` does, in one walk over the modules."""
    olds, places = {id(old): (old, new) for old, new in pairs}, 0
    for module in list(sys.modules.values()):
        # Not getattr and not dir: both would run the `__getattr__` of lazy modules, which imports what they name.
        names = getattr(module, "__dict__", None)
        if type(names) is not dict or str(names.get("__name__", "")).partition(".")[0] == "fastrack":
            continue
        for name in [name for name, value in list(names.items()) if id(value) in olds]:
            replace(module, name, olds[id(names[name])][1])
            places += 1
    return places


def find_holder(old: Any) -> str | None:
    """Return what kind of object holds a function where no replacement reaches it: a partial, or a class."""
    kinds = functools.partial, staticmethod, classmethod
    return next((type(each).__name__ for each in gc.get_referrers(old) if type(each) in kinds), None)


def mark() -> int:
    """Return how many attributes are replaced, for `restore`."""
    return len(_replaced)


def restore(until: int = 0) -> None:
    """Put everything back, the last replacement first, until so many are left.

    For tests, and for what fails half-way: protection is for good. Modules that were imported meanwhile
    keep what they copied.
    """
    while len(_replaced) > until:
        owner, name, old = _replaced.pop()
        if old is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, old)
