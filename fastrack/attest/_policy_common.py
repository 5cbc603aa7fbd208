"""Share what the sections of a policy have in common."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from difflib import SequenceMatcher
from enum import StrEnum
from string import digits
from typing import TypeVar

from fastrack._documents.fields import Field, integer
from fastrack._documents.toml import Table
from fastrack._util.public import public
from fastrack.attest._errors import refused, require_in_force
from fastrack.errors import AttestationError, FormatError

T = TypeVar("T")

ANY = "any"
NOT_MEANT = "Do not give the key to this machine; or change the policy, if the machine is meant."
_VERIFY_AGAIN = "Fetch current collateral (`fastrack attest fetch`), and verify the evidence again with it."
_FETCH_AGAIN = (
    "Fetch current revocation lists and responses (`fastrack attest fetch`), and verify the evidence again with that "
    "folder."
)
_LIKE = 0.75  # of keys that differ in two letters out of eight; of known keys of a section none are so much alike
_REVOCATION_COVERS = 'revocation lists or responses in force; "required" also limits their age: max_revocation_age_days'


@public
class Revocation(StrEnum):
    """The amount that a policy asks about revocation. Nothing is fetched: a verifier was passed a list, or was not.

    ``REQUIRED``: checked against one that was issued at most `max_revocation_age` before, where there is such an age.
    ``CACHED``: checked against one that is in force, however old. ``NONE``: not asked; what was verified has no date of
    a check, which stays on record.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.Revocation("cached") is attest.Revocation.CACHED
    True
    """

    REQUIRED = "required"
    CACHED = "cached"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Judge:
    """Evidence that a section of a policy judges at a time. Its methods raise `AttestationError`.

    evidence : its name in errors; section : such as "cpu.tdx", of which all keys are
    survey : a list that takes errors which would be raised, to show all of them; None where a verdict is asked
    """

    evidence: str
    section: str
    now: datetime
    survey: list[AttestationError] | None = None

    def of(self, evidence: str) -> Judge:
        """Return the judge of other evidence by the same section, at the same time."""
        return Judge(evidence, self.section, self.now, self.survey)

    def refuse(self, name: str, wanted: str, found: object, key: str | None, advice: str = NOT_MEANT) -> None:
        """Refuse a property; the key is the one that decides, if there is one."""
        wanted = wanted if key is None else f"{wanted} ({self.section}.{key})"
        self.note(refused(self.evidence, name, wanted=wanted, found=found, advice=advice))

    def note(self, error: AttestationError) -> None:
        """Raise an error; in a survey, note it."""
        if self.survey is None:
            raise error
        self.survey.append(error)

    def require(self, name: str, found: object, allowed: Collection[object], key: str) -> None:
        """Require a value that is among the allowed ones."""
        if found not in allowed:
            shown = [value.hex() if isinstance(value, bytes) else str(value or "none") for value in allowed]
            self.refuse(name, f"one of {', '.join(sorted(shown))}", "none" if found is None else found, key)

    def require_listed(self, name: str, found: object, allowed: Collection[object], key: str) -> None:
        """Require a value that a list names, unless the list is empty."""
        if allowed:
            self.require(name, found, allowed, key)

    def require_at_least(self, name: str, found: int, lowest: int, key: str) -> None:
        """Require a number that is not below the lowest."""
        if found < lowest:
            self.refuse(name, f"at least {lowest}", found, key)

    def require_clear(self, name: str, is_set: bool, allowed: bool, key: str) -> None:
        """Require that a bit is not set, unless the policy allows it."""
        if is_set and not allowed:
            self.refuse(name, "a clear bit", "a set one", f"{key} = false")

    def require_age(self, name: str, since: datetime, longest: timedelta | None, key: str) -> None:
        """Require that a document was issued at most so long ago."""
        age = self.now - since
        if longest is not None and age > longest:
            self.refuse(name, f"at most {longest}", str(age), key, _VERIFY_AGAIN)

    def require_current(self, verified_at: datetime, valid_until: datetime) -> None:
        """Require that what was verified is still valid."""
        try:
            require_in_force(self.evidence, "validity", verified_at, valid_until, self.now, _VERIFY_AGAIN)
        except AttestationError as error:
            self.note(error)

    def require_revocation(self, wanted: Revocation, checked_at: datetime | None, longest: timedelta | None) -> None:
        """Require that revocation was checked as a policy asks. `checked_at` is the date of the list or response."""
        if wanted is Revocation.NONE:
            return
        if checked_at is None:
            self.refuse("revocation", "a check", "none", "revocation", _FETCH_AGAIN)
        elif wanted is Revocation.REQUIRED and longest is not None and (age := self.now - checked_at) > longest:
            limit = f"a list of at most {longest} ago"
            self.refuse("revocation", limit, f"one of {age} ago", "revocation", _FETCH_AGAIN)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a policy that is drafted: its key, its value, and what it covers.

    A line that `is_open` would let more in than it should: it is drafted as a comment.
    """

    key: str
    value: object
    covers: str
    is_open: bool = False

    def __str__(self) -> str:
        return f"# {self.covers}\n{'# ' * self.is_open}{self.key} = {write_toml(self.value)}"


def to_claims(lines: Iterable[Line]) -> dict[str, object]:
    """Return what lines say, for JSON: bytes in hexadecimal, and the one value of a list by itself."""
    values: dict[str, list[object]] = {}
    for line in lines:
        values.setdefault(line.key, []).append(_to_claim(line.value))
    return {key: found[0] if len(found) == 1 else found for key, found in values.items()}


def _to_claim(value: object) -> object:
    if isinstance(value, (set, frozenset)):
        claims = sorted(map(str, map(_to_claim, value)))
        return claims[0] if len(claims) == 1 else claims
    if isinstance(value, Mapping):
        return {str(name): _to_claim(one) for name, one in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, (bool, int)) else str(value)


def write_toml(value: object) -> str:
    """Write a value in TOML: text, a number, true or false, bytes in hexadecimal, a set or a table of such."""
    if isinstance(value, bytes):
        value = value.hex()
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_write_key(str(name))} = {write_toml(one)}' for name, one in value.items())} }}"
    if isinstance(value, (set, frozenset)):
        return f"[{', '.join(sorted(map(write_toml, value)))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # a basic string of TOML


def _write_key(name: str) -> str:
    return name if name.isascii() and name.replace("_", "").isalnum() else write_toml(name)


def draft_revocation(checked_at: datetime | None) -> Line:
    """Draft the key "revocation"."""
    if checked_at is None:
        return Line("revocation", Revocation.NONE, "NOT CHECKED: the evidence came without lists or responses", True)
    return Line("revocation", Revocation.CACHED, _REVOCATION_COVERS)


def draft_openings(*, debug: bool, migration: bool) -> Iterator[Line]:
    """Draft the keys that let in machines that are open to their hosts."""
    for key, allowed, warning, covers in (
        ("allow_debug", debug, "THE HOST CAN READ THIS MACHINE: a debugger is on", "machines that the host can read"),
        ("allow_migration", migration, "THE HOST CAN MOVE THIS MACHINE to another one", "machines that the host moves"),
    ):
        yield Line(key, allowed, warning if allowed else covers, allowed)


def require_named(measurements: Mapping[str, object], names: Iterable[str]) -> None:
    """Require that what tells the software is named, as `from_toml` requires it of a file."""
    if absent := [name for name in names if name not in measurements]:
        raise ValueError(f"expected measurements= with {', '.join(absent)}, got none; pass None for any value")


def require_lines(table: Table, lines: Mapping[str, str]) -> None:
    """Require that a section says which software is given the key, be it any."""
    absent = [name for name in lines if not table.has(name)]
    others = [key for key in table.names() if key not in lines]
    for name in absent:  # before the advice to add it, which would leave two of them, the added one "any"
        if (meant := _find_like(name, others)) is not None:
            wanted, found = table.path(name), table.path(meant)
            raise FormatError(f"reading the policy failed: expected {wanted}, got the similar {found}. Correct it.")
    if absent:
        names, section = " and ".join(map(table.path, absent)), table.path("").removesuffix(".")
        raise FormatError(
            f"reading the policy failed: expected {names}, got none, which would give the key to any software or "
            f"platform. Add to [{section}] the lines {' and '.join(f'`{lines[name]}`' for name in absent)}."
        )


def _find_like(name: str, keys: Iterable[str]) -> str | None:
    """Return the key that is a name misspelt, if one is. Keys that differ only in their number are other keys."""
    shapes = {key: key.lower() for key in keys}
    likeness = {
        key: SequenceMatcher(None, name, shape).ratio()
        for key, shape in shapes.items()
        if shape == name or shape.rstrip(digits) != name.rstrip(digits)
    }
    found = max(likeness, key=lambda key: likeness[key], default=None)
    return found if found is not None and likeness[found] >= _LIKE else None


def or_any(field: Field[T]) -> Field[T | None]:
    """Return a field that may be the word "any", which is None."""
    return Field(lambda value: None if value == ANY else field.read(value))


_DAYS = integer(0, 36_500)
AGE = Field(lambda days: timedelta(days=_DAYS.read(days)))
"""The field of a time in days."""
