"""A model of leases: one machine, one broker, a network that loses and repeats, and clocks that are set and stopped.

Everything but the evidence, the threads and the clocks is the real thing: grants are signed, encrypted and opened.
"""

import os
import threading
import traceback
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import fastrack
from fastrack._keys import grants as grants_module
from fastrack._keys import leases
from fastrack._keys.leases import LeasePage
from fastrack.attest import Challenge, MachineEvidence, Offer, PendingOffer, TdxEvidence, _lease
from fastrack.attest._exchange import _write_grants, open_lease
from fastrack.attest._lease import Lease
from fastrack.grants import Identity, Signer

pytest.importorskip("fcntl")
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="leases need Linux")

SECONDS = 10
TICK = 0.5  # seconds, in which threads look
LOST, SHARE = 2.0, 0.01  # what two clocks may differ by
START = datetime(2026, 6, 1, tzinfo=UTC)


class World:
    """The clocks, in seconds: two of the machine, and the broker's."""

    def __init__(self):
        self.boot = 1000.0
        self.real = 5000.0
        self.broker = 0.0

    def pass_by(self, seconds):
        self.boot += seconds
        self.real += seconds
        self.broker += seconds

    def seen_boot(self):
        return int(self.boot * 1e9)

    def seen_real(self):
        return int(self.real * 1e9)

    def broker_time(self):
        return START + timedelta(seconds=self.broker)


class Owner:
    """A broker: challenges that are used once, and grants."""

    signer = Signer.generate()

    def __init__(self, world):
        self.world = world
        self.secret = bytes(range(32))
        self.open = {}
        self.answers = []

    def challenge(self):
        challenge = Challenge.generate(now=self.world.broker_time(), lifetime=timedelta(minutes=5))
        self.open[challenge.id] = challenge
        return challenge

    def answer(self, offer):
        if self.open.pop(offer.challenge_id, None) is None:
            raise fastrack.AttestationError("the challenge was used")
        key, now = fastrack.Key.from_bytes(self.secret), self.world.broker_time()
        expires, lease = now.replace(microsecond=0) + timedelta(minutes=5), timedelta(seconds=SECONDS)
        document = _write_grants(offer.challenge_id, offer.recipient, [key], self.signer, None, expires, lease=lease)
        self.answers.append(document)
        return document


class Machine:
    """A machine with a lease, and what is known of it from outside: when its last answers were asked for and given."""

    def __init__(self, world, owner, network):
        self.world, self.owner, self.network = world, owner, network
        self.told = []
        self.is_over = False
        self.start()

    def start(self):
        """Take a lease. `asked` and `given` are all clocks at its last renewal: the machine's two and the broker's."""
        self.asked = self.given = None
        self.outcome = ""
        self.lease = Lease(self.exchange, self.told.append)
        self.asked, self.given = self.asking, self.giving
        self.is_over, self.told[:] = False, []
        source = self.lease._page._descriptor
        self.child = LeasePage(source, os.fstat(source).st_size, is_own=False)
        self.child.read_keys()

    def exchange(self, seconds):
        """Send a challenge's offer over the network, which does to it what comes next."""
        world, owner = self.world, self.owner
        what, delay = next(self.network, ("ok", 0.0)) if self.asked else ("ok", 0.0)
        self.outcome, self.asking = what, (world.boot, world.real, world.broker)
        if self.asked:
            assert seconds <= max(5.0, self.lease._page.left / 2), "no time for another try"
        if what == "lost":
            raise OSError("no answer")
        challenge, identity = owner.challenge(), Identity.generate("MLKEM768_X25519")
        pending = PendingOffer(Offer(challenge.id, identity.recipient, MachineEvidence(TdxEvidence(b"q"))), identity)
        if what == "restarted":
            owner.open.clear()
        if what == "late request":
            world.pass_by(delay)
        answer = owner.answer(pending.offer)
        self.giving = (world.boot, world.real, world.broker)
        if what == "doubled":
            with pytest.raises(fastrack.AttestationError):
                owner.answer(pending.offer)
        if what == "late answer":
            world.pass_by(delay)
        if what == "answer lost":
            raise OSError("no answer")
        if what == "stopped meanwhile":  # the host stops the guest, and all its clocks
            world.broker += delay
        if what in {"replayed", "reordered"}:
            answer = owner.answers[0 if what == "replayed" else -2]
        return open_lease(pending, answer, owner=owner.signer.verifier, now=world.broker_time())

    def look(self):
        """Use the key, do what threads would do now, and use it again: no use waits for them."""
        self.compare()
        if self.lease._page.is_over:
            self.lease._page.end()
        elif self.world.boot * 1e9 >= self.lease._due:
            self.renew()
            self.compare()

    def compare(self):
        """Compare each use with what is known from outside."""
        uses = {self.use(self.lease.first), self.use(self.child.keys[0])}
        assert len(uses) == 1, "processes differ"
        boot, real = self.world.boot, self.world.real
        must_end = self.is_over or boot >= self.given[0] + SECONDS or real >= self.given[1] + SECONDS
        may_end = self.is_over or boot >= self.asked[0] + SECONDS or real >= self.asked[1] + SECONDS
        if True in uses:
            assert not must_end, "a use after the end"
        else:
            assert may_end, "an end before its time"
            self.is_over = True
            assert len(self.told) == 1, "told once"

    def renew(self):
        renewals, before = self.lease.renewals, (self.asked, self.given)
        self.lease._renew()
        boot, broker = self.world.boot, self.giving[2]
        if self.lease.renewals > renewals:
            assert self.outcome not in {"replayed", "reordered", "restarted", "lost", "answer lost"}
            self.asked, self.given = self.asking, self.giving
        own, of_broker = boot - before[0][0], broker - before[1][2]
        if self.outcome in {"ok", "doubled", "late answer", "late request", "stopped meanwhile"}:
            if of_broker > own + LOST + SHARE * own + 1.0:  # whole seconds are rounded
                self.is_over = True
                assert self.lease._page.is_over, "time was lost, and not noticed"
            elif of_broker > own + LOST + SHARE * own - 1.0 and self.lease._page.is_over:
                self.is_over = True

    @staticmethod
    def use(key):
        try:
            return len(key.material()) == 32
        except fastrack.LeaseError:
            return False


OUTCOMES = ["ok", "ok", "ok", "lost", "answer lost", "doubled", "replayed", "reordered", "restarted"]
DELAYED = ["late request", "late answer", "stopped meanwhile"]
DELAY = st.floats(0.1, 12.0)
network_of = st.lists(
    st.one_of(st.tuples(st.sampled_from(OUTCOMES), st.just(0.0)), st.tuples(st.sampled_from(DELAYED), DELAY)),
    max_size=12,
)
EVENTS = st.one_of(
    st.tuples(st.just("run"), st.floats(0.5, 15.0)),
    st.tuples(st.just("run"), st.floats(0.5, 15.0)),
    st.tuples(st.just("suspend"), st.floats(0.5, 15.0)),
    st.tuples(st.just("stop"), st.floats(0.5, 30.0)),
    st.tuples(st.just("set"), st.floats(-40.0, 12.0)),
    st.tuples(st.just("set broker"), st.floats(-40.0, 12.0)),
    st.tuples(st.just("new machine"), st.just(0.0)),
)
schedules = st.tuples(st.lists(EVENTS, min_size=1, max_size=14), network_of)


def play(schedule, patch):
    """Play a schedule, and raise AssertionError where a lease lives too long, or too short."""
    events, network = schedule
    world = World()
    patch.setattr(leases, "boottime", world.seen_boot)
    patch.setattr(_lease, "boottime", lambda: int(world.boot * 1e9))
    patch.setattr(leases, "realtime", world.seen_real)
    patch.setattr(grants_module, "_now", lambda: world.broker_time().replace(microsecond=0))
    patch.setattr(Lease, "_begin", lambda self: None)
    patch.setattr(LeasePage, "_begin_watch", lambda self: None)
    patch.setattr(LeasePage, "_tell", staticmethod(lambda on_end: on_end()))
    machine = Machine(world, Owner(world), iter(network))
    try:
        for what, amount in events:
            if what == "run":
                for _ in range(int(amount / TICK)):
                    world.pass_by(TICK)
                    machine.look()
            elif what == "suspend":
                world.pass_by(amount)
            elif what == "stop":
                world.broker += amount
            elif what == "set":
                world.real += amount
            elif what == "set broker":
                world.broker += amount
            else:
                machine.lease.close()
                assert not machine.use(machine.lease.first)
                machine.start()
            machine.look()
    finally:
        machine.lease.close()
        machine.child._memory.release()
    return machine


def check(count, schedule_of=schedules, **options):
    """Return a test of so many schedules."""

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=[*HealthCheck], **options)
    @given(schedule_of)
    def run(schedule):
        with pytest.MonkeyPatch.context() as patch:
            play(schedule, patch)

    return run


@pytest.mark.slow
def test_no_schedule_lets_a_lease_live_too_long_or_too_short():
    check(300)()
    check(100, LATE)()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_no_schedule_of_ten_thousand_lets_a_lease_live_too_long_or_too_short():
    check(10_000)()


IN_TIME = st.lists(
    st.sampled_from([("ok", 0.0), ("doubled", 0.0), ("late answer", 1.0), ("late request", 1.0), ("lost", 0.0)]),
    max_size=60,
)


@pytest.mark.slow
def test_a_lease_does_not_end_while_renewals_come_in_time():
    @settings(max_examples=30, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(IN_TIME)
    def run(network):
        apart = [each for pair in zip(network, [("ok", 0.0)] * len(network), strict=True) for each in pair]
        with pytest.MonkeyPatch.context() as patch:
            machine = play(([("run", 300.0)], apart), patch)
            assert (machine.lease.renewals > 50, machine.is_over) == (True, False)

    run()


def count_from_the_answer(patch):
    take = Lease._renew

    def renew(self):
        moment = leases.Moment.now
        patch.setattr(leases.LeasePage, "prolong", lambda page, ends: later(page, moment().after(SECONDS)))
        return take(self)

    later = LeasePage.prolong
    patch.setattr(Lease, "_renew", renew)


def forget_the_boot_clock(patch):
    patch.setattr(World, "seen_boot", lambda self: 0)


def forget_the_real_clock(patch):
    patch.setattr(World, "seen_real", lambda self: 0)


def compare_no_clocks(patch):
    patch.setattr(_lease, "_LOST", (1e9, 0.0))


def bring_back_what_ended(patch):
    def prolong(page, ends):
        page._has_ended = False
        page.ends[0], page.ends[1] = ends
        page._memory[64:96] = bytes(range(32))
        for key in page.keys:
            key._wiped = False

    patch.setattr(LeasePage, "prolong", prolong)


def end_at_the_first_failure(patch):
    renew = Lease._renew
    patch.setattr(Lease, "_renew", lambda self: renew(self) or self._page.end("it failed"))


# Late answers, and none after them: rare among all schedules, which depend on the modules that a process has loaded.
LATE = st.tuples(
    st.lists(st.tuples(st.just("run"), st.floats(5.0, 15.0)), min_size=4, max_size=8),
    st.lists(st.tuples(st.sampled_from(DELAYED), DELAY), min_size=1, max_size=3).map(lambda late: [*late, *LOST_ONES]),
)
LOST_ONES = [("lost", 0.0)] * 99


@pytest.mark.parametrize(
    "fault",
    [
        count_from_the_answer,
        forget_the_boot_clock,
        forget_the_real_clock,
        compare_no_clocks,
        bring_back_what_ended,
        end_at_the_first_failure,
    ],
)
def test_a_planted_fault_is_found(fault):
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError):
            check(2000, schedules | LATE, phases=[Phase.generate])()


@pytest.mark.slow
def test_an_answer_that_never_comes_keeps_no_lease_from_its_end(monkeypatch):
    monkeypatch.setattr(f"{__name__}.SECONDS", 2)
    machine, ended, go_on = Machine(World(), Owner(World()), iter(())), threading.Event(), threading.Event()
    machine.lease._exchange = lambda _: go_on.wait() and []
    machine.lease._on_expiry = lambda _: ended.set()
    assert ended.wait(10)  # without any use
    assert not any(machine.lease._page._memory[64:96])
    go_on.set()


def test_a_failure_that_is_kept_has_no_secret_of_its_offer():
    machine = Machine(World(), Owner(World()), iter([("replayed", 0.0)]))
    machine.lease._renew()
    error = machine.lease.failure
    assert isinstance(error, fastrack.AttestationError)
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            held = frame.f_locals.values() if frame.f_code.co_name != "_renew" else ()
            assert not [each for each in held if isinstance(each, (PendingOffer, Identity, bytes))]
        error = error.__cause__ or error.__context__
    machine.lease.close()


def test_a_use_after_the_end_is_refused_in_one_line_whatever_failed():
    machine = Machine(World(), Owner(World()), iter(()))

    def fail(_):
        raise OSError("no\n  answer")

    machine.lease._exchange = fail
    machine.lease._renew()
    machine.lease._page.end()
    with pytest.raises(fastrack.LeaseError, match=r"as the last renewal failed: no answer\."):
        machine.lease.first.material()


def test_a_renewal_opens_no_key_once_more(monkeypatch):
    """A child that is forked meanwhile would keep it."""
    machine = Machine(World(), Owner(World()), iter(()))
    monkeypatch.setattr(Identity, "decrypt", None)
    assert machine.lease._renew()
    machine.lease.close()
