"""Documents in canonical JSON, where each content has one form only: ASCII, sorted members, no spaces."""

from __future__ import annotations

import base64
import json
from binascii import b2a_base64
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from fastrack._documents.strict import refuse_constant
from fastrack.errors import FormatError

NUMBER_LIMIT = 2**53  # not every JSON parser keeps larger integers exactly
# NaN and infinities are no JSON, though Python's encoder writes them by default.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), check_circular=False, allow_nan=False)


def encode(document: Any, *, end: bytes = b"") -> bytes:
    """Return the canonical form of a value, followed by `end`."""
    return _ENCODER.encode(document).encode() + end


def decode(
    content: bytes, members: Collection[str], fixed: Mapping[str, int], *, limit: int | None = None, end: bytes = b""
) -> dict[str, Any]:
    """Parse a canonical JSON object with exactly these members. The members in `fixed` must have the given values.

    Raise ValueError or RecursionError if the content differs, or has more bytes than `limit`. A repeated member is not
    canonical.
    """
    if limit is not None and len(content) > limit:
        raise ValueError(f"expected at most {limit} bytes, got more")
    try:
        document = json.loads(content.decode("ascii"), parse_constant=refuse_constant)
    except ValueError:
        raise ValueError("it is no JSON") from None
    if encode(document, end=end) != content:
        raise ValueError("it is not in canonical form")
    if not isinstance(document, dict) or document.keys() != set(members):
        raise ValueError("its members are others")
    for name, value in fixed.items():
        require(type(document[name]) is int and document[name] == value, name)
    return document


@contextmanager
def parsing(problem: str, advice: str) -> Iterator[None]:
    """Convert the errors of malformed members into a `FormatError`."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{problem}: {error!s:.200}; {advice}") from None


def require(holds: object, member: str) -> None:
    """Raise ValueError about a member unless the condition `holds` is true."""
    if not holds:
        raise ValueError(f"member {member!r} has a value out of range")


def is_number(value: object) -> bool:
    """Return True if a value is an integer from 0 that every JSON parser keeps exactly."""
    return type(value) is int and 0 <= value < NUMBER_LIMIT


def encode_bytes(content: bytes) -> str:
    """Return bytes as base64 with padding (RFC 4648, section 4)."""
    return b2a_base64(content, newline=False).decode()


def decode_bytes(text: str) -> bytes:
    """Return the bytes of canonical base64, whose unused bits are zero."""
    content = base64.b64decode(text.encode(), validate=True)
    if encode_bytes(content) != text:
        raise ValueError("expected base64 in canonical form")
    return content


def encode_time(time: datetime) -> str:
    """Return a time in whole seconds of UTC."""
    return time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"
