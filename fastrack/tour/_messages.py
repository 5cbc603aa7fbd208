"""The messages between a visitor and the two who grant keys: a step by its name, and canonical documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from fastrack._documents.exchange import decode, encode
from fastrack._documents.fields import binary, list_of, or_none
from fastrack._util.gate import most_bytes
from fastrack.errors import (
    AttestationError,
    AuthenticationError,
    FastrackError,
    FormatError,
    GrantError,
    RollbackError,
    SignatureError,
)

LIMIT = most_bytes("fastrack tour-begin")
PARTS = {
    "begin": ("chain", "delegation", "manifest", "offer", "request"),
    "delegated": ("delegation", "grants"),
    "consented": ("consent", "grants"),
    "finish": ("chain", "manifest"),
    "finished": ("completion", "manifest"),
}
"""The parts of each message, by its kind."""

SMALL_LIMIT = 64 << 10  # bytes of an answer other than these
ANSWER_LIMITS = {"begin": LIMIT, "finish": LIMIT}
ERRORS: Mapping[str, type[FastrackError]] = {
    kind.__name__: kind
    for kind in (RollbackError, GrantError, AttestationError, SignatureError, FormatError, AuthenticationError)
}
"""The errors that keep their class between a desk and a visitor, by their names."""

_KINDS = {"chain": "chain of a tour", "manifest": "manifest of a tour", "offer": "fastrack offer"}
_KINDS["grants"] = "fastrack tour-grants"
_FIELDS = {
    kind: {name: or_none(binary(most_bytes(_KINDS.get(name, "document of a tour")))) for name in names}
    for kind, names in PARTS.items()
}
_GRANT_LIMIT = 4 << 20  # a grant may name some 100,000 files
_GRANTS = list_of(binary(_GRANT_LIMIT), 1024)


class Desk(Protocol):
    """A party that grants keys to a visitor: `OwnerDesk`, `HolderDesk`, or one of these at the end of a connection."""

    def ask(self, step: str, body: bytes = b"") -> bytes:
        """Answer a step: "challenge", "begin", "end" or "finish"."""


def pack(kind: str, **parts: bytes) -> bytes:
    """Return a message with these parts. Parts that are not given are empty."""
    members = {name: field.write(parts.get(name) or None) for name, field in _FIELDS[kind].items()}
    return encode(f"fastrack/tour-{kind}", 1, members)


def unpack(kind: str, message: bytes) -> Mapping[str, bytes]:
    """Return the parts of a message. Raise `FormatError` if it is not in its form."""
    parts = decode(message, f"fastrack/tour-{kind}", 1, PARTS[kind]).read_all(_FIELDS[kind])
    return {name: part or b"" for name, part in parts.items()}


def write_grants(envelopes: Iterable[bytes]) -> bytes:
    """Return the document of several grants."""
    return encode("fastrack/tour-grants", 1, {"grants": _GRANTS.write(tuple(envelopes))})


def read_grants(content: bytes) -> tuple[bytes, ...]:
    """Return the envelopes of a document of grants. Nothing is verified."""
    return decode(content, "fastrack/tour-grants", 1, ("grants",)).read("grants", _GRANTS)
