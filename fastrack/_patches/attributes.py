"""Replace functions and classes of other libraries, for the whole process and for good."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

Step = Callable[[], object]

_steps: list[tuple[Step, object]] = []  # what takes back each replacement, in their order, and whose it is
_call: ContextVar[object] = ContextVar("fastrack_replacing", default=None)
_ABSENT = object()


@contextlib.contextmanager
def all_or_nothing() -> Iterator[None]:
    """Take back what was replaced in the block, and nothing that other threads have replaced, if the block fails."""
    own = object()
    token = _call.set(own)
    try:
        yield
    except BaseException:
        for each in [each for each in reversed(_steps) if each[1] is own]:
            _steps.remove(each)
            each[0]()
        raise
    finally:
        _call.reset(token)


def note(step: Step) -> None:
    """Note what takes back a change that was made beside `replace`."""
    _steps.append((step, _call.get()))


def replace(owner: Any, name: str, new: Any) -> Any:
    """Set an attribute of a module or class, and return what it held. `AttributeError` if it has none of that name.

    A class that inherits the attribute gets its own, so that its bases keep theirs.
    """
    old = getattr(owner, name)
    note(functools.partial(_put_back, owner, name, new, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, new)
    return old


def _put_back(owner: Any, name: str, new: Any, old: Any) -> None:
    if vars(owner).get(name) is not new:
        return  # others have replaced it since
    if old is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, old)


def replace_everywhere(*pairs: tuple[Any, Any]) -> int:
    """Replace objects, each by the other of its pair, in every module that holds them under any name.

    Modules that are imported later copy the new one from where it is defined. Those of fastrack keep the old one.
    Return the number of places.
    """
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
