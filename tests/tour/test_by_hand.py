"""The chain of a tour is verified from only docs/format.md, without fastrack."""

import ast
import base64
import itertools
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from helpers import by_hand
from helpers.by_hand import RefusedError
from helpers.by_hand.tours import read_chain
from helpers.cases import each
from helpers.signed import sign

from fastrack import AuthenticationError, FormatError, tour
from fastrack.errors import SignatureError
from fastrack.grants import Signer

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


class Parties:
    """The owner, two holders and a tour of three visits, whose documents are signed without desks."""

    def __init__(self, algorithm="Ed25519"):
        self.owner = Signer.generate(algorithm)
        self.holders = {name: Signer.generate(algorithm) for name in ("clinic", "lab")}
        self.plan = tour.Plan(
            tour="1" * 32,
            lineage="2" * 32,
            start=tour.ModelVersion(1, "3" * 64),
            holders={name: signer.verifier for name, signer in self.holders.items()},
            order=("clinic", "lab", "clinic"),
            seconds=600,
            attempts=3,
            code="4" * 64,
            issued=NOON,
            expires=NOON + timedelta(days=1),
        ).sign(self.owner)

    @property
    def line(self):
        return str(self.owner.verifier)

    def visit(self, chain, *, plan=None, consented=None, granted=timedelta(minutes=9), **changed):
        """Return a chain with the receipt of its next visit, or a receipt with other values."""
        own, number = Signer.generate(), len(chain.visits)
        delegation = tour.Delegation(
            plan=plan or self.plan.digest,
            visit=number,
            attempt=1,
            previous=chain.head,
            before=chain.model,
            signer=own.verifier,
            key="5" * 32,
            salt="5" * 64,
            expires=NOON + timedelta(minutes=9),
        ).sign(self.owner)
        consent = tour.Consent(
            delegation=consented or delegation.digest,
            policy="6" * 64,
            offer="9" * 64,
            files=("7" * 32, "8" * 32),
            issued=NOON,
            expires=NOON + granted,
        ).sign(self.holders[self.plan.order[number]])
        receipt = tour.Receipt(
            delegation=delegation.envelope,
            consent=consent.envelope,
            code=self.plan.code,
            after=tour.ModelVersion(chain.model.number + 1, f"{number:x}" * 64),
            files=("7" * 32,),
            chunks=3,
            scrubbed=4096,
            started=NOON,
            ended=NOON + timedelta(minutes=1),
        )
        return replace(receipt, **changed).sign(own).envelope

    def chain(self):
        chain = tour.Chain(self.plan)
        for _ in self.plan.order:
            chain = chain.extend(self.visit(chain))
        completion = tour.Completion(
            plan=self.plan.digest, head=chain.head, visits=3, model=chain.model, issued=NOON
        ).sign(self.owner)
        return chain.extend(completion.envelope)


@pytest.fixture(scope="module")
def parties():
    return Parties()


@pytest.fixture(scope="module")
def content(parties):
    return parties.chain().to_bytes()


def test_the_reader_imports_nothing_of_fastrack():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(by_hand.__file__).parent.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    names = {name for name in names if not name.startswith("helpers.by_hand")}
    others = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert others == {"cryptography", "numpy", "safetensors"}


@each("algorithm", ["Ed25519", "ML-DSA-65"])
def test_a_chain_is_verified_from_the_description_of_its_format(algorithm):
    parties = Parties(algorithm)
    chain = parties.chain()
    plan, visits, completion = read_chain(chain.to_bytes(), parties.line)
    assert plan["tour"] == chain.plan.tour
    assert [visit["holder"] for visit in visits] == ["clinic", "lab", "clinic"]
    assert [visit["digest"] for visit in visits] == [visit.receipt.digest for visit in chain.visits]
    assert completion["head"] == chain.head
    assert completion["model"] == [chain.model.number, chain.model.digest]


def refused_by_both(content, parties):
    """Require that the reader and fastrack refuse a chain."""
    with pytest.raises(RefusedError):
        read_chain(content, parties.line)
    with pytest.raises((FormatError, SignatureError, AuthenticationError)):
        tour.Chain.from_bytes(content, owner=parties.owner.verifier)


def accepted(content, parties, offsets):
    """Return the offsets at which an altered byte is not noticed."""
    found = []
    for offset in offsets:
        altered = bytearray(content)
        altered[offset] ^= 1
        try:
            read_chain(bytes(altered), parties.line)
        except RefusedError:
            continue
        found.append(offset)
    return found


def test_an_altered_byte_is_refused(content, parties):
    assert accepted(content, parties, range(0, len(content), 67)) == []
    ends = itertools.accumulate(map(len, content.splitlines(keepends=True)))
    around = [end + step for end in ends for step in range(-3, 3)]
    assert accepted(content, parties, [offset for offset in around if offset < len(content)]) == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_altered_byte_is_refused(content, parties):
    assert accepted(content, parties, range(len(content))) == []


@each("gone", range(4))
def test_a_chain_that_lacks_a_line_is_refused(content, parties, gone):
    lines = content.splitlines(keepends=True)
    refused_by_both(b"".join(lines[:gone] + lines[gone + 1 :]), parties)


def test_a_chain_without_its_end_is_a_beginning_and_says_so(content, parties):
    lines = content.splitlines(keepends=True)
    for count in range(1, 5):
        _, visits, completion = read_chain(b"".join(lines[:count]), parties.line)
        assert (len(visits), completion) == (count - 1, None)


def test_a_cut_chain_is_refused_everywhere_else(content, parties):
    ends = set(itertools.accumulate(map(len, content.splitlines(keepends=True))))
    for length in [*range(0, len(content), 997), *(end - 1 for end in ends), *(end + 1 for end in ends)]:
        if length not in ends and length < len(content):
            refused_by_both(content[:length], parties)


def test_every_other_order_of_receipts_is_refused(content, parties):
    plan, *receipts, end = content.splitlines(keepends=True)
    for order in itertools.permutations(receipts):
        if list(order) != receipts:
            refused_by_both(b"".join([plan, *order, end]), parties)
    refused_by_both(b"".join([plan, receipts[0], *receipts, end]), parties)


def test_receipts_of_another_tour_or_another_owner_are_refused(content, parties):
    other = Parties()
    foreign = other.chain().to_bytes().splitlines(keepends=True)
    lines = content.splitlines(keepends=True)
    for place in range(5):
        refused_by_both(b"".join([*lines[:place], foreign[place], *lines[place + 1 :]]), parties)
    with pytest.raises(RefusedError):
        read_chain(content, other.line)


@each(
    "changed",
    [
        {"code": "0" * 64},
        {"after": tour.ModelVersion(3, "0" * 64)},
        {"after": None},
        {"files": ("9" * 32,)},
        {"ended": NOON + timedelta(minutes=10)},
        {"granted": timedelta(seconds=59)},
    ],
)
def test_a_visit_that_did_not_keep_to_its_plan_is_refused_though_it_is_signed(parties, changed):
    chain = tour.Chain(parties.plan)
    refused_by_both(parties.plan.envelope + parties.visit(chain, **changed), parties)


def test_no_receipt_ends_before_it_began(parties):
    with pytest.raises(FormatError, match="'ended'"):
        parties.visit(tour.Chain(parties.plan), started=NOON + timedelta(minutes=2))


def test_a_delegation_of_another_plan_and_a_consent_to_another_delegation_are_refused(parties):
    chain = tour.Chain(parties.plan)
    for changed in ({"plan": "0" * 64}, {"consented": "0" * 64}):
        refused_by_both(parties.plan.envelope + parties.visit(chain, **changed), parties)


def test_nothing_follows_the_completion(content, parties):
    *_, end = content.splitlines(keepends=True)
    refused_by_both(content + end, parties)


def test_a_payload_in_another_form_is_refused_though_it_is_signed(parties):
    plan = parties.plan
    payload = base64.b64decode(json.loads(plan.envelope)["payload"])
    for other in (payload + b" ", payload.replace(b'"format":1', b'"format": 1'), payload.replace(b":1,", b":1.0,")):
        assert other != payload
        refused_by_both(sign(other, plan._type(), parties.owner), parties)


def test_the_consent_of_another_holder_is_refused(parties):
    parties = Parties()
    first, second = parties.holders.values()
    parties.holders = {"clinic": second, "lab": first}
    refused_by_both(parties.plan.envelope + parties.visit(tour.Chain(parties.plan)), parties)
