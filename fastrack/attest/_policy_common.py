"""Share what the sections of a policy have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeVar

from fastrack._util.public import attest_public
from fastrack.attest._errors import refused
from fastrack.attest._formats.times import require_in_force
from fastrack.attest._formats.toml import Table
from fastrack.errors import FormatError

T = TypeVar("T", bound=StrEnum)

ANY = "any"
NOT_MEANT = "Do not give the key to this machine; or change the policy, if the machine is meant."
_VERIFY_AGAIN = "Verify the evidence again, with current collateral."
_FETCH_AGAIN = "Fetch current revocation lists and responses, and verify the evidence again with them."


@attest_public
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


def require(evidence: str, name: str, found: object, allowed: Collection[object], key: str) -> None:
    """Require a value that is among the allowed ones of the key of a policy."""
    if found not in allowed:
        shown = [value.hex() if isinstance(value, bytes) else str(value or "none") for value in allowed]
        wanted = f"one of {', '.join(sorted(shown))} ({key})"
        raise refused(evidence, name, wanted=wanted, found="none" if found is None else found, advice=NOT_MEANT)


def require_at_least(evidence: str, name: str, found: int, lowest: int, key: str) -> None:
    """Require a number that is not below the one of the key of a policy."""
    if found < lowest:
        raise refused(evidence, name, wanted=f"at least {lowest} ({key})", found=found, advice=NOT_MEANT)


def require_clear(evidence: str, name: str, is_set: bool, allowed: bool, key: str) -> None:
    """Require that a bit is not set, unless the key of a policy allows it."""
    if is_set and not allowed:
        raise refused(evidence, name, wanted=f"a clear bit ({key} = false)", found="a set one", advice=NOT_MEANT)


def require_age(evidence: str, name: str, since: datetime, longest: timedelta | None, now: datetime, key: str) -> None:
    """Require that a document was issued at most so long ago."""
    if longest is not None and now - since > longest:
        raise refused(evidence, name, wanted=f"at most {longest} ({key})", found=str(now - since), advice=_VERIFY_AGAIN)


def require_current(evidence: str, verified_at: datetime, valid_until: datetime, now: datetime) -> None:
    """Require that what was verified is still valid."""
    require_in_force(evidence, "validity", verified_at, valid_until, now, _VERIFY_AGAIN)


def require_revocation(
    evidence: str, wanted: Revocation, checked_at: datetime | None, longest: timedelta | None, now: datetime, key: str
) -> None:
    """Require that revocation was checked as a policy asks. `checked_at` is the date of the list or response."""
    if wanted is Revocation.NONE:
        return
    if checked_at is None:
        raise refused(evidence, "revocation", wanted=f"a check ({key})", found="none", advice=_FETCH_AGAIN)
    if wanted is Revocation.REQUIRED and longest is not None and now - checked_at > longest:
        limit = f"a list of at most {longest} ago ({key})"
        raise refused(evidence, "revocation", wanted=limit, found=f"one of {now - checked_at} ago", advice=_FETCH_AGAIN)


def read_revocation(table: Table) -> Revocation:
    """Read the key "revocation"; "cached" if it is absent."""
    text = table.text("revocation") or Revocation.CACHED
    try:
        return Revocation(text)
    except ValueError:
        raise table.refusal("revocation", f"one of {', '.join(Revocation)}", repr(text)) from None


def read_days(table: Table, key: str) -> timedelta | None:
    """Read a number of days; None if it is absent."""
    days = table.integer(key)
    if days is None:
        return None
    if days > 36_500:
        raise table.refusal(key, "up to 36500 days", days)
    return timedelta(days=days)


def read_days_or(table: Table, key: str, default: timedelta) -> timedelta:
    """Read a number of days; `default` if it is absent."""
    found = read_days(table, key)
    return default if found is None else found


def read_enum(table: Table, key: str, kind: type[T]) -> frozenset[T]:
    """Read a list of members of an enumeration; an absent one is empty."""
    texts = table.texts(key)
    try:
        return frozenset(kind(text) for text in texts)
    except ValueError as error:
        raise table.refusal(key, f"some of {', '.join(kind)}", str(error)) from None


def require_named(measurements: Mapping[str, object], names: Iterable[str]) -> None:
    """Require that what tells the software is named, as `from_toml` requires it of a file."""
    if absent := [name for name in names if name not in measurements]:
        raise ValueError(f"expected measurements= with {', '.join(absent)}, got none; pass None for any value")


def require_lines(table: Table, lines: Mapping[str, str]) -> None:
    """Require that a section says which software is given the key, be it any."""
    if absent := [name for name in lines if not table.has(name)]:
        names, section = " and ".join(map(table.path, absent)), table.path("").removesuffix(".")
        raise FormatError(
            f"reading the policy failed: expected {names}, got none, which would give the key to any software or "
            f"platform. Add to [{section}] the lines {' and '.join(f'`{lines[name]}`' for name in absent)}."
        )


def read_measurements(table: Table, sizes: Mapping[str, int]) -> dict[str, frozenset[bytes] | None]:
    """Read the allowed values of each field; None where the policy says ``"any"``."""
    return {name: table.digests_or(name, size, ANY) or None for name, size in sizes.items() if table.has(name)}
