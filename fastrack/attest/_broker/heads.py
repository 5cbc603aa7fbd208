"""Heads of a broker's log, signed by its owner, and the comparison of what two of them, or of two databases, tell."""

import os
from collections.abc import Iterable, Mapping

from fastrack._documents import fields
from fastrack._documents.canonical import parsing
from fastrack._documents.fields import Form
from fastrack._keys.signing import Signer, Verifier, open_envelope, sign_envelope
from fastrack._service.journal import LogRecord
from fastrack._util.regular_file import open_regular
from fastrack.attest._broker.ledger import read_log
from fastrack.errors import FormatError

PAYLOAD_TYPE = "application/vnd.fastrack.broker-head.v1+json"

_LIMIT = 64 << 10  # bytes of a file
_DATABASE = b"SQLite format 3\0"
_NONE = LogRecord(0, "", "", {}, bytes(32))
_FORM = Form({"number": fields.NUMBER, "time": fields.TEXT, "hash": fields.hexadecimal(32)}, {"version": 1})


def sign_head(entries: list[LogRecord], signer: Signer) -> bytes:
    """Return the signed head of a log: number, time and hash of its last entry, the hash of all entries."""
    head = entries[-1] if entries else _NONE
    return sign_envelope(_FORM.write(head), PAYLOAD_TYPE, [signer])


def read_head(path: str | os.PathLike[str], owners: Iterable[Verifier]) -> Mapping[int, bytes]:
    """Return the hashes that a database or a signed head tells, by the numbers of entries. Both are verified.

    Raise SignatureError if no owner signed the head, FormatError if it is none, and the errors of `read_log`.
    """
    with open_regular(path) as file:
        content = file.read(_LIMIT + 1)
    if content.startswith(_DATABASE):
        return {entry.number: entry.hash for entry in read_log(path)}
    if len(content) > _LIMIT:
        raise FormatError(f"{path}: expected a signed head or the database of a broker, got another file. Name it")
    payload, _ = open_envelope(content, PAYLOAD_TYPE, owners, source=str(path))
    with parsing(f"{path} is not a signed head", "get it again from its owner"):
        head = _FORM.parse(payload)
    return {head["number"]: head["hash"]}


def compare_heads(known: Mapping[int, bytes], now: Mapping[int, bytes]) -> str:
    """Return what became of a known log: it is the "same", "newer", "older", or "forked"; or "unknown".

    The hash of the last entry of the shorter one tells, if both have it. A later head by itself does not have it.
    """
    before, after = max(known, default=0), max(now, default=0)
    last = min(before, after)
    hashes = [log[last] for log in (known, now) if last in log] if last else []
    if len(set(hashes)) > 1:
        return "forked"
    if after < before:
        return "older"
    if last and len(hashes) < 2:
        return "unknown"
    return "same" if after == before else "newer"
