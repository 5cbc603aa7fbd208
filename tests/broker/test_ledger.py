"""The broker's memory: challenges that are used once, and a log that cannot be altered without a trace."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from helpers.commands import invoke

import fastrack
from fastrack import KeyPermissionError
from fastrack._service import journal
from fastrack._service.journal import _hash_entry
from fastrack._service.limits import RateLimit
from fastrack.attest import Challenge
from fastrack.attest._broker import ledger as module

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "broker.db"


@pytest.fixture
def ledger(path):
    with closing(module.Ledger(path)) as found:
        yield found


def add(ledger, **changes):
    challenge = replace(Challenge.generate(now=NOW), **changes)
    ledger.add_challenge(challenge, now=NOW)
    return challenge


def use(ledger, challenge, *, now=NOW):
    return ledger.use_challenge(challenge.id, now=now, details={"address": "127.0.0.1"})


def grant(ledger, challenge):
    ledger.add_grant(challenge.id, "ab" * 16, ["cd" * 16], now=NOW, details={})


def grants_in_a_copy(path):
    """Return the grants in a copy of the one file of a database in use."""
    copy = path.with_name("copy.db")
    shutil.copyfile(path, copy)
    return [entry for entry in module.read_log(copy) if entry.event == "granted"]


def test_a_grant_is_in_the_file_itself(ledger, path):
    for number in (1, 2):
        challenge = add(ledger)
        use(ledger, challenge)
        grant(ledger, challenge)
        assert len(grants_in_a_copy(path)) == number


def test_a_reader_stops_no_broker_and_is_waited_for_in_bounds(ledger, path, limited, caplog):
    limited(journal_patience=0.05)
    challenge = add(ledger)
    use(ledger, challenge)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM grants").fetchone() == (0,)
        grant(ledger, challenge)
        assert "-wal" in caplog.text
        assert grants_in_a_copy(path) == []
        assert [entry.event for entry in module.read_log(path)] == ["offered", "granted"]
    challenge = add(ledger)
    use(ledger, challenge)
    grant(ledger, challenge)
    assert len(grants_in_a_copy(path)) == 2


CHECKPOINT = """import fcntl, sys
with open(sys.argv[1], "r+b") as shared:
    fcntl.lockf(shared, fcntl.LOCK_EX, 1, 121)  # WAL_CKPT_LOCK of SQLite's file format
    print("held", flush=True)
    sys.stdin.read(1)"""


def test_a_grant_waits_for_another_process_that_fills_the_file(ledger, path, monkeypatch, limited):
    limited(journal_patience=60)
    challenge = add(ledger)
    use(ledger, challenge)
    command = [sys.executable, "-c", CHECKPOINT, f"{path}-shm"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        monkeypatch.setattr(journal, "sleep", lambda _: other.poll() is None and other.communicate())
        grant(ledger, challenge)
    assert len(grants_in_a_copy(path)) == 1


def test_what_a_killed_broker_left_is_in_the_file_when_it_is_opened(path, monkeypatch):
    monkeypatch.setattr(module.Ledger, "_fold", lambda _: None)
    killed = module.Ledger(path)
    challenge = add(killed)
    use(killed, challenge)
    grant(killed, challenge)
    monkeypatch.undo()
    with closing(module.Ledger(path)):
        assert len(grants_in_a_copy(path)) == 1
    killed.close()


def test_a_challenge_is_used_once(ledger, path):
    challenge = add(ledger)
    with pytest.raises(module.ChallengeError, match="not used"):
        grant(ledger, challenge)
    assert use(ledger, challenge) == challenge
    with pytest.raises(module.ChallengeError, match="used at 2026-06-01T12:00:00Z"):
        use(ledger, challenge)
    grant(ledger, challenge)
    with pytest.raises(module.ChallengeError, match="a grant already"):
        grant(ledger, challenge)
    assert [entry.event for entry in module.read_log(path)] == ["offered", "refused", "granted"]


def test_unknown_and_expired_challenges_are_refused(ledger, path):
    with pytest.raises(module.ChallengeError, match="unknown"):
        use(ledger, Challenge.generate(now=NOW))
    challenge = add(ledger)
    with pytest.raises(module.ChallengeError, match="expired at") as caught:
        use(ledger, challenge, now=challenge.expires)
    assert (caught.value.evidence, caught.value.field) == ("offer", "challenge")
    assert [entry.event for entry in module.read_log(path)] == ["refused"]
    ledger.add_challenge(Challenge.generate(now=NOW), now=NOW + timedelta(hours=2))  # which forgets old ones
    with pytest.raises(module.ChallengeError, match="unknown"):
        use(ledger, challenge)


def test_open_challenges_have_a_bound(ledger, limited):
    limited(open_challenges=3)
    for _ in range(3):
        add(ledger)
    with pytest.raises(module.BusyError, match="fewer than 3"):
        add(ledger)


def test_challenges_that_were_used_or_have_ended_are_not_open(ledger, limited):
    limited(open_challenges=3)
    used, *_ = [add(ledger) for _ in range(3)]
    use(ledger, used)
    add(ledger)
    with pytest.raises(module.BusyError, match="fewer than 3"):
        add(ledger)
    end = NOW + timedelta(minutes=5)
    for _ in range(3):
        ledger.add_challenge(Challenge.generate(now=end), now=end)
    with pytest.raises(module.ChallengeError, match="used at"):  # which is remembered
        use(ledger, used)


def test_threads_and_connections_use_a_challenge_once(ledger, path):
    challenges = [add(ledger) for _ in range(20)]
    ledgers = [ledger, module.Ledger(path), module.Ledger(path)]

    def attempt(number):
        try:
            return use(ledgers[number % 3], challenges[number % 20]).id
        except module.ChallengeError:
            return None

    with ThreadPoolExecutor(8) as pool:
        found = Counter(pool.map(attempt, range(120)))
    assert {found[challenge.id] for challenge in challenges} == {1}
    for one in ledgers[1:]:
        one.close()
    assert len(module.read_log(path)) == 120


def test_a_full_disk_uses_no_challenge(ledger, path):
    challenge = add(ledger)
    pages = ledger._database.execute("PRAGMA page_count").fetchone()[0]
    ledger._database.execute(f"PRAGMA max_page_count = {pages}")
    with suppress(sqlite3.OperationalError):
        for _ in range(10_000):
            ledger.append("refused", {"reason": "x" * 400}, now=NOW)
    with pytest.raises(sqlite3.OperationalError, match="full"):
        ledger.use_challenge(challenge.id, now=NOW, details={"address": "x" * 5000})
    ledger._database.execute(f"PRAGMA max_page_count = {pages * 1000}")
    assert use(ledger, challenge) == challenge
    assert module.read_log(path)[-1].event == "offered"


KILLED = """
import sys
from fastrack.attest._broker.ledger import Ledger
from datetime import UTC, datetime
ledger = Ledger(sys.argv[1])
for id in sys.argv[2:]:
    ledger.use_challenge(id, now=datetime(2026, 6, 1, 12, tzinfo=UTC), details={})
    print(id, flush=True)
"""


def test_uses_survive_kill_9(ledger, path):
    challenges = [add(ledger) for _ in range(300)]
    command = [sys.executable, "-c", KILLED, str(path), *(challenge.id for challenge in challenges)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        told = [process.stdout.readline().strip() for _ in range(40)]
        process.send_signal(signal.SIGKILL)
        told += process.stdout.read().split()
    used = 0
    for challenge in challenges:
        try:
            use(ledger, challenge)
        except module.ChallengeError:
            used += 1
        else:
            assert challenge.id not in told
    assert len(told) <= used <= len(told) + 1
    assert len(module.read_log(path)) == 300 + used


# The log.


@pytest.fixture
def filled(ledger, path):
    for _ in range(3):
        challenge = add(ledger)
        use(ledger, challenge)
        grant(ledger, challenge)
    ledger.append("refused", {"reason": "wrong \n\u2028 quote"}, now=NOW)
    ledger.close()
    return path


def alter(path, *statements):
    """Change a database as someone with the file may: without its triggers."""
    with closing(sqlite3.connect(path)) as database:
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            database.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            database.execute(statement)
        database.commit()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE log SET details = replace(details, 'cd', 'ce') WHERE number = 2",
        "UPDATE log SET event = 'offered' WHERE number = 7",
        "UPDATE log SET time = '2026-06-01T12:00:01Z' WHERE number = 1",
        "UPDATE log SET details = 'no json' WHERE number = 7",
        "UPDATE log SET details = NULL WHERE number = 7",
        "UPDATE log SET hash = zeroblob(32) WHERE number = 7",
        "UPDATE log SET hash = 'text' WHERE number = 7",
        "UPDATE log SET number = 9 WHERE number = 7",
        "DELETE FROM log WHERE number = 1",
        "DELETE FROM log WHERE number = 4",
        "DELETE FROM log WHERE number >= 6",
        "INSERT INTO log SELECT 8, time, event, details, hash FROM log WHERE number = 7",
        "DELETE FROM grants WHERE entry = 2",
        "UPDATE grants SET keys = 'other' WHERE entry = 2",
        "UPDATE grants SET entry = 4 WHERE entry = 2",
        "INSERT INTO grants VALUES ('x', 'y', 'z', '2026-06-01T12:00:00Z', 3)",
    ],
)
def test_an_altered_log_is_found(filled, statement):
    assert len(module.read_log(filled)) == 7
    with closing(sqlite3.connect(filled)) as database:  # the triggers refuse the change, or the log does not fit
        try:
            database.execute(statement)
            database.rollback()
        except sqlite3.Error as error:
            assert any(word in str(error) for word in ("append-only", "final", "NOT NULL"))  # noqa: PT017
    if "NULL" in statement:
        return
    alter(filled, statement)
    with pytest.raises(fastrack.AuthenticationError, match="verifying the audit log failed"):
        module.read_log(filled)


def test_a_log_that_was_cut_is_found_by_a_noted_hash(filled):
    head = module.read_log(filled)[-1].hash
    assert module.read_log(filled, head=head)
    alter(filled, "DELETE FROM log WHERE number = 7")
    assert len(module.read_log(filled)) == 6
    with pytest.raises(fastrack.AuthenticationError, match="noted hash"):
        module.read_log(filled, head=head)


TIME = "2026-06-01T12:00:00Z"
GRANTED = {"challenge": "c", "keys": ["aabbccdd"], "recipient": "r"}


@pytest.mark.parametrize(
    ("event", "details"),
    [
        ("quarantined", {}),
        ("quarantined", {"name": ["a"], "why": 3}),
        ("renewed", {"as": 7}),
        ("renewed", {"as": [1]}),
        ("renewed", {}),
        ("granted", {**GRANTED, "challenge": ["c"]}),
        ("granted", {**GRANTED, "keys": 5}),
        ("granted", {**GRANTED, "keys": [5]}),
        ("granted", {**GRANTED, "cpu": "x"}),
        ("granted", {**GRANTED, "cpu": {"ppid": 5}}),
        ("granted", {**GRANTED, "devices": 5}),
        ("granted", {**GRANTED, "devices": [None]}),
        ("granted", {**GRANTED, "devices": [{"chip_id": [1]}]}),
        ("granted", {**GRANTED, "lease": "x"}),
        ("granted", {**GRANTED, "lease": 1e300}),
        ("started", '{"a":NaN}'),
        ("started", f'{{"a":{"[" * 100_000}{"]" * 100_000}}}'),
    ],
)
def test_a_log_that_no_broker_wrote_is_told_in_a_line(ledger, path, event, details):
    ledger.close()
    text = details if isinstance(details, str) else json.dumps(details)
    with closing(sqlite3.connect(path)) as database:
        entry = (1, TIME if event != "started" else "\x1b[2J", event, text)
        database.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?)", (*entry, _hash_entry(bytes(32), *entry)))
        if event == "granted" and type(details["challenge"]) is str and details["keys"] == GRANTED["keys"]:
            database.execute("INSERT INTO grants VALUES ('c', 'r', 'aabbccdd', ?, 1)", (TIME,))
        database.commit()
    name = ["aabbccdd", "--why", "x", "--database", str(path)]
    commands = [[name, "--database", str(path)] for name in ("log", "machines")]
    commands += [["log", "--json", "--database", str(path)], ["compare", str(path), str(path)]]
    for command in (*commands, ["quarantine", "--unseen", *name], ["lift", *name]):
        told = invoke(["broker", *command])  # an exception comes through
        assert told.exit_code in {0, 1, 4, 6}
        assert told.exit_code == 0 or "--json" in command or len(told.output.splitlines()) == 1
        assert "\x1b" not in told.output


def test_no_command_makes_a_ledger_of_another_file(path):
    path.touch()
    for command in ("quarantine", "lift"):
        told = invoke(["broker", command, "aabbccdd", "--why", "x", "--database", str(path)])
        assert (told.exit_code, path.stat().st_size) == (6, 0)


def test_a_view_that_never_ends_is_refused_as_a_log(filled):
    rows = "SELECT n AS number, 't' AS time, 'e' AS event, '{}' AS details, x'00' AS hash FROM c"
    view = f"WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) {rows}"
    alter(filled, "DROP TABLE log", f"CREATE VIEW log AS {view}")
    for read in (module.read_log, module.Ledger):
        with pytest.raises(fastrack.FormatError, match="other tables"):
            read(filled)


@contextmanager
def only_read(folder):
    """Let nothing be written into a folder for a while, by root neither."""
    if os.geteuid():
        folder.chmod(0o500)
        yield
        folder.chmod(0o700)
        return
    if subprocess.run(["mount", "--bind", folder, folder], stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("root may mount nothing here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_copied_log_is_read_where_nothing_can_be_written(filled, tmp_path):
    whole, apart = tmp_path / "whole", tmp_path / "apart"
    for folder in (whole, apart):
        folder.mkdir()
        shutil.copy(filled, folder / "copy.db")
    with closing(module.Ledger(filled)) as ledger:
        ledger.append("later", {}, now=NOW)
        shutil.copy(f"{filled}-wal", apart / "copy.db-wal")
    with only_read(whole):
        assert len(module.read_log(whole / "copy.db")) == len(module.read_log(filled)) - 1
    with only_read(apart), pytest.raises(fastrack.FormatError, match="read a copy with its -wal in a folder of yours"):
        module.read_log(apart / "copy.db")  # without the -wal it would be an older one


def test_a_database_with_tables_that_are_no_text_is_refused(filled):
    filled.write_bytes(filled.read_bytes().replace(b"CREATE TABLE log", b"CREATE TABLE\xd2log"))  # SQLite says it so
    for read in (module.read_log, module.Ledger):
        with pytest.raises(fastrack.FormatError, match="expected the database of a broker"):
            read(filled)


def test_other_files_are_refused(tmp_path):
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE x (y)")
        database.commit()
    text = tmp_path / "text.db"
    text.write_bytes(b"no database at all" * 100)
    for path in (other, text):
        with pytest.raises(fastrack.FormatError, match="expected the database of a broker"):
            module.Ledger(path)
        with pytest.raises(fastrack.FormatError, match="expected the database of a broker"):
            module.read_log(path)
    with pytest.raises(FileNotFoundError):
        module.read_log(tmp_path / "none.db")


# The limit of requests.


def test_a_database_is_refused_where_others_may_put_a_journal_beside_it(tmp_path):
    tmp_path.chmod(0o1777)
    with pytest.raises(KeyPermissionError):
        module.Ledger(tmp_path / "broker.db")
    assert list(tmp_path.iterdir()) == []


def test_addresses_have_a_rate_each():
    time = [0.0]
    limit = RateLimit(60, 2, clock=lambda: time[0])
    assert [limit.admit("192.0.2.1") > 0 for _ in range(3)] == [False, False, True]
    assert limit.admit("::ffff:192.0.2.1") > 0
    assert limit.admit("192.0.2.2") == 0
    time[0] = 0.25
    assert limit.admit("192.0.2.1") == pytest.approx(0.75)
    time[0] = 1.0
    assert [limit.admit("192.0.2.1") > 0 for _ in range(2)] == [False, True]
    time[0] = 1e6
    assert [limit.admit("192.0.2.1") > 0 for _ in range(3)] == [False, False, True]


def test_a_network_of_ipv6_is_one_address():
    limit = RateLimit(60, 1, clock=lambda: 0.0)
    assert limit.admit("2001:db8::1") == 0
    assert limit.admit("2001:db8::2") > 0
    assert limit.admit("2001:db8:0:1::1") == 0
    assert limit.admit("unknown") == 0


def test_addresses_are_forgotten(limited):

    limited(addresses=10)
    limit = RateLimit(60, 1, clock=lambda: 0.0)
    for number in range(100):
        limit.admit(f"192.0.2.{number}")
    assert len(limit._buckets) == 10
