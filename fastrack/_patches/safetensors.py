"""Functions of safetensors, each replaced once for the process: they ask handlers, and then do what they ever did.

The replacement is the same for all threads and for good, and handlers decide by the path or the content of a call: no
block, and no call that fails, changes what another thread sees.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextvars import Context
from typing import Any

from fastrack._patches.attributes import note, replace_everywhere
from fastrack._util.fork import per_process

Handler = Callable[..., Any]
"""Do what the function is called for, or return NotImplemented and leave it to the next handler."""

_handlers: dict[str, tuple[Handler, ...]] = {}  # by the names of the functions
_lock = per_process(sys.modules[__name__], "_lock", threading.Lock)


def add_handler(name: str, handler: Handler, *, last: bool = False) -> None:
    """Ask `handler` about each call of a function first, or, with `last`, when all others have left the call.

    Those of a folder come first, whenever they are added, and those of a protected process last. Adding one again does
    nothing. If the function was replaced by others since, it is replaced once more.
    """
    import safetensors

    with _lock:
        found = getattr(safetensors, name)
        if not hasattr(found, "fastrack_original"):
            # In a context of its own: a call that fails takes back its handler, and not what others' handlers need.
            Context().run(replace_everywhere, (found, _asking(name, found)))
        held = _handlers.get(name, ())
        if handler not in held:
            _handlers[name] = (*held, handler) if last else (handler, *held)
            note(functools.partial(remove_handler, name, handler))


def remove_handler(name: str, handler: Handler) -> None:
    """Ask `handler` no more."""
    with _lock:
        _handlers[name] = tuple(each for each in _handlers[name] if each != handler)


def _asking(name: str, original: Any) -> Any:
    def ask(*args: Any, **options: Any) -> Any:
        for handler in _handlers.get(name, ()):
            result = handler(*args, **options)
            if result is not NotImplemented:
                return result
        return original(*args, **options)

    if not isinstance(original, type):
        ask.__name__, ask.fastrack_original = name, original  # type: ignore[attr-defined]
        return ask
    members = {"__new__": lambda _, *args, **options: ask(*args, **options), "fastrack_original": original}
    return type(name, (), {**members, "__doc__": f"``safetensors.{name}``, which opens sealed files too."})
