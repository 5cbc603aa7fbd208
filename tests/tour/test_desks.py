"""The desks of owner and holders: what they sign and store, whoever asks, and whoever else uses their database."""

import tracemalloc
from contextlib import contextmanager

import pytest
from helpers.signed import sign
from helpers.tour_rig import Rig

from fastrack import RollbackError, SignatureError, tour
from fastrack._util.gate import most_bytes
from fastrack.errors import FormatError
from fastrack.tour import _messages
from fastrack.tour._messages import pack, unpack

MANIFEST = "model.safetensors.manifest"


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


# What an owner signs at the end.


@pytest.mark.parametrize("manifest", ["of the first model", "of another owner", "none"])
def test_a_tour_that_was_finished_is_finished_again_with_its_own_manifest_alone(rig, tmp_path, manifest):
    chain = rig.whole()
    completed, _ = rig.finish(chain)
    assert rig.finish(chain)[0].completion == completed.completion
    (tmp_path / "other").mkdir()
    contents = {
        "of the first model": (tmp_path / "v0" / MANIFEST).read_bytes(),
        "of another owner": (Rig(tmp_path / "other").folder / "v0" / MANIFEST).read_bytes(),
        "none": b"",
    }
    with pytest.raises((SignatureError, ValueError)):
        rig.owner_desk.ask("finish", pack("finish", chain=chain.to_bytes(), manifest=contents[manifest]))


# Two processes on one database.


def second_owner(rig):
    """Open the owner's desk in another process."""
    ledger = tour.TourLedger(rig.folder / "owner.db")
    return tour.OwnerDesk(rig.plan, rig.key, terms=rig.owner_desk._terms, signer=rig.owner, ledger=ledger)


def meanwhile(monkeypatch, desk, act):
    """Do something after a desk has read its state, and before it stores what follows from it."""
    accept = desk._accept

    def accept_and_act(*arguments):
        state = accept(*arguments)
        monkeypatch.setattr(desk, "_accept", accept)
        act()
        return state

    monkeypatch.setattr(desk, "_accept", accept_and_act)


def test_a_tour_is_not_finished_with_a_visit_that_is_begun_again_meanwhile(rig, monkeypatch):
    chain = rig.whole()
    other = second_owner(rig)
    meanwhile(monkeypatch, rig.owner_desk, lambda: rig.visit(2, out=rig.folder / "again", owner_desk=other))
    with pytest.raises(RollbackError, match="meanwhile"):
        rig.finish(chain)
    assert [attempt.receipt for attempt in other._ledger.attempts(2)] == [None, None]


def test_a_visit_is_not_begun_again_after_its_tour_was_finished_meanwhile(rig, monkeypatch):
    chain = rig.whole()
    other = second_owner(rig)
    body = pack("finish", chain=chain.to_bytes(), manifest=(rig.folder / "v3" / MANIFEST).read_bytes())
    meanwhile(monkeypatch, rig.owner_desk, lambda: other.ask("finish", body))
    with pytest.raises(RollbackError, match="meanwhile"):
        rig.visit(2, out=rig.folder / "again")
    completion = unpack("finished", other.ask("finish", body))["completion"]
    chain.extend(completion).require_complete()


# What anyone may send.


@pytest.mark.parametrize("step", ["begin", "end"])
@pytest.mark.parametrize("count", [1_000_000, 150_000])  # of which the second is no longer than a receipt
def test_a_message_of_many_small_values_is_not_taken_apart(rig, step, count):
    values = b"[" + b",".join(count * [b"[]"]) + b"]"
    receipt = sign(b'{"consent":%s}' % values, "receipt", rig.owner)
    body = receipt if step == "end" else b'{"chain":%s,"kind":"fastrack/tour-begin"}\n' % values
    desk = rig.desks["ada"]
    with traced() as peak:
        with pytest.raises(FormatError):
            desk.ask(step, body)
        assert peak() < (len(body) if count == 1_000_000 else 5 * len(body))


@contextmanager
def traced():
    """Yield a function that returns the most memory that Python has taken since then."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_chain_of_many_lines_is_refused_before_it_is_split(rig):
    chain = rig.plan.envelope + b"a\n" * 100_000
    with traced() as peak:
        with pytest.raises(FormatError):
            tour.Chain.from_bytes(chain, owner=rig.owner.verifier)
        assert peak() < len(chain)


@pytest.mark.slow
def test_a_chain_of_the_size_that_is_promised_fits_into_messages():
    """Of 480 visits of 1,000 files, with the largest manifest and offer beside it."""
    limits = [most_bytes(_messages._KINDS.get(name, "document of a tour")) for name in _messages.PARTS["begin"]]
    assert limits[0] == 64 << 20
    in_base64 = sum(4 * -(-limit // 3) for limit in limits)
    assert in_base64 + 1000 < _messages.LIMIT
    chain = bytes(33 << 20)
    assert unpack("finish", pack("finish", chain=chain, manifest=b"a"))["chain"] == chain
