"""Make the errors of this package, in one form: what failed, the value expected and found, and advice."""

from datetime import datetime

from fastrack.errors import AttestationError, FormatError

_SHOWN = 160  # characters of a value shown in a message


class CollateralFileError(FormatError):
    """A file of the reader's own collateral cannot be used, whatever the evidence is."""


def refused(evidence: str, field: str, *, wanted: object, found: object, advice: str) -> AttestationError:
    """Make the error for a wrong value in a field of evidence.

    `wanted` is the expected value, or a description of allowed values. Bytes are shown and kept in hexadecimal.
    `advice` is one sentence about what to do, with its full stop.
    """
    wanted, found = (value.hex() if isinstance(value, bytes) else value for value in (wanted, found))
    return AttestationError(
        f"verifying the {field} of the {evidence} failed: expected {_shown(wanted)}, got {_shown(found)}. {advice}",
        evidence=evidence,
        field=field,
        wanted=wanted,
        found=found,
    )


def malformed(structure: str, field: str, offset: int | None, *, wanted: object, found: object) -> FormatError:
    """Make the error for bytes that do not form a structure.

    `offset` counts bytes from the start of the structure; None for text.
    """
    place = "" if offset is None else f" at offset {offset}"
    return FormatError(
        f"reading the {structure} failed: expected {_shown(wanted)} as its {field}{place}, got {_shown(found)}. "
        "It is damaged, cut short, or of another kind."
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


def _shown(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
