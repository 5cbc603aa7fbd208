"""Visits whose holder grants its keys on a lease: renewed while they train, and ended by their holder."""

import json
import threading
import time
from datetime import timedelta

import pytest
from helpers.tour_rig import Between, Rig, machine

from fastrack import GrantError, LeaseError, RollbackError, tour
from fastrack.attest import AttestationError
from fastrack.attest._offer import Challenge
from fastrack.grants import Grants, Signer
from fastrack.tour._ledger import read_kept
from fastrack.tour._messages import pack, read_grants, unpack
from fastrack.tour._request import VisitRequest, make_visit_offer

SECONDS = 2


class Leased(Rig):
    """A rig whose holders grant on a lease, and whose training code goes on until `enough` says so."""

    def __init__(self, folder, enough=lambda: True, **options):
        def train(state, shards):
            for _ in shards:
                self.last = time.monotonic()
                if enough():
                    break
                time.sleep(0.01)
            self.before_end()
            return state

        super().__init__(folder, ("ada", "ben", "ada"), train=train, **options)

    def before_end(self):
        pass

    def open_desk(self, name, terms, databases=None):
        desk = super().open_desk(name, terms, databases)
        return self.reopen(desk, timedelta(seconds=SECONDS))

    def reopen(self, desk, lease, **changes):
        names = {"files": desk._files, "terms": desk._terms, "signer": desk._signer, "ledger": desk._ledger}
        return tour.HolderDesk(self.plan, desk._keys, lease=lease, **{**names, **changes})

    def visit(self, number, **changes):
        return super().visit(number, data=1000 * [self.data(self.plan.order[number])], **changes)

    def events(self, name="ada"):
        query = "SELECT event, details FROM log ORDER BY number"
        rows = self.desks[name]._ledger._database.execute(query).fetchall()
        return [(event, json.loads(details)) for event, details in rows]

    def count(self, event):
        return [each for each, _ in self.events()].count(event)

    def stop(self, why="the wrong cohort"):
        return self.desks["ada"]._ledger.stop(why, now=self.moment)


class Tap:
    """A desk whose messages are kept, and which may be gone."""

    def __init__(self, desk):
        self.desk, self.asked, self.is_gone = desk, [], False

    def ask(self, step, body=b""):
        if self.is_gone:
            raise ConnectionRefusedError("the desk is gone")
        self.asked.append((step, body, self.desk.ask(step, body)))
        return self.asked[-1][2]

    def begun(self):
        return [(unpack("begin", body), answer) for step, body, answer in self.asked if step == "begin"]


@pytest.mark.slow
def test_a_visit_goes_on_as_long_as_its_keys_are_renewed(tmp_path):
    rig = Leased(tmp_path, lambda: rig.count("renewed") >= 3)
    began = time.monotonic()
    chain = rig.visit(0)
    assert time.monotonic() - began > SECONDS
    assert rig.desks["ada"].receipts() == ((chain.visits[0].consent, chain.visits[0].receipt),)
    assert [event for event, _ in rig.events()] == ["begun", "renewed", "renewed", "renewed", "ended"]
    begun, *renewed, _ = [details for _, details in rig.events()]
    assert begun["lease"] == SECONDS
    for details in renewed:  # in short, as the machine is the same
        assert details.keys() == {"attempt", "offer", "visit"}
    assert not [thread for thread in threading.enumerate() if thread.name == "fastrack renewal" and is_busy(thread)]
    assert read_kept(rig.folder / "ada.db").details[0]["stopped"] is None


def is_busy(thread):
    thread.join(10)
    return thread.is_alive()


@pytest.mark.slow
def test_a_holder_ends_a_visit_in_progress_and_it_may_be_begun_again(tmp_path):
    rig = Leased(tmp_path, lambda: rig.is_done)
    rig.is_done = False
    ended = []

    def end_soon():
        while rig.count("renewed") < 1:
            time.sleep(0.01)
        ended.append((rig.stop(), time.monotonic()))

    thread = threading.Thread(target=end_soon)
    thread.start()
    with pytest.raises(LeaseError, match=r"as the last renewal failed: .* one that its holder ended") as caught:
        rig.visit(0)
    thread.join()
    assert "\n" not in str(caught.value)
    assert "cohort" not in str(caught.value)  # the reason is the holder's own
    [((attempt, seconds), at)] = ended
    assert (attempt.visit, attempt.attempt, seconds) == (0, 1, SECONDS)
    assert at < rig.last < at + SECONDS
    assert not (rig.folder / "v1").exists()
    [(_, receipt)] = rig.desks["ada"].receipts()
    assert receipt.after is None
    assert receipt.scrubbed == 64
    assert [event for event, _ in rig.events()][-2:] == ["stopped", "ended"]
    assert read_kept(rig.folder / "ada.db").details[0]["stopped"] == "the wrong cohort"
    with pytest.raises(RollbackError, match="expected one in progress, got none"):
        rig.stop()
    rig.is_done = True
    assert rig.visit(0).visits[0].delegation.attempt == 2


@pytest.mark.slow
def test_a_visit_that_its_holder_ended_fails_though_it_has_all_data(tmp_path):
    def wait():
        rig.stop()
        time.sleep(SECONDS)

    rig = Leased(tmp_path)
    rig.before_end = wait
    with pytest.raises(LeaseError, match="its holder ended"):
        rig.visit(0)
    assert not (rig.folder / "v1").exists()
    assert rig.desks["ada"].receipts()[0][1].after is None


@pytest.mark.slow
def test_a_desk_that_is_gone_ends_a_visit_within_the_lease(tmp_path):
    times = []

    def go():
        if rig.count("renewed") and not times:
            tap.is_gone = True
            times.append(time.monotonic())

    rig = Leased(tmp_path, go)
    tap = Tap(rig.desks["ada"])
    with pytest.raises(LeaseError, match="as the last renewal failed: the desk is gone"):
        rig.visit(0, holder_desk=tap)
    assert rig.last < times[0] + SECONDS
    assert rig.desks["ada"].receipts()[0][1] is None  # nothing reaches it


def test_keys_end_with_their_visit(tmp_path):
    """Today's grants end by the clock of the visitor; a lease is no longer than what is left."""
    rig = Leased(tmp_path, minutes=1)
    left = rig.desks["ada"]._lease_until
    now, day = rig.moment, timedelta(days=1)
    assert left(now + day, now) == timedelta(seconds=SECONDS)
    rig.desks["ada"] = rig.reopen(rig.desks["ada"], timedelta(hours=1))
    tap = Tap(rig.desks["ada"])
    rig.visit(0, holder_desk=tap)
    [(_, answer)] = tap.begun()
    [envelope] = read_grants(unpack("consented", answer)["grants"])
    grants = Grants.from_bytes(envelope, owner=rig.signers["ada"].verifier)
    assert 50 < grants.seconds <= 60
    with pytest.raises(GrantError, match="It is over"):
        left(now + timedelta(seconds=1), now)


# Renewals that are refused.


@pytest.fixture
def held(tmp_path):
    """Return a rig with a visit of ada in progress, whose desk was asked for one renewal, and the messages."""
    rig = Leased(tmp_path, lambda: len(tap.begun()) > 1)
    tap = Tap(rig.desks["ada"])

    def leave():
        raise KeyboardInterrupt

    rig.before_end = leave
    ask, tap.desk = tap.desk.ask, Between(tap.desk)
    tap.desk.ask = lambda step, body=b"": b"" if step == "end" else ask(step, body)  # it hears of no end
    with pytest.raises(KeyboardInterrupt):
        rig.visit(0, holder_desk=tap)
    return rig, tap


def renew(rig, delegation, *, desk=None, collect=None, **changes):
    """Ask ada for a renewal as a machine may that has no keys yet."""
    desk = desk or rig.desks["ada"]
    challenge = Challenge.from_bytes(desk.ask("challenge"))
    visit = (delegation.plan, delegation.visit, delegation.previous, delegation.before)
    members = dict(zip(("plan", "visit", "head", "model"), visit, strict=True))
    given = {**members, "code": rig.plan.code, "signer": delegation.signer, **changes}
    request = VisitRequest(challenges=(challenge,), **given)
    offer, identity = make_visit_offer(request, collect or machine())
    body = pack("begin", delegation=delegation.envelope, request=request.to_bytes(), offer=offer.to_bytes())
    return desk.ask("begin", body), identity


def delegated(rig, tap):
    return tour.Delegation.from_bytes(tap.begun()[0][0]["delegation"], signer=rig.owner.verifier)


@pytest.mark.slow
def test_a_renewal_is_answered_once(held):
    rig, tap = held
    parts, answer = tap.begun()[1]
    assert not parts["chain"]
    with pytest.raises(RollbackError, match="one that was used"):
        rig.desks["ada"].ask("begin", pack("begin", **parts))
    fresh, identity = renew(rig, delegated(rig, tap))  # the control
    [old], [new] = (read_grants(unpack("consented", each)["grants"]) for each in (answer, fresh))
    owner = rig.signers["ada"].verifier
    assert Grants.from_bytes(new, owner=owner).recipients[0].id == identity.recipient.id
    assert Grants.from_bytes(old, owner=owner).recipients[0].id != identity.recipient.id


@pytest.mark.parametrize("name", ["visit", "head", "model", "code", "plan", "signer"])
@pytest.mark.slow
def test_a_renewal_is_for_its_own_visit_and_key(held, name):
    rig, tap = held
    other = {"visit": 2, "model": tour.ModelVersion(2, "a" * 64), "signer": Signer.generate().verifier}.get(
        name, "a" * 64
    )
    with pytest.raises(RollbackError, match=f"the {name} of a visit"):
        renew(rig, delegated(rig, tap), **{name: other})
    assert rig.count("renewed") == 1


@pytest.mark.slow
def test_a_renewal_needs_evidence_that_is_bound_to_it(held):
    rig, tap = held
    made = []

    def replay(binding):
        made.append(made[0] if made else machine()(binding))
        return made[-1]

    renew(rig, delegated(rig, tap), collect=replay)
    with pytest.raises(AttestationError):
        renew(rig, delegated(rig, tap), collect=replay)
    assert rig.events()[-1][0] == "refused"


@pytest.mark.slow
def test_a_visit_that_is_void_or_over_is_not_renewed(held):
    rig, tap = held
    first = delegated(rig, tap)
    rig.before_end = lambda: None
    rig.visit(0)
    for delegation in (first, delegated_last(rig)):
        with pytest.raises(RollbackError, match="one that is over, or that a later attempt made void"):
            renew(rig, delegation)
    with pytest.raises(RollbackError, match="the visit that is here"):
        renew(rig, first, desk=rig.desks["ben"])


def delegated_last(rig):
    chain = tour.Chain.load(rig.folder / "v1" / "tour.chain", owner=rig.owner.verifier)
    return chain.visits[-1].delegation


@pytest.mark.slow
def test_a_visit_that_was_ended_stays_so_whoever_asks_and_after_a_restart(held):
    rig, tap = held
    rig.stop()
    for _ in range(2):
        with pytest.raises(GrantError, match="its holder ended"):
            renew(rig, delegated(rig, tap))
        rig.open_desks()
    assert rig.count("renewed") == 1


@pytest.mark.slow
def test_a_desk_that_was_opened_anew_renews_what_it_granted_and_nothing_else(held):
    rig, tap = held
    desk = rig.desks["ada"]
    rig.open_desks()
    renew(rig, delegated(rig, tap))
    for lease, changes in ((None, {}), (timedelta(seconds=9), {"files": ["a" * 32]})):
        with pytest.raises(GrantError, match="the same files on a lease"):
            renew(rig, delegated(rig, tap), desk=rig.reopen(desk, lease, **changes))


@pytest.mark.slow
def test_an_end_tells_the_longest_lease_that_was_granted(held):
    """A desk that was opened anew may have granted a longer one than the first, and then a shorter one."""
    rig, tap = held
    for seconds in (300, 30):
        renew(rig, delegated(rig, tap), desk=rig.reopen(rig.desks["ada"], timedelta(seconds=seconds)))
    assert [details.get("lease") for event, details in rig.events() if event != "refused"] == [2, None, 300, 30]
    assert rig.stop()[1] == 300


# Visits without a lease.


def test_a_visit_without_a_lease_is_as_before_and_cannot_be_ended(tmp_path):
    rig = Leased(tmp_path)
    rig.desks["ada"] = rig.reopen(rig.desks["ada"], None)
    tap = Tap(rig.desks["ada"])
    rig.before_end = lambda: refuse_stop(rig)
    rig.visit(0, holder_desk=tap)
    [(parts, answer)] = tap.begun()
    [envelope] = read_grants(unpack("consented", answer)["grants"])
    grants = Grants.from_bytes(envelope, owner=rig.signers["ada"].verifier)
    assert (grants.seconds, grants.renew_after) == (None, None)
    assert rig.events()[0][1].keys() == {"attempt", "claims", "delegation", "files", "offer", "visit"}
    assert len(VisitRequest.from_bytes(parts["request"]).challenges) == 2


def refuse_stop(rig):
    with pytest.raises(GrantError, match="one that has them to its end"):
        rig.stop()


@pytest.mark.parametrize("seconds", [0, 1, -5, 367 * 86400])
def test_a_lease_has_bounds(tmp_path, seconds):
    rig = Leased(tmp_path)
    with pytest.raises(ValueError, match="lease= of two seconds to 366 days"):
        rig.reopen(rig.desks["ada"], timedelta(seconds=seconds))
