"""The settings that servers pass to the doors of this package."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def settings_of(given: Mapping[str, Any], place: str, known: Collection[str]) -> Mapping[str, Any]:
    """Return settings, or raise ValueError if one is unknown, as it may be a misspelt one that protects.

    `place` is where the user wrote them. Among `known`, ``folder`` is required.
    """
    unknown = sorted(map(str, given.keys() - set(known)))
    if unknown:
        raise ValueError(
            f"{place}: expected settings among {', '.join(known)}, got {', '.join(unknown):.200}. Correct it"
        )
    if "folder" in known and not isinstance(folder := given.get("folder"), str):
        got = "none" if folder is None else f"one of type {type(folder).__name__}"
        raise ValueError(f"{place}: expected the path of a folder for the blocks as folder, got {got}. Name one")
    return given
