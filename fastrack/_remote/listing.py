"""List the objects in a folder of a store, or those that a pattern matches."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

from fastrack._remote.filesystem import _VALIDATORS, call_store, find_store
from fastrack._remote.objects import check_size
from fastrack._remote.retries import retry
from fastrack._util.locations import Url
from fastrack.errors import FormatError

_MAGIC = re.compile(r"[*\[]")  # no question mark, which begins the query of a URL
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")


def is_pattern(url: Url) -> bool:
    """Return True if a URL is a pattern for names of objects."""
    return _MAGIC.search(url.full) is not None


def split_pattern(url: Url) -> tuple[Url, str]:
    """Return the folder of a pattern, and the pattern of the names in it, which is empty for a folder."""
    folder, _, pattern = url.full.rpartition("/")
    if _MAGIC.search(folder):
        raise ValueError(f"{url}: expected a pattern in the last part of the URL, got one before it. List the folders")
    return Url(f"{folder}/"), pattern


def list_objects(url: Url) -> list[tuple[str, int, str | None]]:
    """Return the objects of a folder, or those that a pattern matches, sorted by their names.

    Of each its name in the folder, its size in bytes and its validator, as in `Version`. Objects in folders below are
    left out. A folder is not there without an object: one that is absent has none.
    """
    if url.scheme in {"http", "https"}:
        raise ValueError(
            f"{url}: expected a store that lists its objects, got a web server. Give the URL of an index, which "
            "fastrack.index_dataset writes, or those of the files"
        )
    folder, pattern = split_pattern(url)
    store, path = find_store(folder)
    stem = _MAGIC.split(pattern, maxsplit=1)[0]

    def ask() -> list[dict[str, Any]]:
        store.invalidate_cache()  # of listings
        try:
            if stem:  # which the server compares
                return list(call_store(folder, store, "find", path, prefix=stem, detail=True).values())
            return list(call_store(folder, store, "ls", path, detail=True))
        except FileNotFoundError as error:
            if getattr(error, "code", "") in {"NoSuchBucket", "ContainerNotFound"}:
                raise
            return []

    found = {}
    for info in retry(ask, folder):
        name = str(info["name"]).removeprefix(f"{path.rstrip('/')}/")
        if info.get("type") == "directory" or not name or "/" in name or (pattern and not fnmatchcase(name, pattern)):
            continue
        if _CONTROL.search(name):
            raise FormatError(f"{folder}: expected names without control characters, got {name!a:.200}. Rename it")
        if type(info.get("size")) is not int:
            raise FormatError(f"{folder}: {name:.200}: expected the size of each object, got none. List them yourself")
        validator = next((str(info[member]) for member in _VALIDATORS if info.get(member)), None)
        found[name] = (name, check_size(info["size"], folder), validator)
    return sorted(found.values())
