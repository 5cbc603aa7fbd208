"""Arguments, names and sizes in messages: without keys, passwords of URLs, and values of tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable

from fastrack._util.key_text import has_key
from fastrack._util.locations import without_password

HIDDEN = "what looks like a key, which is not repeated here"
_LONGEST = 300  # characters of a list of names
_CLOSE = 80  # characters of a single name


def shown(value: object, limit: int = 80, *, may_be_id: bool = False) -> str:
    """Return the text of an argument for a message: an integer, a text or a path, or the type of any other object.

    Keys, and user, password and query of a URL, are hidden. With `may_be_id`, 32 lower-case digits are shown.
    """
    if isinstance(value, (str, os.PathLike)):
        text = os.fsdecode(value)
        return HIDDEN if has_key(text, may_be_id=may_be_id) else f"{without_password(text)!r:.{limit}}"
    if value is None or type(value) in {bool, int} or (type(value) in {list, tuple} and not value):
        is_long = type(value) is int and value.bit_length() > 1000  # Python refuses to write some of these
        return f"{hex(value) if is_long else repr(value):.{limit}}"  # type: ignore[arg-type]
    return f"an object of type {type(value).__qualname__}"


def list_names(absent: object, present: Iterable[str]) -> str:
    """Return the end of a message about an absent name: the present names, and a similar name if there is one."""
    from difflib import get_close_matches  # deferred: few processes need it

    names = list(present)
    listed = ", ".join(map(repr, names)) or "none"
    listed = listed if len(listed) <= _LONGEST else f"{listed[:_LONGEST]}..."
    lowered = {name.lower(): name for name in names}
    near = get_close_matches(absent.lower(), lowered, 1) if isinstance(absent, str) else []
    return f"it has {listed}" + (f". Did you mean {lowered[near[0]]!r:.{_CLOSE}}?" if near else "")


def format_size(count: float) -> str:
    """Format a number of bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f}".removesuffix(".0") + f" {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
