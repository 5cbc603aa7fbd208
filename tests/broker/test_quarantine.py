"""Machines, keys and policies in quarantine, which machines hold keys, and ledgers of other versions or set back."""

import shutil
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace

import pytest
from broker.test_lease import is_open, sealed, take, use_up
from helpers.cases import each
from helpers.commands import invoke
from helpers.foundry import tdx
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots, small

import fastrack
from fastrack import attest
from fastrack._service.journal import Journal
from fastrack.attest._broker import ledger as module
from fastrack.attest._broker.ledger import ChallengeError, Ledger, QuarantineError, read_log
from fastrack.attest._broker.machines import find_holders, names_of
from fastrack.attest._broker.service import Broker, Settings
from fastrack.attest._client import ask_broker
from fastrack.attest._log_head import HEADER, Head
from fastrack.grants import Signer

PPID = "000102030405060708090a0b0c0d0e0f"
POLICY_ID = "ab" * 32
MINUTE = timedelta(minutes=1)
TOLD = {"by": "ada", "why": "stolen", "held": 1, "kind": "machine", "until": None}


class Owner:
    """A broker whose clock a test sets."""

    def __init__(self, path, *, lease=10 * MINUTE, key=None, policy_id=POLICY_ID):
        self.path, self.now = path, NOW
        self.key = key or fastrack.Key.generate()
        rules = attest.Policy.from_toml(policy(1))
        settings = Settings(rules, roots=roots(), clock=lambda: self.now, lease=lease, policy_id=policy_id)
        self.ledger = Ledger(path)
        self.broker = Broker(settings, fastrack.KeyRing(self.key), Signer.generate(), self.ledger)

    def ask(self, of=None, seen=None, address="192.0.2.1"):
        pending = attest.make_offer(self.broker.make_challenge(), of or small())
        return self.broker.answer(pending.to_bytes(), address, seen)[2]


@pytest.fixture
def owner(tmp_path):
    found = Owner(tmp_path / "broker.db")
    yield found
    found.ledger.close()


def kinds_of(path):
    return {name: kind for entry in read_log(path) for name, kind in names_of(entry.details).items()}


def test_every_name_of_a_machine_refuses_it_until_it_is_lifted(owner):
    owner.ask()
    names = kinds_of(owner.path)
    assert sorted(names.values()) == ["key", "machine", "machine", "machine", "policy"]
    assert {PPID: "machine", owner.key.id: "key", POLICY_ID: "policy"}.items() <= names.items()
    for name in names:
        owner.ledger.mark("quarantined", name, now=NOW, details=TOLD)
        with pytest.raises(QuarantineError) as caught:
            owner.ask()
        assert (caught.value.field, caught.value.found) == ("quarantine", name)
        entry = read_log(owner.path)[-1]
        assert (entry.event, entry.details["found"]) == ("refused", name)
        owner.ledger.mark("lifted", name, now=NOW, details={"by": "ada", "why": "found again"})
        owner.ask()


def test_a_quarantine_outlives_its_broker_and_refuses_first_grants(owner):
    owner.ledger.mark("quarantined", PPID, now=NOW, details=TOLD)
    other = Owner(owner.path, key=owner.key)
    with closing(other.ledger), pytest.raises(QuarantineError):
        other.ask()
    assert "granted" not in {entry.event for entry in read_log(owner.path)}


def test_another_machine_is_not_refused(owner):
    owner.ledger.mark("quarantined", PPID, now=NOW, details=TOLD)
    owner.ask(Machine("snp", 1, is_small=True))
    chip = next(name for name in kinds_of(owner.path) if len(name) == 18)  # of its GPU, which moves to another CPU
    owner.ledger.mark("lifted", PPID, now=NOW, details=TOLD)
    owner.ledger.mark("quarantined", chip, now=NOW, details=TOLD)
    for of in (small(), Machine("snp", 1, is_small=True)):
        with pytest.raises(QuarantineError):
            owner.ask(of)


def test_a_quarantine_is_not_begun_or_ended_twice(owner):
    with pytest.raises(fastrack.FastrackError, match="expected a name in quarantine, got another"):
        owner.ledger.mark("lifted", PPID, now=NOW, details={})
    owner.ledger.mark("quarantined", PPID, now=NOW, details=TOLD)
    with pytest.raises(fastrack.FastrackError, match=r"in it since entry 2, of 2026-06-01T12:00:00Z"):
        owner.ledger.mark("quarantined", PPID, now=NOW, details=TOLD)
    assert [entry.event for entry in read_log(owner.path)] == ["started", "quarantined"]


def test_holders_are_listed_until_their_leases_end(owner):
    owner.ask()
    owner.now += 4 * MINUTE
    owner.ask(address="192.0.2.2")
    owner.ask(Machine("snp", 1, is_small=True))
    entries = read_log(owner.path)
    first, second = find_holders(entries, owner.now)
    assert [holder.address for holder in (first, second)] == ["192.0.2.2", "192.0.2.1"]  # where it asked last
    assert (first.cpu, first.until, first.entry) == (PPID, "2026-06-01T12:14:00Z", 3)
    assert (first.renewed, first.policy, first.keys) == ("2026-06-01T12:04:00Z", POLICY_ID, [owner.key.id])
    assert (len(second.cpu), second.gpus, second.quarantined) == (128, first.gpus, [])
    assert find_holders(entries, NOW + 14 * MINUTE) == []
    for_ever = Owner(owner.path, lease=None, key=owner.key)
    for_ever.ask()
    owner.ask()
    for_ever.ledger.close()
    held = find_holders(read_log(owner.path), NOW + 1000 * MINUTE)
    assert [holder.until for holder in held] == [None]  # a lease since does not end what was given for ever


@each(
    "details",
    [{}, {"cpu": None, "devices": None}, {"cpu": {"chip_ids": "masked"}, "devices": [{"ueid": None}]}, {"keys": []}],
)
def test_what_names_no_machine_gives_no_name(details):
    assert names_of(details) == {}


# The ledger's versions.


@pytest.fixture
def old(tmp_path, monkeypatch):
    """Return the path of a ledger of version 1, with a grant."""
    path = tmp_path / "old.db"
    monkeypatch.setattr(Ledger, "upgrades", ())
    first = Owner(path)
    first.ask()
    first.ledger.close()
    monkeypatch.undo()
    assert version_of(path) == 1
    return path, first.key


def version_of(path):
    with closing(sqlite3.connect(path)) as database:
        return database.execute("PRAGMA user_version").fetchone()[0]


def test_a_broker_upgrades_a_ledger_and_knows_what_it_granted(old):
    path, key = old
    before = read_log(path)
    with (
        closing(Ledger(path)) as opened,
        pytest.raises(fastrack.FastrackError, match=r"got version 1\. End its broker"),
    ):
        opened.mark("quarantined", PPID, now=NOW, details=TOLD)
    assert (version_of(path), read_log(path)) == (1, before)
    later = Owner(path, key=key)
    later.ask()
    assert version_of(path) == 2
    later.ledger.mark("quarantined", PPID, now=NOW, details=TOLD)
    with pytest.raises(QuarantineError):
        later.ask()
    later.ledger.close()
    assert read_log(path)[: len(before)] == before
    assert len(find_holders(read_log(path), NOW)) == 1
    with closing(sqlite3.connect(path)) as database:
        plan = database.execute(f"EXPLAIN QUERY PLAN SELECT details FROM log WHERE {module._MARKED} ORDER BY number")
        assert "USING INDEX marks" in str(plan.fetchall())


def test_a_new_ledger_and_an_upgraded_one_have_the_same_tables(old, owner):
    path, key = old
    Owner(path, key=key).ledger.close()
    found = []
    for each_path in (path, owner.path):
        with closing(sqlite3.connect(each_path)) as database:
            found.append(sorted(database.execute("SELECT name, sql FROM sqlite_master").fetchall()))
    assert found[0] == found[1]


def test_an_upgrade_that_fails_leaves_the_ledger_as_it_was(old, monkeypatch):
    path, key = old
    before = read_log(path)
    monkeypatch.setattr(Ledger, "upgrades", (*Ledger.upgrades, "CREATE TABLE half (x)", "no SQL"))
    with pytest.raises(fastrack.FastrackError, match=r"upgrading .* failed: .* It is as it was") as caught:
        Owner(path, key=key)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert (version_of(path), read_log(path)) == (1, before)
    monkeypatch.setattr(Ledger, "upgrades", ())
    later = Owner(path, key=key)  # as a program of version 1
    later.ask()
    later.ledger.close()


def test_a_program_of_version_1_refuses_a_ledger_of_version_2(owner, monkeypatch):
    monkeypatch.setattr(Ledger, "upgrades", ())
    for read in (Ledger, read_log):
        with pytest.raises(fastrack.FormatError, match="got one of version 2, of a later fastrack"):
            read(owner.path)
    with pytest.raises(fastrack.FormatError, match="expected the database of a broker"):
        type("Other", (Journal,), {"application": 1, "schema": Ledger.schema})(owner.path)


# Ledgers that were set back.


def test_a_ledger_that_was_set_back_is_noticed_by_the_broker(owner, tmp_path):
    seen = owner.ask()
    assert seen == (read_log(owner.path)[-1].number, read_log(owner.path)[-1].hash)
    backup = shutil.copyfile(owner.path, tmp_path / "backup.db")
    later = owner.ask(seen=seen)
    assert later.number > seen.number
    back = Owner(backup, key=owner.key)
    assert back.ask(seen=seen).number == 6  # the copy has that entry
    for found in (later, Head(10**17, bytes(32))):  # another entry in its place, and none
        with pytest.raises(ChallengeError, match="The broker's log was set back: its owner has to look"):
            back.ask(seen=found)
    assert read_log(backup)[-1].details["field"] == "head"
    back.ledger.close()


@each("text", ["", "1", "1:", ":" + "00" * 32, "-1:" + "00" * 32, "1:" + "0G" * 32, "9" * 19 + ":" + "00" * 32])
def test_what_is_no_head_is_refused(text):
    with pytest.raises(fastrack.FormatError, match="reading the head of a log failed"):
        Head.parse(text)


class Answers:
    """A broker that knows of no heads: it asks for none, and tells any or none."""

    def __init__(self, head):
        self.head = head

    def exchange(self, path, body, headers, **_):
        grants = attest.Challenge.generate(now=NOW).to_bytes() if path == "/v1/challenges" else b"grants"
        headers = {} if self.head is None else {HEADER.lower(): str(self.head)}
        return SimpleNamespace(status=200, body=grants, headers=headers)


@each("head", [None, Head(6, bytes(32)), Head(7, bytes(32))])
def test_a_ledger_that_was_set_back_is_noticed_by_the_machine(head):
    with pytest.raises(fastrack.RollbackError, match="expected a log that goes on from entry 7, got") as caught:
        ask_broker(Answers(head), small(), 60, Head(7, bytes(32)))
    assert "\n" not in str(caught.value)
    assert ask_broker(Answers(head), small(), 60)[2] == head
    assert ask_broker(Answers(Head(8, bytes(32))), small(), 60, Head(7, bytes(32)))[2].number == 8


def test_a_machine_that_was_revoked_meanwhile_is_refused(owner):
    seen = owner.ask()
    seen = owner.ask(seen=seen)
    revoked = tdx.intel().platform_ca.crl(revoked=[small().platform.pck])
    own = attest.TdxCollateral(**tdx.collateral(pck_crl=revoked))
    owner.broker._settings = replace(owner.broker._settings, collateral=own)
    with pytest.raises(fastrack.AttestationError, match="revoked"):
        owner.ask(seen=seen)
    assert [entry.event for entry in read_log(owner.path)][-2:] == ["offered", "refused"]


# Machines and brokers that run.


@pytest.fixture
def start(serve):
    def begin(lease, **options):
        return serve(NOW - datetime.now(UTC), policy(1), roots(), lease=lease, **options)

    return begin


def run(line):
    done = invoke(line)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_a_quarantine_ends_a_running_lease_at_the_next_renewal(start, tmp_path):
    server, told, ended = start(6), [], threading.Event()
    database = ["--database", str(server.folder / "broker.db")]
    with take(server, lambda error: told.append(error) or ended.set()) as keys:
        tensor = sealed(server, tmp_path)
        assert is_open(tensor, keys)
        text = "the disk of ada was stolen"
        run(["broker", "quarantine", PPID, *database, "--why", text, "--by", "ada", "--tell", "call 123"])
        marked = time.monotonic()
        last, error = use_up(tensor, keys)
        assert last - marked < 3.5  # half the lease, and not its end
        assert "got 403: refused by the owner: call 123. Take a new one" in error
        assert text not in error
        assert ended.wait(5)
        assert [str(error).partition(" failed")[2] for error in told] == [error.partition(" failed")[2]]
        assert "\n" not in error
    with pytest.raises(fastrack.AttestationError, match="refused by the owner: call 123") as caught:
        take(server)
    assert (caught.value.field, caught.value.found) == ("quarantine", "refused")
    entries = read_log(server.folder / "broker.db")
    mark = next(entry for entry in entries if entry.event == "quarantined")
    assert {"name": PPID, "by": "ada", "why": text, "kind": "machine"}.items() <= mark.details.items()
    assert {entry.event for entry in entries if entry.number > mark.number} == {"offered", "refused"}
    assert PPID in run(["broker", "machines", *database])
    run(["broker", "lift", PPID.upper(), *database, "--why", "found"])
    with take(server) as keys:
        assert is_open(tensor, keys)


@pytest.mark.slow
def test_a_running_machine_refuses_a_ledger_that_was_set_back(start, tmp_path):
    server = start(10)
    path, backup = server.folder / "broker.db", tmp_path / "backup.db"
    server.stop()
    shutil.copyfile(path, backup)
    server.start()
    with take(server) as keys:
        server.stop()
        for rest in path.parent.glob("broker.db-*"):
            rest.unlink()
        shutil.copyfile(backup, path)
        server.start()
        while not isinstance(keys.failure, fastrack.AttestationError):
            assert keys.renewals == 0
            time.sleep(0.02)
        assert "got 409: granting keys failed: expected the entry 4:" in str(keys.failure)
        assert "\n" not in str(keys.failure)
    with take(server):  # a new lease has seen nothing
        pass
    refused = [entry.details for entry in read_log(path) if entry.event == "refused"]
    assert {entry["field"] for entry in refused} == {"head"}


# What it costs.


@pytest.mark.slow
def test_a_renewal_adds_less_than_a_kibibyte_to_the_ledger(owner):
    def grow(begin):
        for _ in range(40):
            owner.now += 2 * MINUTE
            begin()
            owner.ask()
        with closing(sqlite3.connect(owner.path)) as database:
            return database.execute("PRAGMA page_count").fetchone()[0] * 4096

    sizes = [grow(begin) for begin in (int, int, owner.broker._leased.clear)]
    renewal, first = ((after - before) / 40 for before, after in pairwise(sizes))
    assert 100 < renewal < 1 << 10
    assert 3 << 10 < first < 5 << 10
