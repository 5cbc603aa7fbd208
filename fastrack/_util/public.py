"""Give public classes and functions the import path that users know."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def public(thing: T) -> T:
    """Set ``__module__`` of a class or function to "fastrack", for tracebacks, pickles and documentation."""
    thing.__module__ = "fastrack"
    return thing


def attest_public(thing: T) -> T:
    """Set ``__module__`` of a class or function to "fastrack.attest", as `public` does for the names of `fastrack`."""
    thing.__module__ = "fastrack.attest"
    return thing
