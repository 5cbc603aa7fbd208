"""A tour of three visits: rotation, order, roll-back, and the folder that is whole or absent."""

import shutil
import sys
from datetime import timedelta

import pytest
import torch
from helpers.tour_rig import NAMES, Between, Rig, delegate_with, machine

import fastrack
from fastrack import AuthenticationError, GrantError, RollbackError, tour
from fastrack._util.locations import locate
from fastrack.attest import AttestationError
from fastrack.errors import FormatError
from fastrack.tour import _visit
from fastrack.tour._messages import pack, read_grants, unpack

MODEL = "model.safetensors"


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


def test_three_visits_train_what_training_in_one_place_does(rig):
    chain = rig.whole()
    assert [visit.holder for visit in chain.visits] == list(NAMES)
    state = fastrack.load_checkpoint(rig.folder / "v3" / MODEL, keys=fresh_key(rig, chain))
    assert torch.equal(state["model"]["total"], rig.total())
    assert state["optimizer"] == {"steps": 3}


def fresh_key(rig, chain):
    """Return the key of the last model."""
    return tour.model_key(chain, rig.key)


def test_receipts_say_what_was_opened_and_scrubbed(rig):
    visit = rig.visit(0).visits[0]
    with fastrack.load_file(rig.data("ada")) as file:
        assert visit.receipt.files == visit.consent.files == (file.file_id,)
    assert (visit.receipt.chunks, visit.receipt.scrubbed) == (1, 64)
    assert (visit.delegation.before.number, visit.after.number) == (1, 2)
    [(consent, receipt)] = rig.desks["ada"].receipts()
    assert (consent, receipt) == (visit.consent, visit.receipt)


def test_the_key_is_another_at_each_version_and_opens_that_version_alone(rig):
    chain = rig.whole()
    ids = []
    for number in range(4):
        with fastrack.load_file(rig.folder / f"v{number}" / MODEL) as file:
            ids.append(file.key_id)
    assert len(set(ids)) == 4
    assert ids[1:] == [visit.delegation.key for visit in chain.visits]
    with pytest.raises(fastrack.UnknownKeyError):
        fastrack.load_checkpoint(rig.folder / "v3" / MODEL, keys=rig.key)


def test_the_finished_model_is_accepted_by_an_anchor_of_its_owner(rig):
    chain, manifest = rig.finish(rig.whole())
    chain.require_complete()
    (rig.folder / "v3" / f"{MODEL}.manifest").write_bytes(manifest)
    fastrack.Anchor.create(rig.folder / "anchor", owner=rig.owner.verifier, lineage=rig.plan.lineage)
    key = tour.model_key(chain, rig.key)
    state = fastrack.load_checkpoint(rig.folder / "v3" / MODEL, keys=key, anchor=rig.folder / "anchor")
    assert torch.equal(state["model"]["total"], rig.total())


def test_a_finished_tour_is_not_finished_again(rig):
    chain, manifest = rig.finish(rig.whole())
    (rig.folder / "v3" / f"{MODEL}.manifest").write_bytes(manifest)
    (rig.folder / "v3/tour.chain").write_bytes(chain.to_bytes())
    with pytest.raises(RollbackError, match=r"expected the folder of the last visit, got .*v3, which is finished"):
        tour.finish(rig.folder / "v3", rig.folder / "again", owner=rig.owner.verifier, owner_desk=None)


def test_a_tour_is_not_finished_before_its_last_visit(rig):
    with pytest.raises(RollbackError, match="expected 3 receipts, got 1"):
        rig.finish(rig.visit(0), number=1)


# Another model than that of the receipt before.


def folder_with(rig, name, model, chain):
    """Make a folder of the model of one folder and the chain of another."""
    folder = rig.folder / name
    folder.mkdir()
    for file in (MODEL, f"{MODEL}.manifest"):
        shutil.copy(rig.folder / model / file, folder / file)
    shutil.copy(rig.folder / chain / "tour.chain", folder / "tour.chain")
    return folder


@pytest.mark.parametrize(("model", "chain"), [("v0", "v2"), ("v1", "v2"), ("v2", "v1")])
def test_a_model_that_is_not_that_of_the_last_receipt_is_refused(rig, model, chain):
    rig.visit(0)
    rig.visit(1)
    folder = folder_with(rig, "mixed", model, chain)
    with pytest.raises((RollbackError, fastrack.SignatureError)):
        rig.visit(int(chain[1]), folder=folder, out=rig.folder / "out")
    assert not (rig.folder / "out").exists()


def test_an_older_folder_is_refused_after_a_later_one_was_begun(rig):
    rig.visit(0)
    rig.visit(1)
    rig.visit(2)
    for number in (0, 1):
        with pytest.raises(RollbackError, match="an older or a forked one"):
            rig.visit(number, out=rig.folder / "out")


def test_a_later_model_than_that_of_its_last_visit_needs_its_receipts_too(tmp_path):
    rig = Rig(tmp_path, order=("ada", "ben", "ada"))
    rig.visit(0)
    rig.visit(1)
    chain = tour.Chain.load(rig.folder / "v2" / "tour.chain", owner=rig.owner.verifier)
    lines = chain.to_bytes().splitlines(keepends=True)
    (rig.folder / "v2" / "tour.chain").write_bytes(b"".join([lines[0], lines[2]]))
    with pytest.raises(RollbackError, match="line 2, after 0 receipts"):
        rig.visit(2)


def test_another_holder_than_the_one_whose_turn_it_is_refuses(rig):
    with pytest.raises(RollbackError, match="expected a turn of ben, got that of ada"):
        rig.visit(0, holder="ben")


def test_other_code_than_the_plans_is_refused_before_it_is_imported_or_anyone_is_asked(rig, monkeypatch):
    (rig.folder / "others.py").write_text("def train(state, shards):\n    return state\n")
    monkeypatch.syspath_prepend(rig.folder)
    with pytest.raises(RollbackError, match="the plan's training code"):
        rig.visit(0, train="others:train")
    assert "others" not in sys.modules
    assert rig.owner_desk._ledger.latest() is None


# Broken-off visits.


def test_a_visit_that_fails_leaves_no_folder_and_no_plaintext_and_can_be_begun_again(tmp_path):
    kept = []

    def broken(_, shards):
        kept.append(next(shards)["x"])
        assert kept[-1].abs().sum() > 0
        raise RuntimeError("out of memory")

    rig = Rig(tmp_path, train=broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        rig.visit(0)
    assert not (tmp_path / "v1").exists()
    assert kept[0].abs().sum() == 0
    [(_, receipt)] = rig.desks["ada"].receipts()
    assert (receipt.after, receipt.chunks, receipt.scrubbed) == (None, 1, 64)
    with pytest.raises(RuntimeError):
        rig.visit(0)
    assert len(rig.desks["ada"].receipts()) == 2


def test_a_plan_says_how_often_a_visit_may_be_begun(tmp_path):
    rig = Rig(tmp_path, attempts=2)
    for number in range(2):
        rig.visit(0, out=tmp_path / f"attempt-{number}")
    with pytest.raises(RollbackError, match="at most 2 attempts"):
        rig.visit(0, out=tmp_path / "attempt-2")


def test_a_later_attempt_makes_the_one_before_void(rig):
    rig.visit(0, out=rig.folder / "first")
    rig.visit(0)
    with pytest.raises(RollbackError, match="A later one made it void"):
        rig.visit(1, folder=rig.folder / "first")
    assert rig.visit(1).visits[0].delegation.attempt == 2


def test_a_second_chain_is_refused_by_a_holder_who_saw_the_first(rig):
    rig.visit(0)
    rig.visit(1)
    # The owner and ada forget what they gave, or lead two chains by one plan.
    rig.open_desks(databases={"owner": "owner-2.db", "ada": "ada-2.db"})
    rig.visit(0, out=rig.folder / "other")
    with pytest.raises(RollbackError, match="granted before"):
        rig.visit(1, folder=rig.folder / "other", out=rig.folder / "out")
    with pytest.raises(RollbackError, match="The owner leads two chains"):
        rig.visit(1, folder=rig.folder / "other", out=rig.folder / "out")


def test_an_owner_who_restarts_goes_on_where_the_tour_was(rig):
    for number in range(3):
        rig.open_desks()
        chain = rig.visit(number)
    rig.open_desks()
    rig.finish(chain)[0].require_complete()


def test_a_receipt_that_its_holder_did_not_get_comes_with_the_chain(tmp_path):
    rig = Rig(tmp_path, order=("ada", "ben", "ada"))

    class Deaf:
        def ask(self, step, body=b""):
            if step == "end":
                raise ConnectionError("the line is dead")
            return rig.desks["ada"].ask(step, body)

    rig.visit(0, holder_desk=Deaf())
    assert rig.desks["ada"].receipts()[0][1] is None
    rig.visit(1)
    chain = rig.visit(2)
    assert [receipt for _, receipt in rig.desks["ada"].receipts()] == [chain.visits[n].receipt for n in (0, 2)]


# Limits.


def test_a_visit_that_takes_too_long_makes_no_receipt(tmp_path):
    def slow(state, _):
        rig.moment += timedelta(minutes=11)
        return state

    rig = Rig(tmp_path, train=slow)
    with pytest.raises(AuthenticationError, match="expected an end by"):
        rig.visit(0)
    assert not (tmp_path / "v1").exists()


def test_a_holder_grants_no_longer_than_the_plan_says_even_if_the_owner_does(rig, monkeypatch):
    delegate_with(monkeypatch, expires=rig.plan.expires)
    visit = rig.visit(0).visits[0]
    assert visit.delegation.expires == rig.plan.expires
    assert visit.consent.expires - visit.consent.issued <= timedelta(minutes=10)


def test_no_visit_begins_after_the_plan(rig):
    rig.moment += timedelta(hours=1)
    with pytest.raises(RollbackError, match="The plan is over"):
        rig.visit(0)


def test_clocks_that_differ_are_told_of(rig):
    rig.moment -= timedelta(hours=1)
    with pytest.raises(RollbackError, match="Set the clocks"):
        rig.visit(0)


def test_a_tour_is_finished_after_its_plan_but_not_before_its_last_visit(rig):
    chain = rig.visit(0)
    rig.moment += timedelta(hours=1)
    with pytest.raises(RollbackError, match="expected 3 receipts, got 1"):
        rig.finish(chain, number=1)
    early = rig.finish_by_hand(chain)
    with pytest.raises(RollbackError, match="expected the completion after 3 visits"):
        chain.extend(early.envelope)


def test_the_key_of_a_model_needs_the_chain_and_the_owners_key_alone(rig):
    chain = rig.visit(0)
    state = fastrack.load_checkpoint(rig.folder / "v1" / MODEL, keys=tour.model_key(chain, rig.key))
    assert torch.equal(state["model"]["total"], rig.total(["ada"]))
    with pytest.raises(fastrack.UnknownKeyError, match="Give the key of the owner"):
        tour.model_key(chain, fastrack.Key.generate())


def test_files_that_were_not_granted_are_not_opened(rig):
    with pytest.raises(GrantError, match="expected a file that the holder granted"):
        rig.visit(0, data=[rig.data("ada"), rig.data("ben")])


def test_a_machine_that_proves_something_else_gets_no_key(rig):
    def other(binding):
        return machine()(type(binding)(binding.challenge, fastrack.grants.Identity.generate().recipient))

    with pytest.raises(AttestationError, match="report data"):
        rig.visit(0, collect=other)
    assert rig.desks["ada"].receipts() == ()


def test_shards_end_with_their_visit(tmp_path):
    kept = []

    def keep(state, shards):
        kept.append(shards)
        return state

    Rig(tmp_path, train=keep).visit(0)
    assert list(kept[0]) == []


def test_a_buffer_that_is_too_small_is_refused(rig):
    with pytest.raises(ValueError, match="expected at most 63 bytes for the buffer, got 64"):
        rig.visit(0, buffer_size=63)


def test_desks_refuse_steps_databases_and_plans_of_others(rig, tmp_path):
    with pytest.raises(FormatError, match="expected a step of challenge, begin, end"):
        rig.desks["ada"].ask("finish")
    with pytest.raises(RollbackError, match="got that of the holder"):
        tour.OwnerDesk(
            rig.plan,
            rig.key,
            terms=rig.owner_desk._terms,
            signer=rig.owner,
            ledger=tour.TourLedger(tmp_path / "ada.db"),
        )
    with pytest.raises(RollbackError, match=r"holder ben .* got that of the holder ada"):
        rig.open_desks(databases={"ben": "ada.db"})
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(fastrack.SignatureError):
        Rig(other).visit(0, folder=tmp_path / "v0")


def test_the_keys_of_a_visit_are_wiped(rig, monkeypatch):
    wiped = []
    wipe = fastrack.Key.wipe
    monkeypatch.setattr(fastrack.Key, "wipe", lambda key: (wiped.append(key.id), wipe(key))[1])
    chain = rig.visit(0)
    assert {rig.key.id, rig.data_keys["ada"].id, chain.visits[0].delegation.key} <= set(wiped)


def test_the_keys_of_a_visit_that_ends_before_its_work_are_wiped(rig, monkeypatch):
    wiped = []
    wipe = fastrack.Key.wipe

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fastrack.Key, "wipe", lambda key: (wiped.append(key.id), wipe(key))[1])
    monkeypatch.setattr("fastrack.tour._visit._Work", fail)
    with pytest.raises(KeyboardInterrupt):
        rig.visit(0)
    assert {rig.key.id, rig.data_keys["ada"].id} <= set(wiped)


def test_a_grant_of_a_visit_opens_only_the_files_and_the_version_that_it_names(rig):
    seen = {}

    class Spy:
        def __init__(self, name, desk):
            self.name, self.desk = name, desk

        def ask(self, step, body=b""):
            answer = self.desk.ask(step, body)
            seen[self.name, step] = answer
            return answer

    rig.visit(0, owner_desk=Spy("owner", rig.owner_desk), holder_desk=Spy("ada", rig.desks["ada"]))
    model, fresh = read_grants(unpack("delegated", seen["owner", "begin"])["grants"])
    [data] = read_grants(unpack("consented", seen["ada", "begin"])["grants"])
    opened = fastrack.grants.Grants.from_bytes(model, owner=rig.owner.verifier)
    assert (opened.lineage, opened.least_version) == (rig.plan.lineage, 1)
    assert opened.expires == rig.moment.replace(microsecond=0) + timedelta(minutes=10)
    assert fastrack.grants.Grants.from_bytes(fresh, owner=rig.owner.verifier).key_id != opened.key_id
    with fastrack.load_file(rig.data("ada")) as file:
        granted = fastrack.grants.Grants.from_bytes(data, owner=rig.signers["ada"].verifier)
        assert granted.files == (file.file_id,)


# A model that is not there is missed before its receipt is accepted.


def cut(rig, number):
    path = rig.folder / f"v{number}" / MODEL
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    return path, content


def test_a_damaged_model_is_found_before_the_owner_accepts_its_receipt(rig):
    rig.visit(0)
    path, content = cut(rig, 1)
    with pytest.raises((FormatError, AuthenticationError)):
        rig.visit(1)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(AuthenticationError):
        rig.visit(1)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        rig.visit(1)
    assert rig.desks["ben"].receipts() == ()
    rig.visit(0, out=rig.folder / "again")  # the owner goes back to the model before
    assert rig.visit(1, folder=rig.folder / "again").visits[0].delegation.attempt == 2


def test_a_damaged_model_is_found_before_the_owner_ends_the_tour(rig):
    rig.whole()
    path, content = cut(rig, 3)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    given = {"owner": rig.owner.verifier, "owner_desk": rig.owner_desk}
    with pytest.raises(AuthenticationError):
        tour.finish(rig.folder / "v3", rig.folder / "final", **given)
    assert not (rig.folder / "final").exists()
    rig.visit(2, out=rig.folder / "again")
    tour.finish(rig.folder / "again", rig.folder / "final", **given).require_complete()


def test_no_file_is_opened_after_the_end_of_a_visit(tmp_path):
    def slow(_, shards):
        next(shards)
        rig.moment += timedelta(minutes=11)
        next(shards)

    rig = Rig(tmp_path, order=("ada",), train=slow)
    with pytest.raises(GrantError, match="expected to open it by"):
        rig.visit(0, data=2 * [rig.data("ada")])


def test_a_delegation_of_another_visitor_is_refused_by_the_holder(rig):
    stolen = []

    def away(_):
        raise ConnectionError("the line is dead")

    owner = Between(rig.owner_desk, answered=lambda answer: stolen.append(unpack("delegated", answer)["delegation"]))
    with pytest.raises(ConnectionError):
        rig.visit(0, owner_desk=owner, holder_desk=Between(rig.desks["ada"], asked=away))
    exchange = Between(
        rig.desks["ada"], asked=lambda body: pack("begin", **{**unpack("begin", body), "delegation": stolen[0]})
    )
    with pytest.raises(GrantError, match="expected a delegation to the visitor's key"):
        rig.visit(0, holder_desk=exchange)
    assert rig.desks["ada"].receipts() == ()


def test_a_delegation_that_has_expired_is_refused_by_the_holder(tmp_path):
    rig = Rig(tmp_path, minutes=1)

    def late(body):
        rig.moment += timedelta(minutes=2)
        return body

    with pytest.raises(GrantError, match="expected a delegation in force"):
        rig.visit(0, holder_desk=Between(rig.desks["ada"], asked=late))
    assert rig.desks["ada"].receipts() == ()


def test_an_error_names_a_url_without_its_query_which_may_be_signed(rig, monkeypatch):
    def load_from_server(path):
        file = fastrack.load_file(path)
        file.path = locate("https://store.example/ben.safetensors?X-Amz-Signature=c0ffee")
        return file

    monkeypatch.setattr(_visit, "load_file", load_from_server)
    with pytest.raises(GrantError, match="expected a file that the holder granted") as raised:
        rig.visit(0, data=[rig.data("ben")])
    assert "store.example" in str(raised.value)
    assert "c0ffee" not in str(raised.value)
