"""The protocol against a model of it: messages that are lost, doubled, late, repeated or out of order, and restarts."""

import random
import sqlite3
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta

import pytest
from helpers.tour_world import CHAIN, MANIFEST, NAMES, world
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import fastrack
from fastrack import tour
from fastrack.attest import Challenge
from fastrack.errors import FastrackError
from fastrack.tour import _chain, _desk, _holder, _messages, _owner, _request, _visit
from fastrack.tour._owner import OwnerDesk

FATES = ("lose", "lose answer", "double", "delay", "replay", "reorder", "overtake", "restart", "crash", "kill")
MESSAGES = 5  # of a visit
ORDERS = [NAMES[:1] * 2, NAMES[:2], (*NAMES[:2], NAMES[0])]
ATTEMPTS = 30


class Model:
    """The two roles as they should be, a few lines each: it says which requests are granted, and which receipts taken.

    Owner: the receipts that were accepted, and the last delegation. Holder: its last consent. Both: open challenges.
    """

    def __init__(self, here):
        self.here, self.plan = here, here.plan
        self.receipts, self.last, self.attempt = [], None, 0
        self.consents = dict.fromkeys(here.plan.holders, (-1, 0))
        self.challenges = {name: {} for name in here.desks}
        here.watch = self.see

    def see(self, sent):
        """Compare an answer with the one that should have come."""
        step = {"begin": self.begin_owner if sent.to == "owner" else self.begin_holder}.get(sent.step)
        if sent.step == "restart":
            self.challenges[sent.to].clear()
        elif sent.step == "challenge" and sent.answer is not None:
            challenge = Challenge.from_bytes(sent.answer)
            self.challenges[sent.to][challenge.id] = challenge.expires
        elif step is not None:
            parts = _messages.unpack("begin", sent.body)
            # A holder that gets the owner's message finds no delegation in it, and leaves its challenge open.
            is_for_it = sent.to == "owner" or parts["delegation"]
            is_new = is_for_it and self.use_challenge(sent.to, _request.VisitRequest.from_bytes(parts["request"]))
            expected = step(sent.to, parts, sent.answer) if is_new else False
            assert (sent.answer is not None) == expected, f"{sent.to}: expected {expected} for {sent.step}"
        elif sent.step == "finish" and sent.answer is not None:
            receipts = self.lines(_messages.unpack("finish", sent.body))
            assert self.follows(receipts)
            assert len(receipts) == len(self.plan.order)
            self.receipts = receipts

    def use_challenge(self, name, request):
        open_ones = self.challenges[name]
        ends = [open_ones.pop(each.id) for each in request.challenges if each.id in open_ones]
        return bool(ends) and self.here.moment < ends[0]

    @staticmethod
    def lines(parts):
        return parts["chain"].splitlines(keepends=True)[1:]

    def follows(self, receipts):
        """Return whether these are the accepted receipts, or one more by the last delegation."""
        if receipts == self.receipts:
            return True
        if receipts[:-1] != self.receipts or self.last is None:
            return False
        return _chain.read_receipt(receipts[-1], self.plan).delegation.envelope == self.last

    def begin_owner(self, _, parts, answer):
        receipts = self.lines(parts)
        if not self.follows(receipts) or len(receipts) == len(self.plan.order):
            return False
        if not parts["manifest"]:  # as in the message for a holder
            return False
        attempt = self.attempt + 1 if receipts == self.receipts else 1
        if attempt > ATTEMPTS:
            return False
        if answer is not None:
            self.receipts, self.attempt = receipts, attempt
            self.last = _messages.unpack("delegated", answer)["delegation"]
            delegation = tour.Delegation.from_bytes(self.last, signer=self.plan.owner)
            assert (delegation.visit, delegation.attempt) == (len(receipts), attempt)
        return True

    def begin_holder(self, name, parts, answer):
        delegation = tour.Delegation.from_bytes(parts["delegation"], signer=self.plan.owner)
        number = delegation.visit, delegation.attempt
        if self.plan.order[delegation.visit] != name or number <= self.consents[name]:
            return False
        if self.here.moment >= delegation.expires:
            return False
        if answer is not None:
            self.consents[name] = number
        return True


class Protocol(RuleBasedStateMachine):
    """Visits whose messages have a fate, and what else can happen between them."""

    @initialize(order=st.sampled_from(ORDERS))
    def begin(self, order):
        self.stack = ExitStack()
        self.here = self.stack.enter_context(world(random.Random(0), order, attempts=ATTEMPTS))
        self.model = Model(self.here)

    @rule(place=st.integers(0, MESSAGES - 1), fate=st.sampled_from(FATES), choices=st.integers(0, 99))
    def visit(self, place, fate, choices):
        self.here.chance.seed(choices)
        self.here.visit(fates=[*(place * ["carry"]), fate])

    @rule(place=st.integers(2, 3))
    def visit_whose_request_is_late(self, place):
        """To the owner, or to the holder when the owner has granted already."""
        self.here.visit(fates=[*(place * ["carry"]), "delay"])

    @rule(count=st.integers(1, 2))
    def visits_without_trouble(self, count):
        for _ in range(count):
            self.here.visit()

    @rule(age=st.integers(0, 3))
    def visit_with_an_older_folder(self, age):
        self.here.visit(self.here.folders[-1 - age % len(self.here.folders)])

    @rule(last=st.integers(0, 25), is_power_cut=st.booleans())
    def visit_until_killed(self, last, is_power_cut):
        self.here.visit(last=last, is_power_cut=is_power_cut)

    @precondition(lambda self: self.here.delayed)
    @rule(number=st.integers(0, 9))
    def deliver(self, number):
        """A late message arrives."""
        self.here.attempt(*self.here.delayed.pop(number % len(self.here.delayed)))

    @precondition(lambda self: self.here.sent)
    @rule(number=st.integers(0, 99), place=st.integers(0, 5))
    def replay(self, number, place):
        """An old message arrives again, at its desk or another."""
        old = self.here.sent[-1 - number % len(self.here.sent)]
        names = [*(3 * [old.to]), *sorted(self.here.desks)]
        self.here.attempt(names[place % len(names)], old.step, old.body)

    @rule(number=st.integers(0, 2), seconds=st.sampled_from([0, 60, 299, 600]))
    def restart(self, number, seconds):
        """A desk starts again, or time passes."""
        names = sorted(self.here.desks)
        if seconds == 0:
            self.here.restart(names[number % len(names)])
        self.here.moment += timedelta(seconds=seconds)

    @rule(age=st.integers(0, 2))
    def finish(self, age):
        with suppress(FastrackError):
            self.here.finish(self.here.folders[-1 - age % len(self.here.folders)])

    def teardown(self):
        if hasattr(self, "here"):
            with self.stack:
                self.here.complete()
                self.here.deliver_delayed()  # too late for all of them
                self.here.check()
                self.check_keys()
                assert self.model.receipts == [visit.receipt.envelope for visit in self.here.chain.visits]
                assert not self.here.leaks()

    def check_keys(self):
        """Require of each version of the model that was accepted another key than all others have."""
        used = {self.here.made.key.id}
        for number, visit in enumerate(self.here.chain.visits, 1):
            [folder] = [folder for folder in self.here.folders if self.is_of(folder, visit)]
            manifest = fastrack.load_manifest(folder / MANIFEST, owner=visit.delegation.signer)
            [entry] = manifest.files.values()
            assert entry.key not in used, f"version {number} is sealed under an older key"
            used.add(entry.key)

    @staticmethod
    def is_of(folder, visit):
        return (folder / CHAIN).read_bytes().endswith(visit.receipt.envelope)


def check(runs, *, examples=12, steps=10):
    """Run the machine with some seeds: in one long run most examples resemble others."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        print_blob=False,
    )
    for number in range(runs):
        run_state_machine_as_test(seed(number)(Protocol), settings=chosen)


@pytest.mark.slow
def test_desks_answer_as_their_model_whatever_becomes_of_messages():
    check(1)


def test_a_message_for_the_owner_leaves_the_challenge_of_a_holder_open():
    state = Protocol()
    state.begin(order=ORDERS[2])
    state.visit_whose_request_is_late(place=3)
    state.replay(number=51, place=3)
    state.deliver(number=8)
    state.teardown()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_desks_answer_as_their_model_for_long():
    check(100, steps=15)


# Faults that are planted. Each makes a desk or a visitor do what the protocol forbids: it replaces a step by another.


def same_key_for_each_version():
    derive = _owner._derive
    return [(_owner, "_derive", lambda key, salt, plan: derive(key, bytes(len(salt)), plan))]


def model_sealed_under_the_old_key():
    begin = _visit._begin

    def begin_without_rotation(*given):
        begun = begin(*given)
        return replace(begun, fresh=begun.model.first)

    return [(_visit, "_begin", begin_without_rotation)]


def old_key_that_no_owner_checks():
    return [*model_sealed_under_the_old_key(), (OwnerDesk, "_require_key", lambda *_: None)]


def receipt_of_a_void_attempt():
    following = OwnerDesk._following

    def follow_any(desk, state, visit):
        attempts = [each for each in desk._ledger.attempts(state.visit) if each.document == visit.delegation.envelope]
        found = following(desk, replace(state, latest=attempts[0] if attempts else None), visit)
        return replace(found, latest=state.latest)

    return [(OwnerDesk, "_following", follow_any)]


def older_chain_at_a_holder():
    return [(_holder.HolderDesk, "_require_own_visits", lambda *_: None)]


def older_attempt_at_a_holder():
    return [(_holder.HolderDesk, "_require_newer", lambda desk, _: desk._ledger.latest())]


def challenge_that_is_used_twice():
    return [(_desk._Challenges, "use", lambda *_: None)]


SOON = (
    same_key_for_each_version,
    model_sealed_under_the_old_key,
    old_key_that_no_owner_checks,
    receipt_of_a_void_attempt,
)
LATE = (older_chain_at_a_holder, older_attempt_at_a_holder, challenge_that_is_used_twice)


@pytest.mark.parametrize(
    "plant",
    [*SOON, *(pytest.param(plant, marks=pytest.mark.nightly) for plant in LATE)],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_found(monkeypatch, plant):
    for step in plant():
        monkeypatch.setattr(*step)
    with pytest.raises((AssertionError, sqlite3.IntegrityError)):
        check(30)
