"""The database of a broker in SQLite: challenges that are used once, grants, and a log of hashed entries.

The hash of an entry is SHA-256 over ``fastrack/audit@1``, a zero byte, the hash of the previous entry (32 zero bytes
for the first), and the entry as canonical JSON. Altered, removed and inserted entries are detected unless all later
entries are replaced too, so note the last hash elsewhere from time to time.
"""

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar

from fastrack._documents.canonical import encode, encode_time
from fastrack._util.fork import per_process
from fastrack._util.locations import locate_local
from fastrack._util.regular_file import open_regular
from fastrack._util.rights import require_own
from fastrack.attest import Challenge
from fastrack.errors import AttestationError, AuthenticationError, FormatError

_APPLICATION = 0x46545242  # "FTRB", marks a broker's database
_VERSION = 1
_LABEL = b"fastrack/audit@1\0"
_FIRST = bytes(32)
_WAIT = 30.0  # seconds for a lock that another process holds
_PATIENCE = 2.0  # seconds for readers of an older state
_KEPT = timedelta(hours=1)  # an expired challenge is remembered, so that it is not reported as unknown
_OPEN_LIMIT = 100_000  # challenges

log = logging.getLogger("fastrack")

LOG_SCHEMA = """
CREATE TABLE log (
    number INTEGER PRIMARY KEY, time TEXT NOT NULL, event TEXT NOT NULL, details TEXT NOT NULL, hash BLOB NOT NULL
);
CREATE TRIGGER log_is_not_changed BEFORE UPDATE ON log BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END;
CREATE TRIGGER log_is_not_cut BEFORE DELETE ON log BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END;
"""
_SCHEMA = f"""{LOG_SCHEMA}
CREATE TABLE challenges (id TEXT PRIMARY KEY, document BLOB NOT NULL, expires TEXT NOT NULL, used TEXT);
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


class ChallengeError(AttestationError):
    """An offer for a challenge that cannot be used: unknown, used before, or expired."""


class BusyError(AttestationError):
    """Too many open challenges."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """An entry of the log. `hash` covers it and all entries before."""

    number: int
    time: str
    event: str
    details: Mapping[str, Any]
    hash: bytes


class Ledger:
    """The database of a broker, made with mode 0600. Several threads and processes may use one file at a time.

    Every change is a transaction that is on the disk when the method returns; after a grant the file has all of them,
    without ``-wal``. Raise `FormatError` for another file, and `KeyPermissionError` if another user owns or may write
    to the file or its folder.

    A subclass may have other tables beside its log, and an application id of its own.
    """

    application: ClassVar[int] = _APPLICATION
    schema: ClassVar[str] = _SCHEMA

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = locate_local(path)
        require_own(self.path.resolve().parent)  # SQLite replays any journal in the folder of a database
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        require_own(self.path)
        self._lock = per_process(self, "_lock", threading.Lock)
        self._database = sqlite3.connect(self.path, timeout=_WAIT, isolation_level=None, check_same_thread=False)
        try:
            self._prepare()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            self._database.close()
            raise _not_a_ledger(path, error) from None
        self._fold()  # what a process that was killed left

    def _prepare(self) -> None:
        self._database.execute("PRAGMA journal_mode = WAL").fetchone()
        self._database.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            application = self._database.execute("PRAGMA application_id").fetchone()[0]
            version = self._database.execute("PRAGMA user_version").fetchone()[0]
            if (application, version) == (self.application, _VERSION):
                _require_tables(self._database, self.schema)
                return
            if application or version or self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise sqlite3.DatabaseError("one of another program or version")
            for statement in self.schema.split(";\n"):  # a trigger holds statements too, but on one line
                self._database.execute(statement)
            self._database.execute(f"PRAGMA application_id = {self.application}")
            self._database.execute(f"PRAGMA user_version = {_VERSION}")

    @contextmanager
    def _transaction(self, *, is_promise: bool = False) -> Iterator[None]:
        """Run statements in one transaction, which takes the write lock at its start."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # some errors, such as a full disk, end it themselves
                    self._database.execute("ROLLBACK")
                raise
        if is_promise:  # which is not to be forgotten where the file is copied without its -wal
            self._fold()

    def _fold(self) -> None:
        """Bring what is in the ``-wal`` file into the database's own. Wait for readers of an older state, in bounds."""
        end = monotonic() + _PATIENCE
        while True:
            problem = "another process reads an older state, or is at the same work"
            try:
                with self._lock:
                    is_busy, written, folded = self._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                if not is_busy and written == folded:  # both are -1 where another process is at it
                    return
            except sqlite3.OperationalError as error:  # such as a full disk
                problem = str(error)
            if monotonic() > end:  # all of it is on the disk: no reader may stop a desk
                log.warning("%s: its last changes are only in %s-wal: %s", self.path, self.path.name, problem)
                return
            sleep(0.01)

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
        self, challenge_id: str, recipient: str, keys: list[str], *, now: datetime, details: Mapping[str, Any]
    ) -> None:
        """Store a grant of keys. A challenge has at most one grant, and only after its use."""
        with self._transaction(is_promise=True):
            row = self._database.execute("SELECT used FROM challenges WHERE id = ?", (challenge_id,)).fetchone()
            known = self._database.execute("SELECT 1 FROM grants WHERE challenge = ?", (challenge_id,)).fetchone()
            if row is None or row[0] is None or known is not None:
                state = "a grant already" if known else "one that was not used"
                raise _refuse_challenge("granting keys", "a used challenge without a grant", state, "Start again.")
            members = {"challenge": challenge_id, "keys": keys, "recipient": recipient, **details}
            number = self._append("granted", members, now)
            self._database.execute(
                "INSERT INTO grants (challenge, recipient, keys, issued, entry) VALUES (?, ?, ?, ?, ?)",
                (challenge_id, recipient, ",".join(keys), encode_time(now), number),
            )

    def append(self, event: str, details: Mapping[str, Any], *, now: datetime) -> None:
        """Append an entry to the log."""
        with self._transaction():
            self._append(event, details, now)

    def _append(self, event: str, details: Mapping[str, Any], now: datetime) -> int:
        row = self._database.execute("SELECT number, hash FROM log ORDER BY number DESC LIMIT 1").fetchone()
        number, before = (0, _FIRST) if row is None else row
        text = encode(details).decode()
        entry = (number + 1, encode_time(now), event, text)
        self._database.execute(
            "INSERT INTO log (number, time, event, details, hash) VALUES (?, ?, ?, ?, ?)",
            (*entry, _hash_entry(before, *entry)),
        )
        return int(number) + 1

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()


def read_log(
    path: str | os.PathLike[str], *, head: bytes | None = None, kind: type[Ledger] = Ledger
) -> list[LogRecord]:
    """Read and verify the log of a broker's database, without changes. A broker may be using it.

    `kind` is the class that wrote the database.

    Raise `AuthenticationError` if the hash of an entry does not follow from its content and the previous hash, if
    grants and their entries differ, or if no entry has the hash `head`, noted earlier. Raise `FormatError` for
    another file.
    """
    open_regular(path).close()  # so that a missing file raises an OSError
    try:
        with closing(open_to_read(path)) as database:
            database.execute("BEGIN")  # so that all rows are of one snapshot
            if database.execute("PRAGMA application_id").fetchone()[0] != kind.application:
                raise sqlite3.DatabaseError("one of another program")  # noqa: TRY301 - reported below
            _require_tables(database, kind.schema)
            rows = database.execute("SELECT number, time, event, details, hash FROM log ORDER BY number").fetchall()
            grants = None
            if kind is Ledger:
                grants = database.execute("SELECT entry, challenge, recipient, keys, issued FROM grants").fetchall()
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise _not_a_ledger(path, error) from None
    entries = _verify_entries(rows)
    if grants is not None:
        _verify_grants(entries, grants)
    if head is not None and head not in {entry.hash for entry in entries}:
        raise _broken("an entry with the noted hash", f"none among {len(entries)}")
    return entries


def open_to_read(path: str | os.PathLike[str]) -> sqlite3.Connection:
    """Open a database for reading, also where nothing can be written, as long as it has no ``-wal``."""
    file = Path(path).resolve()
    is_whole = not os.path.lexists(f"{file}-wal") and not os.access(file.parent, os.W_OK)
    options = "mode=ro&immutable=1" if is_whole else "mode=ro"
    return sqlite3.connect(f"{file.as_uri()}?{options}", uri=True, timeout=_WAIT)


def _refuse_challenge(action: str, wanted: str, found: object, advice: str) -> ChallengeError:
    message = f"{action} failed: expected {wanted}, got {found}. {advice}"
    return ChallengeError(message, evidence="offer", field="challenge", wanted=wanted, found=found)


def _require_tables(database: sqlite3.Connection, schema: str) -> None:
    """Require the tables of the schema: a view with such a name could compute rows without end."""
    query = "SELECT name, sql FROM sqlite_master"
    with closing(sqlite3.connect(":memory:")) as expected:
        expected.executescript(schema)
        wanted = [row for row in expected.execute(query) if row[1] and row[1].startswith("CREATE TABLE")]
        found = database.execute(f"{query} WHERE name IN ({','.join('?' * len(wanted))})", [row[0] for row in wanted])
        if sorted(found.fetchall()) != sorted(wanted):
            raise sqlite3.DatabaseError("one with other tables")


def _not_a_ledger(path: str | os.PathLike[str], error: Exception) -> FormatError:
    advice = "Name another file, or read a copy with its -wal in a folder of yours."
    return FormatError(f"opening {path} failed: expected the database of a broker or a desk, got {error}. {advice}")


def _verify_entries(rows: list[tuple[Any, ...]]) -> list[LogRecord]:
    entries, before = [], _FIRST
    for expected, (number, time, event, details, saved) in enumerate(rows, 1):
        if number != expected:
            raise _broken(f"entry {expected}", f"entry {number}")
        try:
            before = _hash_entry(before, number, time, event, details)
            members = dict(json.loads(details))
        except (TypeError, ValueError, AttributeError):
            raise _broken(f"text in entry {number}", "other values") from None
        if before != saved:
            raise _broken(f"hash {before.hex()} at entry {number}", saved.hex() if isinstance(saved, bytes) else "none")
        entries.append(LogRecord(number, time, event, members, saved))
    return entries


def _verify_grants(entries: list[LogRecord], grants: list[tuple[Any, ...]]) -> None:
    logged = {
        (
            entry.number,
            entry.details.get("challenge"),
            entry.details.get("recipient"),
            ",".join(entry.details.get("keys", ())),
            entry.time,
        )
        for entry in entries
        if entry.event == "granted"
    }
    if logged != set(grants):
        raise _broken(f"{len(logged)} grants, each as its entry has it", f"{len(logged ^ set(grants))} differences")


def _broken(wanted: str, found: str) -> AuthenticationError:
    return AuthenticationError(
        f"verifying the audit log failed: expected {wanted}, got {found}. It was altered; restore it from a copy."
    )


def _hash_entry(before: bytes, number: int, time: str, event: str, details: str) -> bytes:
    entry = {"details": details, "event": event, "number": number, "time": time}
    return sha256(_LABEL + before + encode(entry)).digest()
