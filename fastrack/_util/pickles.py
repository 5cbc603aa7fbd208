"""Pickle handles under names that stay the same when modules move."""

from __future__ import annotations

from typing import Any

from fastrack._util.registry import PICKLED, find
from fastrack.errors import FormatError


def unpickle(name: str, *values: Any) -> Any:
    """Return the object that a pickle describes. Pickles name only this function, as ``fastrack._unpickle``."""
    if name not in PICKLED:
        raise FormatError(
            f"reading a pickle: expected an object of this version of fastrack, got {name!r:.80}. Use the version that "
            "wrote it"
        )
    return find(PICKLED[name])(*values)


unpickle.__module__, unpickle.__name__, unpickle.__qualname__ = "fastrack", "_unpickle", "_unpickle"
