"""The database of a desk in SQLite: the attempts at each visit with their receipts, and a log of hashed entries."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any

from fastrack._documents.canonical import encode
from fastrack._keys.signing import read_unverified_payload
from fastrack._service.journal import Journal, read_journal
from fastrack._util.public import public
from fastrack.errors import AuthenticationError, FormatError, GrantError, RollbackError

_MACHINE = ("cpu", "devices")  # of the claims, which stay while a machine stays as it is
_COLUMNS = "visit, attempt, previous, document, receipt"


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a visit: the delegation or consent that was given, and its receipt if one came.

    `previous` is the digest of the receipt before. The offer with the evidence, on which it was given, is stored too.
    """

    visit: int
    attempt: int
    previous: str
    document: bytes
    receipt: bytes | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The receipt of an attempt, and what the log says of it."""

    attempt: Attempt
    receipt: bytes
    details: Mapping[str, Any]


@public
class TourLedger(Journal):
    """The database of an `OwnerDesk` or a `HolderDesk`, made with mode 0600. It has no key in it.

    Every change is on the disk when the method that makes it returns. Several threads and processes may use one file.

    Parameters
    ----------
    path : path
        The file, which is made if it is missing.

    Raises
    ------
    FormatError
        If it is another file.
    KeyPermissionError
        If another user owns it, or may write to it or to its folder.

    Examples
    --------
    >>> from fastrack import tour
    >>> ledger = tour.TourLedger("clinic.db")
    >>> ledger.attempts(0)
    ()
    >>> ledger.close()
    """

    application = 0x46545454  # "FTTT"
    schema = """CREATE TABLE plan (
    one INTEGER PRIMARY KEY CHECK (one = 1), role TEXT NOT NULL, digest TEXT NOT NULL, completion BLOB
);
CREATE TRIGGER completions_are_final BEFORE UPDATE ON plan WHEN OLD.completion IS NOT NULL
    BEGIN SELECT RAISE(ABORT, 'completions are final'); END;
CREATE TABLE attempts (
    visit INTEGER NOT NULL, attempt INTEGER NOT NULL, previous TEXT NOT NULL, document BLOB NOT NULL,
    offer BLOB NOT NULL, receipt BLOB,
    PRIMARY KEY (visit, attempt)
);
CREATE TRIGGER attempts_stay BEFORE DELETE ON attempts BEGIN SELECT RAISE(ABORT, 'attempts are kept'); END;
CREATE TRIGGER receipts_are_final BEFORE UPDATE ON attempts WHEN OLD.receipt IS NOT NULL
    BEGIN SELECT RAISE(ABORT, 'receipts are final'); END;
"""

    def bind(self, role: str, plan: str) -> None:
        """Make this the database of one role in one tour. Raise `RollbackError` if it is that of another."""
        with self._transaction():
            self._database.execute("INSERT OR IGNORE INTO plan VALUES (1, ?, ?, NULL)", (role, plan))
            found = self._database.execute("SELECT role, digest FROM plan").fetchone()
        if found != (role, plan):
            raise RollbackError(
                f"{self.path}: expected the database of the {role} for plan {plan:.16}…, got that of "
                f"the {found[0]} for {found[1]:.16}…. Name another"
            )

    def attempts(self, visit: int) -> tuple[Attempt, ...]:
        """Return the attempts at a visit, the first one first."""
        query = f"SELECT {_COLUMNS} FROM attempts WHERE visit = ? ORDER BY attempt"  # noqa: S608 - a constant
        with self._lock:
            return tuple(Attempt(*row) for row in self._database.execute(query, (visit,)))

    def latest(self) -> Attempt | None:
        """Return the last attempt at the last visit that was begun."""
        with self._lock:
            return self._find_last()

    def _find_last(self) -> Attempt | None:
        query = f"SELECT {_COLUMNS} FROM attempts ORDER BY visit DESC, attempt DESC LIMIT 1"  # noqa: S608 - a constant
        row = self._database.execute(query).fetchone()
        return None if row is None else Attempt(*row)

    def first_details(self) -> Mapping[str, Any]:
        """Return what the log says of the first attempt that was begun; nothing if there is none."""
        query = "SELECT details FROM log WHERE event = 'begun' ORDER BY number LIMIT 1"
        with self._lock:
            row = self._database.execute(query).fetchone()
        return {} if row is None else dict(json.loads(row[0]))

    def begin(
        self,
        begun: Attempt,
        expected: Attempt | None,
        *,
        accepted: Accepted | None = None,
        offer: bytes,
        now: datetime,
        details: Mapping[str, Any],
    ) -> None:
        """Store one more attempt at a visit.

        A receipt that is `accepted` by it is stored in the same transaction. Raise `RollbackError` if the last attempt
        is no more as expected, since another thread or process has begun one or has stored its receipt; or if the tour
        was completed.
        """
        number, visit = begun.attempt, begun.visit
        with self._transaction(is_promise=True):
            self._require_last(expected)
            if self._find_completion() is not None:
                raise RollbackError(f"{self.path}: expected a tour that goes on, got one that its owner completed")
            if accepted is not None:
                self._end(accepted, now)
            self._database.execute(
                "INSERT INTO attempts (visit, attempt, previous, document, offer) VALUES (?, ?, ?, ?, ?)",
                (visit, number, begun.previous, begun.document, offer),
            )
            members = {**details, "attempt": number, "offer": sha256(offer).hexdigest(), "visit": visit}
            self._append("begun", members, now)

    def renew(self, attempt: Attempt, claims: Mapping[str, Any], lease: int, *, offer: bytes, now: datetime) -> None:
        """Log that the keys of a visit in progress were granted for another lease, with its length and claims if new.

        Raise `RollbackError` if it is no more in progress, and `GrantError` if its holder ended it.
        """
        with self._transaction(is_promise=True):
            self._require_last(attempt)
            if self._entries("stopped", attempt):
                raise GrantError(
                    f"renewing the keys of visit {attempt.visit}: expected a visit in progress, got one that its "
                    "holder ended. Ask the holder why"
                )
            members: dict[str, Any] = {
                "attempt": attempt.attempt,
                "offer": sha256(offer).hexdigest(),
                "visit": attempt.visit,
            }
            begun = self._entries("begun", attempt)[0]
            known = {**begun.get("claims", {}), "lease": begun.get("lease")}
            told = {**{name: claims[name] for name in _MACHINE}, "lease": lease}
            members |= {name: value for name, value in told.items() if encode(value) != encode(known.get(name))}
            self._append("renewed", members, now)

    def stop(self, why: str, *, now: datetime) -> tuple[Attempt, int]:
        """End the visit in progress, whose keys are on a lease: none is renewed any more. Return it and the lease.

        The lease is in seconds, within which its machine loses the keys. A desk on this database may go on meanwhile.

        Raises
        ------
        RollbackError
            If no visit is in progress.
        GrantError
            If its keys are not on a lease, or it is the database of an owner.
        """
        with self._transaction(is_promise=True):
            latest = self._find_last()
            if latest is None or latest.receipt is not None or self._entries("stopped", latest):
                raise RollbackError(f"ending a visit in {self.path}: expected one in progress, got none. Nothing to do")
            granted = [*self._entries("begun", latest), *self._entries("renewed", latest)]
            if granted[0].get("lease") is None:
                raise GrantError(
                    f"ending visit {latest.visit} in {self.path}: expected one whose keys are on a lease, got one that "
                    "has them to its end. Stop the desk, and serve it with a lease before the next attempt"
                )
            self._append("stopped", {"attempt": latest.attempt, "visit": latest.visit, "why": why}, now)
        # The longest: the answer with a shorter one may not have come.
        return latest, max(each.get("lease", 0) for each in granted)

    def _entries(self, event: str, attempt: Attempt) -> list[dict[str, Any]]:
        """Return what the log says of an event at an attempt."""
        rows = self._database.execute("SELECT details FROM log WHERE event = ? ORDER BY number", (event,))
        found = [dict(json.loads(row[0])) for row in rows]
        return [each for each in found if (each["visit"], each["attempt"]) == (attempt.visit, attempt.attempt)]

    def end(self, accepted: Accepted, *, now: datetime) -> None:
        """Store the receipt of an attempt. To store it once more changes nothing; another one is an IntegrityError."""
        with self._transaction(is_promise=True):
            self._end(accepted, now)

    def complete(
        self, expected: Attempt | None, document: bytes, *, accepted: Accepted | None = None, now: datetime
    ) -> bytes:
        """Store the owner's completion with the receipt that is `accepted` by it. Return the first one that was stored.

        Raise `RollbackError` if the last attempt is no more as expected.
        """
        with self._transaction(is_promise=True):
            found = self._find_completion()
            if found is not None:
                return found
            self._require_last(expected)
            if accepted is not None:
                self._end(accepted, now)
            self._database.execute("UPDATE plan SET completion = ?", (document,))
            self._append("completed", {}, now)
        return document

    def _find_completion(self) -> bytes | None:
        found: bytes | None = self._database.execute("SELECT completion FROM plan").fetchone()[0]
        return found

    def _require_last(self, expected: Attempt | None) -> None:
        """Require within a transaction that the last attempt is as it was read before."""
        if self._find_last() != expected:
            raise RollbackError(
                f"{self.path}: expected no other visit or receipt meanwhile, got one of another thread or process. "
                "Ask again with the newest chain"
            )

    def _end(self, accepted: Accepted, now: datetime) -> None:
        attempt, receipt = accepted.attempt, accepted.receipt
        key = (attempt.visit, attempt.attempt)
        query = "SELECT receipt FROM attempts WHERE visit = ? AND attempt = ?"
        if self._database.execute(query, key).fetchone() != (receipt,):
            self._database.execute("UPDATE attempts SET receipt = ? WHERE visit = ? AND attempt = ?", (receipt, *key))
            self._append("ended", {**accepted.details, "attempt": attempt.attempt, "visit": attempt.visit}, now)


@dataclass(frozen=True, slots=True)
class Kept:
    """The content of a desk's database: its role, the digest of its plan, and all attempts in their order.

    `details` has what the log says of each attempt, with the SHA-256 of its offer as the database has it, and
    ``stopped``: why its holder ended it, or None.
    """

    role: str
    plan: str
    attempts: tuple[Attempt, ...]
    details: tuple[Mapping[str, Any], ...]


def read_kept(path: str | os.PathLike[str]) -> Kept:
    """Read a desk's database without changes, and compare it with its log.

    Raise `AuthenticationError` if the log was altered, or has other attempts, offers or receipts, and `FormatError` for
    another file.
    """
    query = f"SELECT {_COLUMNS}, offer FROM attempts ORDER BY visit, attempt"  # noqa: S608 - a constant

    def read(database: sqlite3.Connection) -> tuple[Any, list[tuple[Attempt, str]]]:
        rows = [(Attempt(*values), sha256(offer).hexdigest()) for *values, offer in database.execute(query)]
        return database.execute("SELECT role, digest FROM plan").fetchone(), rows

    logged: dict[str, dict[tuple[int, int], dict[str, Any]]] = {"begun": {}, "ended": {}, "stopped": {}}
    try:
        entries, (bound, rows) = read_journal(path, TourLedger, read)
        for entry in entries:
            if entry.event in logged:
                logged[entry.event][entry.details["visit"], entry.details["attempt"]] = dict(entry.details)
        ended = {
            (each.visit, each.attempt): sha256(read_unverified_payload(each.receipt)).hexdigest()
            for each, _ in rows
            if each.receipt is not None
        }
    except (TypeError, KeyError) as error:  # SQLite has values of any type in any column
        raise FormatError(f"reading {path} failed: expected the database of a desk, got {error}") from None
    if bound is None:
        raise FormatError(f"reading {path} failed: expected the database of a desk, got one that no desk has opened")
    # Entries of earlier versions have no offer: there only a consent has its digest.
    offers = {(each.visit, each.attempt): {"offer": digest} for each, digest in rows}
    begun = {key: offers.get(key, {}) | members for key, members in logged["begun"].items()}
    details = {key: logged["begun"].get(key, {}) | members for key, members in offers.items()}
    if begun != details or ended != {key: members.get("receipt") for key, members in logged["ended"].items()}:
        raise AuthenticationError(
            f"reading {path} failed: expected the attempts, offers and receipts of its log, got others. It was "
            "altered, or a desk wrote to it; restore it from a copy, or stop the desk"
        )
    stopped = {key: {"stopped": logged["stopped"].get(key, {}).get("why")} for key in details}
    told = tuple(members | stopped[key] for key, members in details.items())
    return Kept(bound[0], bound[1], tuple(each for each, _ in rows), told)
