"""Find functions and classes of higher modules by tables, so that no lower module imports them.

``fastrack/__init__.py`` fills the tables. A value is ``module:object``, relative to the package, but in
`IRREPLACEABLE`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

PICKLED: dict[str, str] = {}
"""Names in pickles, each with the function or class that is called with the pickled values."""

KEY_SOURCES: dict[str, str] = {}
"""Suffixes of key files, and schemes of texts such as ``kbs:///...``, with the functions that open their keys."""

WRAPPERS: dict[str, str] = {}
"""Schemes of key wrappers, which are their providers in wrapped key files, with their classes."""

PLACES: dict[str, str] = {}
"""Functions about where keys may be used: "check" asks about a device, and "bind" has a key ask of GPUs."""

METHODS: dict[str, str] = {}
"""Methods of sealed tensors, each with the function that implements it."""

IRREPLACEABLE: dict[str, bytes] = {}
"""Kinds of files that cannot be made again once lost, each with the regular expression of its beginning.

The first member or line of such a file names its kind; in a signed envelope the kind stands behind the payload.
"""


WRAPPED: dict[str, str] = {}
"""Functions of wrapped keys: "load" reads a file, and "id" the id of its key."""

REMOTE: dict[str, str] = {}
"""Functions of files on servers: "open" opens one as a storage, and "new" begins one."""


def module_of(place: str) -> str:
    """Return the whole name of the module of an object that a value of a table names."""
    return f"fastrack.{place.partition(':')[0]}"


def find(place: str) -> Any:
    """Import the object that a value of a table names."""
    found: Any = import_module(module_of(place))
    for name in place.partition(":")[2].split("."):
        found = getattr(found, name)
    return found
