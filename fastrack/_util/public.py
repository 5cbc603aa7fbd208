"""What users import carries the path that they import it from."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def public(thing: T) -> T:
    """Set ``__module__`` of a class or function to "fastrack", for tracebacks, pickles and documentation."""
    thing.__module__ = "fastrack"
    return thing
