"""Desks compare whole histories, hold what they promised in their file, and make answers before anything counts."""

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import pytest
from helpers.tour_rig import Between, Rig, delegate_with

import fastrack
from fastrack import DeviceError, GrantError, RollbackError, UnknownKeyError, tour
from fastrack._documents.fields import binary, list_of
from fastrack.grants import Grants
from fastrack.tour import _folder, _messages, _visit
from fastrack.tour._folder import verify_files
from fastrack.tour._holder import HolderDesk
from fastrack.tour._messages import pack, unpack
from fastrack.tour._owner import OwnerDesk

MADE_UP = "a" * 64


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path, ("ada", "ben", "ada"))


def attempts(rig, visit):
    """Return how many attempts the owner's desk has counted, and how many consents the holder's has given."""
    return len(rig.owner_desk._ledger.attempts(visit)), len(rig.desks[rig.plan.order[visit]]._ledger.attempts(visit))


# The whole history.


def lie_about_history(monkeypatch, change):
    """Have a machine sign another history of the next model than that of the versions before."""
    sign = _visit.sign_manifest

    def sign_another(files, signer, lineage, history, version):
        return sign(files, signer, lineage, change(history), version)

    monkeypatch.setattr(_visit, "sign_manifest", sign_another)


def made_up_end(history):
    return (*history[:-1], MADE_UP)


def test_an_owner_signs_no_history_that_a_visit_made_up(rig, monkeypatch):
    rig.visit(0)
    rig.visit(1)
    lie_about_history(monkeypatch, made_up_end)
    chain = rig.visit(2)
    with pytest.raises(RollbackError, match="history"):
        rig.finish(chain)
    assert rig.owner_desk._ledger.latest().receipt is None


def test_no_visit_and_no_carrier_goes_on_from_a_history_that_a_visit_made_up(rig, monkeypatch):
    rig.visit(0)
    lie_about_history(monkeypatch, made_up_end)
    rig.visit(1)
    monkeypatch.undo()
    with pytest.raises(RollbackError, match="history"):
        rig.visit(2)
    assert attempts(rig, 2) == (0, 0)
    files = {name: (rig.folder / "v2" / name).read_bytes() for name in _folder.FILES}
    with pytest.raises(RollbackError, match="history"):
        verify_files(files, rig.owner.verifier)


def test_versions_before_the_tour_are_those_of_its_first_model(tmp_path, monkeypatch):
    rig = Rig(tmp_path, ("ada", "ben"), versions=3)
    lie_about_history(monkeypatch, made_up_end)
    rig.visit(0)
    with pytest.raises(RollbackError, match="the versions before the tour"):
        rig.visit(1)
    assert attempts(rig, 1) == (0, 0)
    assert rig.owner_desk._ledger.latest().receipt is None


def test_a_history_longer_than_a_manifest_has_is_compared_as_far_as_it_goes(tmp_path, limited):
    limited(history=2)
    rig = Rig(tmp_path, ("ada",), versions=3)
    chain, manifest = rig.finish(rig.visit(0))
    chain.require_complete()
    (rig.folder / "final").write_bytes(manifest)
    final = fastrack.load_manifest(rig.folder / "final", owner=rig.owner.verifier)
    assert (final.version, final.history[0]) == (4, rig.plan.start.digest)


def test_a_first_model_that_is_not_the_plans_begins_no_tour(rig):
    other = Rig(make(rig.folder / "other"), owner=rig.owner, key=rig.key)
    manifest = (other.folder / "v0" / "model.safetensors.manifest").read_bytes()
    asked = Between(rig.owner_desk, asked=lambda body: pack("begin", **{**unpack("begin", body), "manifest": manifest}))
    with pytest.raises(RollbackError, match="expected the model of the last receipt"):
        rig.visit(0, owner_desk=asked)
    assert attempts(rig, 0) == (0, 0)


def make(folder):
    folder.mkdir()
    return folder


# What a file has by itself.


def test_a_copy_of_a_desks_file_has_all_that_it_promised(rig):
    def copies():
        for name in ("owner", "ada"):
            shutil.copyfile(rig.folder / f"{name}.db", rig.folder / f"{name}-copy.db")
            with closing(tour.TourLedger(rig.folder / f"{name}-copy.db")) as ledger:
                yield ledger.latest(), ledger._find_completion()

    consented = []
    asked = Between(rig.desks["ada"], answered=lambda _: consented.extend(copies()))
    rig.visit(0, holder_desk=asked)
    assert [latest.attempt for latest, _ in consented] == [1, 1]
    assert next(latest for latest, _ in list(copies())[1:]).receipt is not None
    rig.visit(1)
    rig.finish(rig.visit(2))
    assert next(iter(copies()))[1] is not None


# Delegations and grants end with the plan.


def longer(rig, delegation):
    return replace(delegation, expires=rig.plan.expires + timedelta(days=1)).sign(rig.owner)


def test_a_holder_refuses_a_delegation_beyond_the_plan(rig):
    def lengthen(body):
        parts = dict(unpack("begin", body))
        parts["delegation"] = longer(
            rig, tour.Delegation.from_bytes(parts["delegation"], signer=rig.owner.verifier)
        ).envelope
        return pack("begin", **parts)

    with pytest.raises(RollbackError, match="when its plan ends"):
        rig.visit(0, holder_desk=Between(rig.desks["ada"], asked=lengthen))
    assert attempts(rig, 0) == (1, 0)


def test_a_visitor_shows_no_holder_a_delegation_beyond_the_plan(rig, monkeypatch):
    delegate_with(monkeypatch, expires=rig.plan.expires + timedelta(seconds=1))
    with pytest.raises(RollbackError, match="when its plan ends"):
        rig.visit(0)
    assert attempts(rig, 0) == (1, 0)


def test_what_is_granted_ends_with_the_plan(rig):
    rig.moment = rig.plan.expires - timedelta(seconds=30)
    ends, owners = [], [rig.owner.verifier, rig.signers["ada"].verifier]
    desks = {
        "owner_desk": Between(
            rig.owner_desk, answered=lambda answer: ends.extend(ends_of("delegated", answer, owners))
        ),
        "holder_desk": Between(
            rig.desks["ada"], answered=lambda answer: ends.extend(ends_of("consented", answer, owners))
        ),
    }
    rig.visit(0, **desks)
    assert len(ends) == 3
    assert max(ends) <= rig.plan.expires


def ends_of(kind, answer, owners):
    envelopes = _messages.read_grants(unpack(kind, answer)["grants"])
    return [Grants.from_bytes(envelope, owner=owners).expires for envelope in envelopes]


# An answer is made before it is counted.


def test_the_wrong_key_of_the_owner_uses_up_nothing(rig):
    good = rig.key
    for visit in (0, 1):
        rig.key = fastrack.Key.generate()
        rig.open_desks()
        with pytest.raises(UnknownKeyError):
            rig.visit(visit)
        assert attempts(rig, visit) == (0, 0)
        rig.key = good
        rig.open_desks()
        rig.visit(visit)


def test_the_wrong_key_of_the_model_uses_up_no_consent(rig, monkeypatch):
    monkeypatch.setattr(OwnerDesk, "_require_key", lambda *_: None, raising=False)
    rig.key = fastrack.Key.generate()
    rig.open_desks()
    with pytest.raises(GrantError, match="expected key"):
        rig.visit(0)
    assert attempts(rig, 0) == (1, 0)


@pytest.mark.parametrize("desk", ["owner", "holder"])
def test_an_answer_that_cannot_be_made_uses_up_nothing(rig, monkeypatch, desk):
    def fail(*_, **__):
        raise ValueError("no grant today")

    monkeypatch.setattr(OwnerDesk if desk == "owner" else HolderDesk, "_wrap", fail)
    with pytest.raises(ValueError, match="no grant today"):
        rig.visit(0)
    assert attempts(rig, 0) == ((0, 0) if desk == "owner" else (1, 0))


def ids(count):
    return [f"{number:032x}" for number in range(count)]


def open_holder(rig, keys, files):
    with closing(tour.TourLedger(rig.folder / "another.db")) as ledger:
        terms, signer = rig.desks["ada"]._terms, rig.signers["ada"]
        return HolderDesk(rig.plan, keys, files=files, terms=terms, signer=signer, ledger=ledger)


def is_bound(rig):
    with closing(sqlite3.connect(rig.folder / "another.db")) as database:
        return database.execute("SELECT count(*) FROM plan").fetchone() == (1,)


def test_a_desk_of_more_files_than_a_grant_may_name_is_not_opened(rig):
    keys = [rig.data_keys["ada"]]
    for count in (1870, 4096, 4097):
        with pytest.raises(ValueError, match="Seal fewer and larger files"):
            open_holder(rig, keys, ids(count))
        assert not is_bound(rig)  # it may become the database of another tour
    open_holder(rig, keys, ids(1000))
    assert is_bound(rig)


def test_a_desk_of_more_keys_than_an_answer_may_have_is_not_opened(rig, limited):
    limited(tour_grants=list_of(binary(4 << 20), 2))
    open_holder(rig, [fastrack.Key.generate() for _ in range(2)], ids(1))
    with pytest.raises(ValueError, match="Seal fewer and larger files"):
        open_holder(rig, [fastrack.Key.generate() for _ in range(3)], ids(1))


@pytest.mark.parametrize("problem", ["a missing file", "another device", "too many files"])
def test_what_a_visitor_can_know_to_fail_uses_up_no_attempt(rig, limited, problem):
    limited(tour_files=2)
    data = {"a missing file": [rig.folder / "absent"], "too many files": 3 * [rig.data("ada")]}
    options = {"device": "abacus"} if problem == "another device" else {}
    with pytest.raises((FileNotFoundError, DeviceError, GrantError)):
        rig.visit(0, data=data.get(problem), **options)
    assert attempts(rig, 0) == (0, 0)
    assert not (rig.folder / "v1").exists()
