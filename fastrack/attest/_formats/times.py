"""Require times that have a zone, and documents that are in force."""

from __future__ import annotations

from datetime import datetime

from fastrack.attest._errors import refused


def require_time_zone(now: datetime) -> None:
    """Raise `ValueError` if a time has no time zone."""
    if now.utcoffset() is None:
        raise ValueError(f"expected now= with a time zone, got {now!r}; datetime.now(timezone.utc) has one")


def require_in_force(
    evidence: str, field: str, start: datetime, end: datetime | None, now: datetime, advice: str
) -> datetime:
    """Require a time from the start to the end of a document, and return its end, which it must have."""
    if end is None or not start <= now <= end:
        wanted = f"{start.isoformat()} to {end.isoformat() if end else 'a next update, which it lacks'}"
        raise refused(evidence, field, wanted=wanted, found=now.isoformat(), advice=advice)
    return end
