"""A database in SQLite with a log of hashed entries, beside which a service has tables of its own.

The hash of an entry is SHA-256 over ``fastrack/audit@1``, a zero byte, the hash of the previous entry (32 zero bytes
for the first), and the entry as canonical JSON. Altered, removed and inserted entries are detected unless all later
entries are replaced too, so note the last hash elsewhere from time to time.
"""

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar, TypeVar

from fastrack._documents.canonical import encode, encode_time
from fastrack._documents.strict import refuse_constant
from fastrack._util.fork import per_process
from fastrack._util.locations import locate_local
from fastrack._util.regular_file import open_regular
from fastrack._util.rights import require_own
from fastrack.errors import AuthenticationError, FastrackError, FormatError

_decode = json.JSONDecoder(parse_constant=refuse_constant).decode  # `loads` would make one for each entry
_LABEL = b"fastrack/audit@1\0"
_FIRST = bytes(32)
_WAIT = 30.0  # seconds for a lock that another process holds
_PATIENCE = 2.0  # seconds for readers of an older state

T = TypeVar("T")

log = logging.getLogger("fastrack")

_LOG = """CREATE TABLE log (
    number INTEGER PRIMARY KEY, time TEXT NOT NULL, event TEXT NOT NULL, details TEXT NOT NULL, hash BLOB NOT NULL
);
CREATE TRIGGER log_is_not_changed BEFORE UPDATE ON log BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END;
CREATE TRIGGER log_is_not_cut BEFORE DELETE ON log BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END;
"""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """An entry of the log. `hash` covers it and all entries before."""

    number: int
    time: str
    event: str
    details: Mapping[str, Any]
    hash: bytes


class Journal:
    """A database with a log, made with mode 0600. Several threads and processes may use one file at a time.

    Every change is a transaction that is on the disk when the method returns; after a promise, such as a grant, the
    file has all of them, without ``-wal``. Raise `FormatError` for another file, and `KeyPermissionError` if another
    user owns or may write to the file or its folder.

    A subclass has the id of its application, and tables of its own beside the log. `upgrades` are the statements that
    make each version of the one before, the first of version 1; none changes a table that a reader requires.
    """

    application: ClassVar[int]
    schema: ClassVar[str]
    upgrades: ClassVar[tuple[str, ...]] = ()

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
            raise _not_a_journal(path, error) from None
        self._fold()  # what a process that was killed left

    def _prepare(self) -> None:
        self._database.execute("PRAGMA journal_mode = WAL").fetchone()
        self._database.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            application = self._database.execute("PRAGMA application_id").fetchone()[0]
            version = self._version
            if application == self.application and version:
                _require_tables(self._database, type(self))
                return
            if application or version or self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise sqlite3.DatabaseError("one of another program or version")
            for statement in (_LOG + self.schema).split(";\n"):  # a trigger holds statements too, but on one line
                self._database.execute(statement)
            self._database.execute(f"PRAGMA application_id = {self.application}")
            self._database.execute("PRAGMA user_version = 1")
            self._upgrade()

    @property
    def _version(self) -> int:
        return int(self._database.execute("PRAGMA user_version").fetchone()[0])

    def _upgrade(self) -> None:
        for version, statement in enumerate(self.upgrades[self._version - 1 :], self._version + 1):
            self._database.execute(statement)
            self._database.execute(f"PRAGMA user_version = {version}")

    def upgrade(self) -> None:
        """Make a database of an earlier version one of this, in one transaction: a failure leaves it as it was."""
        try:
            with self._transaction(is_promise=True):
                self._upgrade()
        except sqlite3.DatabaseError as error:
            wanted = f"its version {self._version} to become {1 + len(self.upgrades)}"
            message = f"upgrading {self.path} failed: expected {wanted}, got {error}. It is as it was; start again"
            raise FastrackError(message) from None

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

    def append(self, event: str, details: Mapping[str, Any], *, now: datetime) -> None:
        """Append an entry to the log."""
        with self._transaction():
            self._append(event, details, now)

    def _append(self, event: str, details: Mapping[str, Any], now: datetime) -> tuple[int, bytes]:
        """Return the number and the hash of the new entry."""
        row = self._database.execute("SELECT number, hash FROM log ORDER BY number DESC LIMIT 1").fetchone()
        number, before = (0, _FIRST) if row is None else row
        text = encode(details).decode()
        entry = (int(number) + 1, encode_time(now), event, text)
        digest = _hash_entry(before, *entry)
        self._database.execute(
            "INSERT INTO log (number, time, event, details, hash) VALUES (?, ?, ?, ?, ?)", (*entry, digest)
        )
        return entry[0], digest

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()


def read_journal(
    path: str | os.PathLike[str], kind: type[Journal], read: Callable[[sqlite3.Connection], T]
) -> tuple[list[LogRecord], T]:
    """Verify the log of a database without changes, and return it with what `read` returns of the other tables.

    `kind` is the class that wrote the database. Its service may be using it: all is of one snapshot.

    Raise `AuthenticationError` if the hash of an entry does not follow from its content and the previous hash, and
    `FormatError` for another file.
    """
    open_regular(path).close()  # so that a missing file raises an OSError
    try:
        with closing(_open_to_read(path)) as database:
            database.execute("BEGIN")  # so that all rows are of one snapshot
            if database.execute("PRAGMA application_id").fetchone()[0] != kind.application:
                raise sqlite3.DatabaseError("one of another program")  # noqa: TRY301 - reported below
            _require_tables(database, kind)
            rows = database.execute("SELECT number, time, event, details, hash FROM log ORDER BY number").fetchall()
            others = read(database)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise _not_a_journal(path, error) from None
    return _verify_entries(rows), others


def _open_to_read(path: str | os.PathLike[str]) -> sqlite3.Connection:
    """Open a database for reading, also where nothing can be written, as long as it has no ``-wal``."""
    file = Path(path).resolve()
    is_whole = not os.path.lexists(f"{file}-wal") and not os.access(file.parent, os.W_OK)
    options = "mode=ro&immutable=1" if is_whole else "mode=ro"
    return sqlite3.connect(f"{file.as_uri()}?{options}", uri=True, timeout=_WAIT)


def _require_tables(database: sqlite3.Connection, kind: type[Journal]) -> None:
    """Require a known version, and the tables of its schema: a view with such a name could compute rows without end."""
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version > 1 + len(kind.upgrades):
        raise sqlite3.DatabaseError(f"one of version {version}, of a later fastrack")
    query = "SELECT name, sql FROM sqlite_master"
    with closing(sqlite3.connect(":memory:")) as expected:
        expected.executescript(_LOG + kind.schema)
        wanted = [row for row in expected.execute(query) if row[1] and row[1].startswith("CREATE TABLE")]
        found = database.execute(f"{query} WHERE name IN ({','.join('?' * len(wanted))})", [row[0] for row in wanted])
        if sorted(found.fetchall()) != sorted(wanted):
            raise sqlite3.DatabaseError("one with other tables")


def _not_a_journal(path: str | os.PathLike[str], error: Exception) -> FormatError:
    advice = "Name another file, or read a copy with its -wal in a folder of yours."
    return FormatError(f"opening {path} failed: expected the database of a broker or a desk, got {error}. {advice}")


def _verify_entries(rows: list[tuple[Any, ...]]) -> list[LogRecord]:
    entries, before = [], _FIRST
    for expected, (number, time, event, details, saved) in enumerate(rows, 1):
        if number != expected:
            raise broken(f"entry {expected}", f"entry {number}")
        try:
            before = _hash_entry(before, number, time, event, details)
            members = dict(_decode(details))
        except (TypeError, ValueError, AttributeError, RecursionError):
            raise broken(f"text in entry {number}", "other values") from None
        if before != saved:
            raise broken(f"hash {before.hex()} at entry {number}", saved.hex() if isinstance(saved, bytes) else "none")
        entries.append(LogRecord(number, time, event, members, saved))
    return entries


def broken(wanted: str, found: str) -> AuthenticationError:
    return AuthenticationError(
        f"verifying the audit log failed: expected {wanted}, got {found}. It was altered; restore it from a copy."
    )


def _hash_entry(before: bytes, number: int, time: str, event: str, details: str) -> bytes:
    entry = {"details": details, "event": event, "number": number, "time": time}
    return sha256(_LABEL + before + encode(entry)).digest()
