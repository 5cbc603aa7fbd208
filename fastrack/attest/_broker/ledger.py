"""The database of a broker: challenges that are used once, grants, and the log of both."""

import json
import os
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from fastrack._documents.canonical import encode_time, parsing
from fastrack._service.journal import Journal, LogRecord, broken, read_journal
from fastrack.attest import Challenge
from fastrack.attest._broker.machines import MARKS, find_quarantined, names_of
from fastrack.attest._log_head import QUARANTINE, Head
from fastrack.errors import AttestationError, FastrackError

_KEPT = timedelta(hours=1)  # an expired challenge is remembered, so that it is not reported as unknown
_OPEN_LIMIT = 100_000  # challenges
_MARKED = f"event IN {MARKS}"


class ChallengeError(AttestationError):
    """An offer for a challenge that cannot be used: unknown, used before, expired, or of a log that was set back."""


class BusyError(AttestationError):
    """Too many open challenges."""


class QuarantineError(AttestationError):
    """An offer of a machine, or for a key or under a policy, in quarantine. `told` is what the machine may know."""

    told: str | None = None


class Ledger(Journal):
    """The database of a broker. After a grant the file has all changes, without ``-wal``.

    Version 2 has entries of what is in quarantine, which a program of version 1 would pass over.
    """

    application = 0x46545242  # "FTRB"
    schema = """CREATE TABLE challenges (id TEXT PRIMARY KEY, document BLOB NOT NULL, expires TEXT NOT NULL, used TEXT);
CREATE INDEX challenges_by_end ON challenges (expires);
CREATE TABLE grants (
    challenge TEXT PRIMARY KEY, recipient TEXT NOT NULL, keys TEXT NOT NULL, issued TEXT NOT NULL,
    entry INTEGER NOT NULL
);
CREATE TRIGGER grants_are_not_changed BEFORE UPDATE ON grants BEGIN SELECT RAISE(ABORT, 'grants are final'); END;
CREATE TRIGGER grants_are_not_removed BEFORE DELETE ON grants BEGIN SELECT RAISE(ABORT, 'grants are final'); END;
CREATE TRIGGER challenges_are_used_once BEFORE UPDATE ON challenges WHEN OLD.used IS NOT NULL
    BEGIN SELECT RAISE(ABORT, 'the challenge was used'); END;
"""
    upgrades = (f"CREATE INDEX marks ON log (number) WHERE {_MARKED}",)

    def add_challenge(self, challenge: Challenge, *, now: datetime) -> None:
        """Store a challenge, and delete long expired challenges. Raise `BusyError` if too many are open."""
        with self._transaction():
            self._database.execute("DELETE FROM challenges WHERE expires < ?", (encode_time(now - _KEPT),))
            count = self._database.execute("SELECT count(*) FROM challenges WHERE used IS NULL").fetchone()[0]
            if count >= _OPEN_LIMIT:  # delete expired challenges early
                ended = "DELETE FROM challenges WHERE used IS NULL AND expires <= ?"
                count -= self._database.execute(ended, (encode_time(now),)).rowcount
            if count >= _OPEN_LIMIT:
                message = (
                    f"making a challenge failed: expected fewer than {_OPEN_LIMIT} open ones, got {count}. Try later."
                )
                raise BusyError(message, evidence="challenge", field="number", wanted=_OPEN_LIMIT, found=count)
            self._database.execute(
                "INSERT INTO challenges (id, document, expires) VALUES (?, ?, ?)",
                (challenge.id, challenge.to_bytes(), encode_time(challenge.expires)),
            )

    def is_open(self, challenge_id: str, *, now: datetime) -> bool:
        """Return whether a challenge is known, unused and not expired."""
        query = "SELECT 1 FROM challenges WHERE id = ? AND used IS NULL AND expires > ?"
        with self._lock:
            return self._database.execute(query, (challenge_id, encode_time(now))).fetchone() is not None

    def use_challenge(self, challenge_id: str, *, now: datetime, details: Mapping[str, Any]) -> Challenge:
        """Use a challenge up, and return it. The use is on the disk before the offer is processed.

        Raise `ChallengeError` if it is unknown, used or expired. Attempts on known challenges are logged.
        """
        reason = None
        with self._transaction():
            row = self._database.execute(
                "SELECT document, used FROM challenges WHERE id = ?", (challenge_id,)
            ).fetchone()
            challenge = None if row is None else Challenge.from_bytes(row[0])
            if challenge is None:
                reason = "an unknown one"
            elif row[1] is not None:
                reason = f"one that was used at {row[1]}"
            elif now >= challenge.expires:
                reason = f"one that expired at {encode_time(challenge.expires)}"
            else:
                self._database.execute("UPDATE challenges SET used = ? WHERE id = ?", (encode_time(now), challenge_id))
            if challenge is not None:
                members = {"challenge": challenge_id, **details, **({"reason": reason} if reason else {})}
                self._append("refused" if reason else "offered", members, now)
        if challenge is None or reason is not None:
            advice = "Ask for a new challenge."
            raise _refuse_challenge(f"using challenge {challenge_id}", "an open one", reason, advice)
        return challenge

    def add_grant(
        self,
        challenge_id: str,
        recipient: str,
        keys: list[str],
        *,
        now: datetime,
        details: Mapping[str, Any],
        seen: Head | None = None,
    ) -> Head:
        """Store a grant of keys, and return the head that it makes. A challenge has one at most, after its use.

        `seen` is the head that the machine was told before. Raise `ChallengeError` if the log does not have it, and
        `QuarantineError` if the machine, a key or the policy is in quarantine: no later entry grants to it.
        """
        with self._transaction(is_promise=True):
            row = self._database.execute("SELECT used FROM challenges WHERE id = ?", (challenge_id,)).fetchone()
            known = self._database.execute("SELECT 1 FROM grants WHERE challenge = ?", (challenge_id,)).fetchone()
            if row is None or row[0] is None or known is not None:
                state = "a grant already" if known else "one that was not used"
                raise _refuse_challenge("granting keys", "a used challenge without a grant", state, "Start again.")
            members = {"challenge": challenge_id, "keys": keys, "recipient": recipient, **details}
            self._require_admitted(members, seen)
            head = Head(*self._append("granted", members, now))
            self._database.execute(
                "INSERT INTO grants (challenge, recipient, keys, issued, entry) VALUES (?, ?, ?, ?, ?)",
                (challenge_id, recipient, ",".join(keys), encode_time(now), head.number),
            )
        return head

    def add_renewal(
        self, challenge_id: str, entry: int, *, now: datetime, details: Mapping[str, Any], seen: Head | None = None
    ) -> Head:
        """Log that a lease was renewed, in short: its keys and its machine are those of an earlier entry, ``as``.

        `seen`, the errors and the result are those of `add_grant`.
        """
        with self._transaction(is_promise=True):
            members = self._database.execute("SELECT details FROM log WHERE number = ?", (entry,)).fetchone()[0]
            self._require_admitted(json.loads(members), seen)
            return Head(*self._append("renewed", {"challenge": challenge_id, "as": entry, **details}, now))

    def mark(self, event: str, name: str, *, now: datetime, details: Mapping[str, Any]) -> None:
        """Put a machine, a key or a policy into quarantine by its name, or lift that; `MARKS` has both events.

        Raise FastrackError if it is so already, or if brokers of version 1 may be using the database.
        """
        with self._transaction(is_promise=True):
            if self._version <= len(self.upgrades):  # a broker that may be running would pass over the entry
                raise FastrackError(
                    f"changing a quarantine failed: expected a database of version {1 + len(self.upgrades)}, got "
                    f"version {self._version}. End its broker, and start it again with this version of fastrack"
                )
            entry = self._quarantined().get(name)
            if (event == MARKS[0]) == (entry is not None):
                wanted = "a name in quarantine, got another" if entry is None else "one that is in none"
                found = "" if entry is None else f", got one in it since entry {entry.number}, of {entry.time}"
                advice = "List them: fastrack broker machines"
                raise FastrackError(f"changing a quarantine failed: expected {wanted}{found}. {advice}")
            self._append(event, {"name": name, **details}, now)

    def _quarantined(self) -> dict[str, LogRecord]:
        query = f"SELECT number, time, event, details, hash FROM log WHERE {_MARKED} ORDER BY number"  # noqa: S608
        rows = self._database.execute(query)
        return find_quarantined(LogRecord(*row) for row in ((*row[:3], json.loads(row[3]), row[4]) for row in rows))

    def _require_admitted(self, members: Mapping[str, Any], seen: Head | None) -> None:
        """Require the log that the machine was told of, and that nothing of a grant is in quarantine."""
        if seen is not None:
            row = self._database.execute("SELECT hash FROM log WHERE number = ?", (seen.number,)).fetchone()
            if row is None or row[0] != seen.hash:
                wanted, found = f"the entry {seen} that this machine was told of", "another" if row else "an older log"
                advice = "The broker's log was set back: its owner has to look"
                raise _refuse_challenge("granting keys", wanted, found, advice, "head")
        marked = self._quarantined()
        for name, kind in names_of(members).items():
            if (entry := marked.get(name)) is not None:
                error = QuarantineError(
                    f"granting keys failed: expected nothing in quarantine, got the {kind} {name}, by entry "
                    f"{entry.number}. Lift it: fastrack broker lift",
                    evidence="offer",
                    field=QUARANTINE,
                    wanted=f"nothing of entry {entry.number}",
                    found=name,
                )
                error.told = entry.details.get("tell")
                raise error


def read_log(path: str | os.PathLike[str], *, head: bytes | None = None) -> list[LogRecord]:
    """Read and verify the log of a broker's database as `read_journal`.

    Raise `AuthenticationError` also if grants and their entries differ, or if no entry has the hash `head`, noted
    earlier; and `FormatError` if the entries of grants are none that a broker writes.
    """
    query = "SELECT entry, challenge, recipient, keys, issued FROM grants"
    entries, grants = read_journal(path, Ledger, lambda database: set(database.execute(query)))
    with parsing(f"reading {path} failed: expected entries of a broker, got others", "restore it from a copy"):
        _verify_grants(entries, grants)
    if head is not None and head not in {entry.hash for entry in entries}:
        raise broken("an entry with the noted hash", f"none among {len(entries)}")
    return entries


def _refuse_challenge(action: str, wanted: str, found: object, advice: str, field: str = "challenge") -> ChallengeError:
    message = f"{action} failed: expected {wanted}, got {found}. {advice}"
    return ChallengeError(message, evidence="offer", field=field, wanted=wanted, found=found)


def _verify_grants(entries: list[LogRecord], grants: set[tuple[Any, ...]]) -> None:
    logged = set()
    for entry in entries:
        if entry.event == "granted":
            told, keys = entry.details, ",".join(entry.details.get("keys", ()))
            logged.add((entry.number, told.get("challenge"), told.get("recipient"), keys, entry.time))
    if logged != grants:
        raise broken(f"{len(logged)} grants, each as its entry has it", f"{len(logged ^ grants)} differences")
