"""The messages between a visitor and the two who grant keys: a step by its name, and canonical documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from fastrack._util.gate import most_bytes
from fastrack.attest._formats import wire
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

_PART_LIMITS = {
    "chain": most_bytes("chain of a tour"),
    "manifest": most_bytes("manifest of a tour"),
    "offer": most_bytes("fastrack offer"),
    "grants": most_bytes("fastrack tour-grants"),
}
_DOCUMENT_LIMIT = most_bytes("document of a tour")
_GRANTS_LIMIT = 1024
_GRANT_LIMIT = 4 << 20  # a grant may name some 100,000 files


class Desk(Protocol):
    """A party that grants keys to a visitor: `OwnerDesk`, `HolderDesk`, or one of these at the end of a connection."""

    def ask(self, step: str, body: bytes = b"") -> bytes:
        """Answer a step: "challenge", "begin", "end" or "finish"."""


def pack(kind: str, **parts: bytes) -> bytes:
    """Return a message with these parts. Parts that are not given are empty."""
    members = {name: wire.write_bytes(parts.get(name) or None) for name in PARTS[kind]}
    return wire.encode(f"fastrack/tour-{kind}", 1, members)


def unpack(kind: str, message: bytes) -> Mapping[str, bytes]:
    """Return the parts of a message. Raise `FormatError` if it is not in its form."""
    reader = wire.decode(message, f"fastrack/tour-{kind}", 1, PARTS[kind])

    def read(name: str) -> bytes:
        return reader.binary(name, limit=_PART_LIMITS.get(name, _DOCUMENT_LIMIT))

    return {name: reader.or_none(name, read) or b"" for name in PARTS[kind]}


def write_grants(envelopes: Iterable[bytes]) -> bytes:
    """Return the document of several grants."""
    return wire.encode("fastrack/tour-grants", 1, {"grants": [wire.write_bytes(each) for each in envelopes]})


def read_grants(content: bytes) -> tuple[bytes, ...]:
    """Return the envelopes of a document of grants. Nothing is verified."""
    reader = wire.decode(content, "fastrack/tour-grants", 1, ("grants",))
    return reader.binaries("grants", count=_GRANTS_LIMIT, limit=_GRANT_LIMIT)
