"""Records of qualifications: what each row saw, signed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fastrack._documents.canonical import parsing, require
from fastrack._documents.fields import DIGEST, ID, TIME, Fields, Form, integer, list_of, one_of, or_none, record, text
from fastrack._keys.signing import Signer, Verifier, open_canonical, sign_envelope
from fastrack._util.regular_file import open_regular

PASSED, FAILED, STAND_IN, READ, NOT_HERE, NOT_ASKED = "passed", "FAILED", "stand-in", "read", "not here", "not asked"
STATES = {
    PASSED: "done on this machine, and seen as expected",
    FAILED: "seen otherwise",
    STAND_IN: "shown on made-up evidence or answers, not on this machine",
    READ: "a setting of this machine, without a verdict",
    NOT_HERE: "this machine lacks what it needs",
    NOT_ASKED: "an option or the folder lacks what it needs",
}
LONGEST = 400  # characters of what a row saw
_PAYLOAD_TYPE = "application/vnd.fastrack.qualification.v1+json"
_LIMIT = 1 << 20  # bytes of a record
_ROWS = 256


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a row."""

    number: int
    name: str
    state: str
    seen: str
    milliseconds: int


@dataclass(frozen=True, slots=True)
class Qualification:
    """A run of all rows. folder : the id of its index; policy : the SHA-256 of its file, None without one."""

    issued: datetime
    fastrack: str
    folder: str
    key: str
    policy: str | None
    rows: tuple[Result, ...]

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows in each state."""
        found = Counter(row.state for row in self.rows)
        return {state: found[state] for state in STATES}

    def sign(self, signer: Signer) -> bytes:
        """Return the signed record."""
        return sign_envelope(_FORM.write(self), _PAYLOAD_TYPE, [signer])


_LINE = text(rf"[ -~]{{1,{LONGEST}}}", f"1 to {LONGEST} characters of printable ASCII")
_RESULT: Fields = {
    "number": integer(1, _ROWS),
    "name": _LINE,
    "state": one_of(*STATES),
    "seen": _LINE,
    "milliseconds": integer(0, 10**9),
}
_FIELDS: Fields = {
    "issued": TIME,
    "fastrack": _LINE,
    "folder": ID,
    "key": ID,
    "policy": or_none(DIGEST),
    "rows": list_of(record(Result, _RESULT), _ROWS),
}
_FORM = Form(_FIELDS, {"format": 1}, _LIMIT)


def load_record(path: Path, owner: Verifier) -> Qualification:
    """Read a record. Raise `SignatureError` unless its owner signed it, and `FormatError` for another document."""
    with open_regular(path) as file:
        payload, _ = open_canonical(file.read(2 * _LIMIT), _PAYLOAD_TYPE, owner, source=str(path))
    with parsing(f"{path} is not the record of a qualification", "get it again from its owner"):
        found = Qualification(**_FORM.parse(payload))
        require([row.number for row in found.rows] == [*range(1, len(found.rows) + 1)] != [], "rows")
    return found
