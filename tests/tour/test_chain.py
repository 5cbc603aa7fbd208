"""The chain of a tour: it verifies as a whole, and each change is refused with its place."""

import random
from dataclasses import replace
from datetime import timedelta

import pytest
from helpers.tour_rig import NAMES, Rig

from fastrack import AuthenticationError, FormatError, RollbackError, SignatureError, tour
from fastrack.grants import Signer

REFUSED = (AuthenticationError, SignatureError, FormatError)


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    rig = Rig(tmp_path_factory.mktemp("tour"), order=(*NAMES, "ada"))
    rig.chain = rig.finish(rig.whole())[0]
    return rig


def read(rig, content):
    return tour.Chain.from_bytes(content, owner=rig.owner.verifier)


def test_a_whole_chain_verifies(rig):
    chain = read(rig, rig.chain.to_bytes())
    assert chain == rig.chain
    chain.require_complete()
    numbers = [(visit.delegation.before.number, visit.after.number) for visit in chain.visits]
    assert numbers == [(1, 2), (2, 3), (3, 4), (4, 5)]


def test_a_chain_is_saved_and_loaded(rig, tmp_path):
    rig.chain.save(tmp_path / "tour.chain")
    assert tour.Chain.load(tmp_path / "tour.chain", owner=rig.owner.verifier) == rig.chain


def offsets(content, count):
    lines = [0, *(index + 1 for index, byte in enumerate(content[:-1]) if byte == 10)]
    edges = [place for start in lines for place in (start, max(start - 1, 0))]
    return sorted({*edges, *random.Random(3).sample(range(len(content)), count)})


@pytest.mark.parametrize(
    "count", [pytest.param(150, id="some"), pytest.param(8000, marks=pytest.mark.nightly, id="most")]
)
def test_an_altered_byte_is_refused_with_its_line(rig, count):
    content = rig.chain.to_bytes()
    for offset in offsets(content, count):
        altered = bytearray(content)
        altered[offset] ^= 1 << (offset % 8)
        with pytest.raises(REFUSED) as raised:
            read(rig, bytes(altered)).require_complete()
        line = content[:offset].count(b"\n") + 1
        place = f"line {line}, "
        # A line that is joined to the next one, or cut in two, is refused at its beginning.
        assert place in str(raised.value) or "in its first line" in str(raised.value), (offset, str(raised.value))


def lines_of(rig):
    return rig.chain.to_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("order", "place"),
    [
        ([0, 1, 2, 3, 5], "line 5, after 3 receipts"),  # the last receipt left out
        ([0, 1, 3, 4, 5], "line 3, after 1 receipts"),
        ([0, 2, 3, 4, 5], "line 2, after 0 receipts"),
        ([0, 2, 1, 3, 4, 5], "line 2, after 0 receipts"),
        ([0, 1, 2, 2, 3, 4, 5], "line 4, after 2 receipts"),
        ([0, 1, 2, 3, 4, 5, 5], "line 7, after 4 receipts"),
        ([0, 5], "line 2, after 0 receipts"),
        ([1, 2, 3, 4, 5], "line 1, the plan"),
        ([0, 0, 1, 2, 3, 4, 5], "line 2, after 0 receipts"),
    ],
)
def test_lines_that_are_missing_doubled_or_moved_are_refused_with_their_place(rig, order, place):
    lines = lines_of(rig)
    with pytest.raises(REFUSED, match=place):
        read(rig, b"".join(lines[index] for index in order))


@pytest.mark.parametrize("count", range(1, 5))
def test_a_shortened_chain_is_not_complete(rig, count):
    chain = read(rig, b"".join(lines_of(rig)[:count]))
    with pytest.raises(RollbackError, match=rf"behind receipt {count - 1}, got none"):
        chain.require_complete()


def test_a_chain_of_another_owner_is_refused(rig):
    with pytest.raises(SignatureError, match="line 1, the plan"):
        tour.Chain.from_bytes(rig.chain.to_bytes(), owner=Signer.generate().verifier)


def test_a_line_of_another_tour_is_refused(rig, tmp_path):
    theirs = Rig(tmp_path, owner=rig.owner).whole().to_bytes().splitlines(keepends=True)
    with pytest.raises(REFUSED, match="line 2, after 0 receipts"):
        read(rig, b"".join([lines_of(rig)[0], theirs[1]]))


def test_only_the_lines_behind_a_known_chain_are_read_again(rig, monkeypatch):
    known = read(rig, b"".join(lines_of(rig)[:3]))
    seen = []
    check = tour.Chain._check_receipt
    monkeypatch.setattr(tour.Chain, "_check_receipt", lambda chain, line: (seen.append(line), check(chain, line))[1])
    chain = tour.Chain.from_bytes(rig.chain.to_bytes(), owner=rig.owner.verifier, known=known)
    assert chain == rig.chain
    assert seen == lines_of(rig)[3:5]


# Receipts that were signed, but by a machine or an owner that did not keep to the plan.


class Forger:
    """The owner's and a holder's keys, which sign what they like, and a key of a visit."""

    def __init__(self, rig):
        self.rig, self.visitor = rig, Signer.generate()
        self.delegation = replace(rig.chain.visits[0].delegation, signer=self.visitor.verifier)
        self.consent, self.receipt = rig.chain.visits[0].consent, rig.chain.visits[0].receipt

    def chain(self):
        delegation = self.delegation.sign(self.rig.owner)
        consent = replace(self.consent, delegation=delegation.digest).sign(self.rig.signers["ada"])
        receipt = replace(self.receipt, delegation=delegation.envelope, consent=consent.envelope).sign(self.visitor)
        return self.rig.plan.envelope + receipt.envelope


def test_a_receipt_that_keeps_to_everything_is_accepted(rig):
    assert len(read(rig, Forger(rig).chain()).visits) == 1


@pytest.mark.parametrize(
    ("document", "changes", "found"),
    [
        ("delegation", {"visit": 1}, "consent|turn|signature|visit"),
        ("delegation", {"previous": "0" * 64}, "the receipt before"),
        ("delegation", {"plan": "0" * 64}, "of this plan"),
        ("delegation", {"attempt": 4}, "an attempt up to 3"),
        ("delegation", {"attempt": 0}, "'attempt' has a value out of range"),
        ("delegation", {"before": tour.ModelVersion(2, "0" * 64)}, "version 3"),
        ("consent", {"files": ()}, "files that the holder granted"),
        ("receipt", {"code": "0" * 64}, "the training code"),
        ("receipt", {"after": None}, "broken off"),
        ("receipt", {"after": tour.ModelVersion(3, "0" * 64)}, "version 2 of the model"),
    ],
)
def test_a_receipt_that_does_not_keep_to_the_plan_is_refused(rig, document, changes, found):
    forger = Forger(rig)
    setattr(forger, document, replace(getattr(forger, document), **changes))
    with pytest.raises(REFUSED, match=found):
        read(rig, forger.chain())


def test_a_receipt_after_the_end_of_its_visit_is_refused(rig):
    forger = Forger(rig)
    forger.receipt = replace(forger.receipt, ended=forger.delegation.expires + timedelta(seconds=1))
    with pytest.raises(AuthenticationError, match="expected an end by"):
        read(rig, forger.chain())


def test_a_delegation_beyond_the_plan_is_refused(rig):
    forger = Forger(rig)
    forger.delegation = replace(forger.delegation, expires=rig.plan.expires + timedelta(seconds=1))
    with pytest.raises(AuthenticationError, match="expected an end by"):
        read(rig, forger.chain())


def test_a_receipt_after_the_end_of_its_consent_is_refused(rig):
    forger = Forger(rig)
    forger.consent = replace(forger.consent, expires=forger.receipt.ended - timedelta(seconds=1))
    with pytest.raises(AuthenticationError, match="expected an end by"):
        read(rig, forger.chain())


def test_a_consent_of_another_holder_is_refused(rig):
    forger = Forger(rig)
    delegation = forger.delegation.sign(rig.owner)
    consent = replace(forger.consent, delegation=delegation.digest).sign(rig.signers["ben"])
    receipt = replace(forger.receipt, delegation=delegation.envelope, consent=consent.envelope).sign(forger.visitor)
    with pytest.raises(SignatureError, match="line 2"):
        read(rig, rig.plan.envelope + receipt.envelope)


# Plans.


@pytest.mark.parametrize(
    "changes",
    [
        {"order": ()},
        {"order": ("ada", "eve")},
        {"order": ("ada",)},  # a holder without a turn
        {"seconds": 0},
        {"attempts": 0},
        {"tour": "x"},
        {"code": "A" * 64},
        {"start": tour.ModelVersion(0, "0" * 64)},
    ],
)
def test_a_plan_that_makes_no_sense_is_not_signed(rig, changes):
    with pytest.raises(FormatError):
        replace(rig.plan, **changes).sign(rig.owner)


def test_two_names_for_one_key_are_one_holder_too_many(rig):
    holders = dict.fromkeys(rig.plan.holders, rig.plan.holders["ada"])
    with pytest.raises(FormatError, match="holders"):
        replace(rig.plan, holders=holders).sign(rig.owner)


@pytest.mark.parametrize("kind", [tour.Plan, tour.Delegation, tour.Consent, tour.Receipt, tour.Completion])
def test_garbage_is_no_document(rig, kind):
    envelopes = [rig.plan.envelope, rig.chain.visits[0].receipt.envelope, rig.chain.completion.envelope]
    garbage = [b"", b"{}", b"\xff" * 90, b"[" * 10_000, *(each[:-1] for each in envelopes), b"0" * (2 << 20)]
    for content in [*garbage, *(each for each in envelopes if kind.KIND.encode() not in each[-300:])]:
        with pytest.raises((FormatError, SignatureError)):
            kind.from_bytes(content, signer=rig.owner.verifier)
