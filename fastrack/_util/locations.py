"""Distinguish URLs from paths, and refuse what is neither: files are on the local disk or on a server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from io import IOBase
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from fastrack._util.key_text import refuse_key_text
from fastrack.errors import FormatError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")  # a single letter would be a drive
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d*)?")

_SYNTAX = re.compile(r"[?#]|::")  # by which fsspec takes versions, generations and other stores out of a URL
_WEB = {"http", "https"}

_COLLAPSED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")  # as `Path` writes a URL


class Url(os.PathLike[str]):
    """The URL of a file. Its text leaves out possible secrets: user, password, query and fragment.

    `os.fspath` returns the full URL.
    """

    __slots__ = ("_shown", "full", "scheme")

    def __init__(self, url: str) -> None:
        match = _URL.match(url)
        if match is None:
            raise ValueError("expected a URL, got a path. Write it as scheme://host/path")
        self.full = url
        self.scheme = match[1].lower()
        rest = re.split(r"[?#]", url[match.end() :], maxsplit=1)[0]
        host, slash, path = rest.partition("/")
        is_cut = ":" in host and "@" in path  # the colon may precede a password with a slash, rather than a port
        host = host.rpartition("@")[2]
        is_told = _HOST.fullmatch(host) and not is_cut
        self._shown = f"{self.scheme}://{host}{slash}{path}" if is_told else f"{self.scheme}://..."

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._shown.rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The suffix of the name, like `pathlib.Path.suffix`."""
        return Path(self.name).suffix

    def __fspath__(self) -> str:
        return self.full

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"Url({self._shown!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Url) and other.full == self.full

    def __hash__(self) -> int:
        return hash(self.full)

    def __reduce__(self) -> tuple[object, ...]:
        return Url, (self.full,)


def without_password(text: str) -> str:
    """Return a text without possible secrets if it is a URL, or a `pathlib.Path` made from a URL."""
    match = _COLLAPSED.match(text)
    return text if match is None else str(Url(f"{match[1]}://{text[match.end() :]}"))


Location = Path | Url
NO_PATH = "expected a path on this machine, got a URL. Copy it here first"  # the end of a message
NO_NAME = (  # another
    "expected the URL of a store without ?, # and ::, got one with more than a name. Leave that out; credentials "
    "belong into the environment, or the configuration of fsspec"
)


def locate(path: str | os.PathLike[str]) -> Location:
    """Return a `Path`, or a `Url` for a file on a server. A ``file://`` URL becomes a path."""
    text = require_path(path)
    if not text:
        raise ValueError("expected a path, got an empty text. Name a file or a folder; . is the current one")
    match = _URL.match(text)
    if match is None:
        refuse_key_text(text, may_be_id=True)
        return Path(text)
    if match[1].lower() == "file":
        host, slash, name = text[match.end() :].partition("/")
        if host not in {"", "localhost"}:
            raise ValueError(f"{Url(text)}: expected a file of this machine, got one of another. Mount it")
        return Path(unquote(slash + re.split(r"[?#]", name, maxsplit=1)[0]))
    return Url(text)


def join(location: Location, name: str) -> Location:
    """Return the location of a file in a folder. `name` may contain slashes."""
    if isinstance(location, Path):
        return location / name
    if location.scheme in _WEB:
        folder = re.split(r"[?#]", location.full, maxsplit=1)[0]
        return Url(f"{folder.rstrip('/')}/{quote(name)}{location.full[len(folder) :]}")
    require_bare(location)
    if _SYNTAX.search(name):  # fsspec would read or write another object, under another name
        raise FormatError(
            f"{location}: expected names of files without ?, # and ::, which have a meaning in URLs of stores, got "
            f"{name!r:.200}. Rename it"
        )
    return Url(f"{location.full.rstrip('/')}/{name}")


def require_bare(url: Url) -> None:
    """Refuse the URL of a store that has more than a name: stores would make it part of names, with its secrets."""
    if url.scheme not in _WEB and _SYNTAX.search(url.full.partition("://")[2]):
        raise ValueError(f"{url}: {NO_NAME}")


def locate_target(path: str | os.PathLike[str]) -> Location:
    """Return the location of something to write, and refuse a `pathlib.Path` made from a URL."""
    location = locate(path)
    if isinstance(location, Path):
        require_local(location)
    else:
        require_bare(location)
    return location


def locate_local(path: str | os.PathLike[str]) -> Path:
    """Return a `Path`, and refuse the URL of a server."""
    location = locate(path)
    if isinstance(location, Url):
        raise _no_path(location)
    require_local(location)
    return location


def require_path(path: object, usage: str = "") -> str:
    """Return the text of a path. Raise TypeError if it is none, such as a swapped argument; `usage` shows the call."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if isinstance(text, str):
        return text
    advice = "Pass os.fsdecode of it" if isinstance(text, bytes) else "Name a file or a folder"
    advice = f"Call {usage}" if usage else "Pass its name" if isinstance(text, IOBase) else advice
    raise TypeError(f"path: expected str or os.PathLike, got {type(text).__name__}. {advice}")


def several(given: Any) -> Iterable[Any]:
    """Return the paths of an argument that may be one path, or several."""
    is_one = isinstance(given, (str, bytes, os.PathLike, IOBase)) or not isinstance(given, Iterable)
    return [given] if is_one else given


def require_local(path: str | os.PathLike[str]) -> None:
    """Refuse a URL, or a `pathlib.Path` made from a URL."""
    text = path if isinstance(path, str) else require_path(path)
    if (match := _COLLAPSED.match(text)) and not os.path.lexists(f"{match[1]}:"):
        raise _no_path(Url(f"{match[1]}://{text[match.end() :]}"))


def _no_path(url: Url) -> ValueError:
    return ValueError(f"{url}: {NO_PATH}")
