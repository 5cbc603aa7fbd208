"""Suggest similar names when a lookup fails."""

from collections.abc import Iterable

_LONGEST = 300  # characters of a list of names
_CLOSE = 80  # characters of a single name


def list_names(absent: object, present: Iterable[str]) -> str:
    """Return the end of a message about an absent name: the present names, and a similar name if there is one."""
    from difflib import get_close_matches  # deferred: few processes need it

    names = list(present)
    listed = ", ".join(map(repr, names)) or "none"
    listed = listed if len(listed) <= _LONGEST else f"{listed[:_LONGEST]}..."
    near = get_close_matches(absent, names, 1) if isinstance(absent, str) else []
    return f"it has {listed}" + (f". Did you mean {near[0]!r:.{_CLOSE}}?" if near else "")
