"""Find functions and classes of higher modules by tables, so that no lower module imports them.

``fastrack/__init__.py`` fills them. Their values are places, as ``module:object``, relative to the package.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

PICKLED: dict[str, str] = {}
"""Names in pickles, each with the function or class that takes the values beside it."""

KEY_SOURCES: dict[str, str] = {}
"""Suffixes of files that hold keys, with what opens them, and schemes of what wraps keys, with their classes."""

COMPILERS: dict[str, str] = {}
"""Functions that make machine code: the module in this process, and the parts that a device adds to it."""

METHODS: dict[str, str] = {}
"""Methods of sealed tensors, each with the function that does their work."""


def find(place: str) -> Any:
    """Import the object at a place."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"fastrack.{module}"), name)
