"""The settings that servers pass to the doors of this package."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from fastrack._keys.keyring import KeyLike, KeyRing, sealing_key
from fastrack._keys.keys import Key
from fastrack._models.launched import block_keys

_TOLD_BY_NONE = {
    "edition": ("the version of the weights", "2026-11"),
    "adapters": ("the version of the adapters", "2026-11"),
    "kv_dtype": ("the dtype of the KV cache as the engine has it", "bfloat16 or fp8_e4m3"),
    "layout": ("the layout of the engine's KV cache", "NHD"),
    "hash": ("the function that hashes tokens", "blake3"),
    "seed": ("the seed of that hash, PYTHONHASHSEED", "0"),
}
"""Settings that say what no object of a server does: what each is, and a value."""


def settings_of(
    given: Mapping[str, Any], place: str, known: Collection[str], *, required: Collection[str] = ()
) -> Mapping[str, Any]:
    """Return settings, or raise ValueError if one is unknown, as it may be a misspelt one that protects.

    `place` is where the user wrote them. Among `known`, ``folder`` is required, and so are those of `required`, which
    no object of the server tells.
    """
    unknown = sorted(map(str, given.keys() - set(known)))
    if unknown:
        raise ValueError(
            f"{place}: expected settings among {', '.join(known)}, got {', '.join(unknown):.200}. Correct it"
        )
    if "folder" in known and not isinstance(folder := given.get("folder"), str):
        got = "none" if folder is None else f"one of type {type(folder).__name__}"
        raise ValueError(f"{place}: expected the path of a folder for the blocks as folder, got {got}. Name one")
    for name in required:
        require_setting(given, place, name)
    return given


def require_setting(given: Mapping[str, Any], place: str, name: str) -> str:
    """Return a setting that says what no object of the server tells; raise ValueError if it is missing."""
    value, (meaning, example) = given.get(name), _TOLD_BY_NONE[name]
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise ValueError(
            f"{place}: expected {meaning} as {name}, got none. The server does not tell it, and blocks that differ in "
            f"it would open in each other's place. Write {name} into {place}, such as {example}"
        )
    return str(value)


def block_key(given: KeyLike | None, *, is_shared: bool = True) -> Key:
    """Return the key of a door: the one that was given, or that of ``fastrack run`` for blocks, or the default one.

    Blocks that are not shared, with another server or the next start, have a random key of that program.
    """
    own = block_keys(is_shared=is_shared) if given is None and KeyRing.default() is None else None
    return sealing_key(given if own is None else own)


def limit_of(given: Mapping[str, Any], place: str) -> int | None:
    """Return the setting ``limit`` in bytes: a number of them, or such as ``"20 GiB"``."""
    value = given.get("limit")
    if value is None:
        return None
    match = re.fullmatch(r"([1-9]\d*) ?(KiB|MiB|GiB|TiB)?", str(value))
    if match is None:
        raise ValueError(f"{place}: expected bytes as limit, such as 20 GiB, got {str(value)!r:.40}. Correct it")
    return int(match[1]) << 10 * (None, "KiB", "MiB", "GiB", "TiB").index(match[2])
