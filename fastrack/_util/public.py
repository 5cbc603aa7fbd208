"""Give public classes and functions the import path that users know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


def public(thing: T) -> T:
    """Set ``__module__`` of a class or function to "fastrack", for tracebacks, pickles and documentation."""
    thing.__module__ = "fastrack"
    return thing


def attest_public(thing: T) -> T:
    """Set ``__module__`` of a class or function to "fastrack.attest", like `public` for `fastrack`."""
    thing.__module__ = "fastrack.attest"
    return thing


def lazy(
    package: str, names: Mapping[str, Sequence[str]], namespace: dict[str, Any]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its public names on first use.

    `names` has the modules of the package, each with its public names; ``__init__.pyi`` tells type checkers.
    """
    homes = {name: f"{package}.{module}" for module, listed in names.items() for name in listed}

    def load(name: str) -> object:
        if name not in homes:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message)
        namespace[name] = value = getattr(import_module(homes[name]), name)
        return value

    return load, lambda: sorted({*namespace, *homes})
