"""Classes, functions and enums that the process lets ``torch.load(weights_only=True)`` take, and named tuples."""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

from fastrack._util.pickles import unpickle
from fastrack.errors import FormatError

_new_kind: Any = namedtuple  # noqa: PYI024 - the fields are known late, and it refuses what is no identifier


def name_of(kind: Any) -> str:
    """Return the name under which ``torch.serialization.add_safe_globals`` has a class or function."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _allowed() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    named = torch.serialization.get_safe_globals() if torch is not None else ()
    return dict(entry[::-1] if type(entry) is tuple else (name_of(entry), entry) for entry in named)


def encode_allowed(value: Any) -> list[str] | None:
    """Return the entry of a skeleton for an allowed class or function, or a member of an allowed enum, or None."""
    for name, allowed in _allowed().items():
        if value is allowed:
            return ["global", name]
        if type(value) is allowed and isinstance(value, Enum) and allowed.__members__.get(value.name) is value:
            return ["member", name, value.name]
    return None


def find_allowed(name: str) -> Any:
    """Return the allowed class or function of this name. It is looked up, and neither imported nor called."""
    allowed = _allowed()
    if name not in allowed:
        raise FormatError(
            f"skeleton of a checkpoint: expected only classes and functions that torch.serialization.add_safe_globals "
            f"names, got {name!r:.120}. Name it there before you load the checkpoint"
        )
    return allowed[name]


def is_named_tuple(value: Any) -> bool:
    """Return whether a value is a named tuple that has nothing besides its fields, which can be named again."""
    fields = getattr(type(value), "_fields", None)
    if not isinstance(value, tuple) or type(fields) is not tuple or getattr(value, "__dict__", None):
        return False
    if len(fields) != len(value) or any(type(field) is not str for field in fields):
        return False
    try:
        _kind_of_named_tuple(name_of(type(value)), fields)
    except FormatError:
        return False
    return True


def make_named_tuple(name: str, values: Mapping[str, Any]) -> Any:
    """Return a named tuple: of the allowed class of this name, or else of one that is made from name and fields."""
    kind = _allowed().get(name)
    if kind is None:
        kind = _kind_of_named_tuple(name, tuple(values))
    elif not (isinstance(kind, type) and issubclass(kind, tuple) and getattr(kind, "_fields", ()) == tuple(values)):
        raise FormatError(
            f"skeleton of a checkpoint: expected that {name!r:.120} of torch.serialization.add_safe_globals is a named "
            "tuple with the fields that were saved, got others. Load the checkpoint without it"
        )
    return tuple.__new__(kind, values.values())  # not kind(...), which may run anything


def restore_named_tuple(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    """Return the named tuple of a pickle."""
    return tuple.__new__(_kind_of_named_tuple(name, fields), values)


@lru_cache(256)
def _kind_of_named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    module, _, last = name.rpartition(".")
    try:
        # Its own names, such as _1, are those of a class that was made with rename=True.
        kind: Any = _new_kind(last, fields, rename=True, module=module)
    except (ValueError, TypeError, SyntaxError):  # SyntaxError: two that Python's parser takes for one
        kind = None
    if kind is None or kind._fields != fields:
        raise FormatError("skeleton of a checkpoint: expected identifiers as names of a named tuple, got others")
    kind.__qualname__ = name.removeprefix(f"{module}.")
    kind.__reduce__ = lambda self: (unpickle, ("NamedTuple", name, fields, tuple(self)))  # no module has the class
    return kind
