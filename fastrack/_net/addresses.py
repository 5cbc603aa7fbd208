"""Addresses of servers and services, and which of them are of this machine."""

from __future__ import annotations

import re
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import SplitResult, urljoin, urlsplit

from fastrack._util.shown import shown
from fastrack.errors import FormatError

_PRINTABLE = re.compile(r"[!-~]*")


def is_loopback(host: str) -> bool:
    """Return whether a host is an address of this machine. A name is none: what resolves it may be elsewhere."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def require_service(url: str, action: str, *, has_path: bool) -> SplitResult:
    """Return the parts of a service's address, ``https://HOST:PORT``, which may have a path only with `has_path`.

    Plain HTTP is allowed only for a loopback address. Raise `ValueError` for another, with the `action` that it was
    for.
    """
    message = f"{action} failed: expected an address as https://HOST{'' if has_path else ':PORT'}, got {shown(url)}."
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError:  # UnicodeError is one
        raise ValueError(message) from None
    if parts.username is not None:
        raise ValueError(f"{action} failed: expected an address without a password, got one with it. Use a proxy.")
    is_protected = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))
    if not is_protected or not host or not (has_path or (parts.path in {"", "/"} and not parts.query)):
        raise ValueError(f"{message} Without TLS only loopback addresses are allowed.")
    return parts


def split_address(target: str, name: object, base: SplitResult | None = None, *, what: str = "a URL") -> SplitResult:
    """Return the parts of a URL, or of one relative to `base`; refuse one that needs quoting. `name` is for errors."""
    with suppress(ValueError):
        parts = urlsplit(target if base is None else urljoin(base.geturl(), target))
        _ = parts.port  # raises if it is no number
        if parts.scheme in {"http", "https"} and parts.hostname and _PRINTABLE.fullmatch(target):
            return parts
    what = what if base is None else "a redirection to one"
    raise FormatError(
        f"{name}: expected {what} of printable ASCII characters, with http:// or https://, a host, and a number as its "
        "port if it has one; got another. Encode other characters with %"
    )
