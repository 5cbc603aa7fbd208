"""Make the errors of this package, in one form: what failed, the value expected and found, and advice."""

from datetime import datetime

from fastrack._documents.exchange import malformed, shorten
from fastrack.errors import AttestationError, FormatError

__all__ = ["CollateralFileError", "malformed", "refused", "require_in_force", "require_time_zone"]


class CollateralFileError(FormatError):
    """A file of the reader's own collateral cannot be used, whatever the evidence is."""


def refused(evidence: str, field: str, *, wanted: object, found: object, advice: str) -> AttestationError:
    """Make the error for a wrong value in a field of evidence.

    `wanted` is the expected value, or a description of allowed values. Bytes are shown and kept in hexadecimal.
    `advice` is one sentence about what to do, with its full stop.
    """
    wanted, found = (value.hex() if isinstance(value, bytes) else value for value in (wanted, found))
    return AttestationError(
        f"verifying the {field} of the {evidence} failed: expected {shorten(wanted)}, got {shorten(found)}. {advice}",
        evidence=evidence,
        field=field,
        wanted=wanted,
        found=found,
    )


def require_time_zone(now: datetime) -> None:
    """Raise `ValueError` if a time has no time zone."""
    if now.utcoffset() is None:
        raise ValueError(f"expected now= with a time zone, got {now!r}; datetime.now(timezone.utc) has one")


def require_in_force(
    evidence: str, field: str, start: datetime, end: datetime | None, now: datetime, advice: str, subject: str = ""
) -> datetime:
    """Require `now` from the start to the end of a document, and return the end, which must not be None.

    `subject` stands before the times in the message.
    """
    if end is None or not start <= now <= end:
        wanted = f"{subject}{start.isoformat()} to {end.isoformat() if end else 'a next update, which it lacks'}"
        raise refused(evidence, field, wanted=wanted, found=now.isoformat(), advice=advice)
    return end
