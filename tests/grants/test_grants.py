import base64
import contextlib
import copy
import json
import pickle
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import safetensors.numpy
from helpers.by_hand.grants import read_grants, unwrap
from helpers.cases import each
from helpers.signed import GRANTS, sign
from hypothesis import given
from hypothesis import strategies as st

import fastrack
from fastrack import Key, KeyRing
from fastrack._devices import confidential
from fastrack._keys.grants import _info
from fastrack.errors import ClosedError, DeviceError, FormatError, GrantError, SignatureError, UnknownKeyError
from fastrack.grants import Grants, Identity, Recipient, Signer
from fastrack.providers import VaultTransit

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)
OWNER = Signer.generate(name="owner")
ALICE, BOB, CAROL = (Identity.generate(name=name) for name in ("alice", "bob", "carol"))
KEY = Key.generate()
ISSUED = Grants.issue(KEY, [ALICE.recipient, BOB.recipient], signer=OWNER)


@pytest.fixture
def sealed(tmp_path):
    path = tmp_path / "data.safetensors"
    fastrack.save_file({"x": np.arange(10)}, path, KEY)
    with fastrack.load_file(path) as file:
        yield file


def payload_of(grants):
    return json.loads(base64.b64decode(json.loads(grants.envelope)["payload"]))


def forged(change, signer=OWNER):
    """Return grants that a signer signed after a change of their content."""
    payload = payload_of(ISSUED)
    change(payload)
    text = json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()
    return sign(text, GRANTS, signer)


# What grants are for


@each("bits", [128, 256])
@each("algorithm", ["MLKEM768_X25519", "P-384"])
@each("signing", ["Ed25519", "ML-DSA-65"])
def test_a_recipient_opens_and_others_do_not(tmp_path, bits, algorithm, signing):
    owner, alice, eve = Signer.generate(signing), Identity.generate(algorithm), Identity.generate(algorithm)
    key = Key.generate(bits)
    Grants.issue(key, [alice.recipient], signer=owner).save(tmp_path / "a.grants")
    grants = Grants.load(tmp_path / "a.grants", owner=owner.verifier)
    sealed = fastrack.seal(np.arange(5), key)
    assert np.array_equal(fastrack.unseal(sealed, grants.unlock(alice), framework="numpy"), np.arange(5))
    with pytest.raises(GrantError, match=f"was not granted to .*{eve.recipient.id}"):
        grants.unlock(eve)


@pytest.mark.slow
def test_ten_recipients_one_removed_one_added_and_a_passphrase_leave_the_data_as_it_was(sealed):
    before = sealed.path.read_bytes()
    people = [Identity.generate(name=f"person {number}") for number in range(10)]
    grants = Grants.issue(KEY, [one.recipient for one in people], signer=OWNER)
    grants = grants.remove([people[3].recipient], signer=OWNER)
    grants = grants.add([CAROL.recipient], identity=people[0], signer=OWNER, passphrase="correct horse battery staple")
    for identity in (*people[:3], *people[4:], CAROL):
        fastrack.unseal(sealed["x"], grants.unlock(identity))
    fastrack.unseal(sealed["x"], grants.unlock(passphrase="correct horse battery staple"))
    with pytest.raises(GrantError, match="not granted"):
        grants.unlock(people[3])
    with pytest.raises(GrantError, match="expected its passphrase"):
        grants.unlock(passphrase="correct horse battery stable")
    assert len(grants.recipients) == 11
    assert grants.serial == 3
    assert sealed.path.read_bytes() == before


def test_a_sealer_who_forgets_the_key_cannot_open(tmp_path):
    key = Key.generate()
    fastrack.save_file({"x": np.arange(10)}, tmp_path / "data.safetensors", key)
    grants = Grants.issue(key, [ALICE.recipient], signer=OWNER)
    key.wipe()
    with fastrack.load_file(tmp_path / "data.safetensors") as file:
        for attempt in (key, KeyRing(), Key.generate()):
            with pytest.raises((ClosedError, UnknownKeyError)):
                fastrack.unseal(file["x"], attempt)
        fastrack.unseal(file["x"], grants.unlock(ALICE))
    with pytest.raises(ValueError, match="pass key= or identity="):
        grants.add([CAROL.recipient], signer=OWNER)


def test_a_grant_holds_for_its_files_only(sealed, tmp_path):
    other = tmp_path / "other.safetensors"
    fastrack.save_file({"x": np.arange(10)}, other, KEY)
    ring = Grants.issue(KEY, [ALICE.recipient], signer=OWNER, files=[sealed.file_id]).unlock(ALICE)
    fastrack.unseal(sealed["x"], ring)
    uses = [
        lambda file: fastrack.unseal(file["x"], ring),
        lambda file: fastrack.to_device(file["x"], keys=ring),
        lambda file: fastrack.to_device(file["x"][2:4], keys=ring),
        lambda file: list(fastrack.wrap([file["x"]], keys=ring)),
        lambda file: fastrack.verify_file(file.path, keys=ring),
        lambda file: fastrack.verify_file(file.path, keys=[ring, {}.get]),
    ]
    with fastrack.load_file(other) as file:
        for use in uses:
            with pytest.raises(GrantError, match=r"other\.safetensors: tensor 'x' .* granted for other files only"):
                use(file)
        fastrack.unseal(file["x"], KEY)  # the owner's own key is not restricted


def test_a_restricted_key_does_not_lose_its_restriction(sealed, tmp_path):
    ring = Grants.issue(KEY, [ALICE.recipient], signer=OWNER, files=["ab" * 16]).unlock(ALICE)
    with pytest.raises(GrantError, match="restricted to some"):
        ring.first.save(tmp_path / "alice.key")
    assert not (tmp_path / "alice.key").exists()
    for files in (None, [sealed.file_id], ["ab" * 16, sealed.file_id]):
        with pytest.raises(GrantError, match="expected files= among those"):
            Grants.issue(ring.first, [BOB.recipient], signer=OWNER, files=files)
    passed = Grants.issue(ring.first, [BOB.recipient], signer=OWNER, files=["ab" * 16]).unlock(BOB)
    assert passed.first.files == {"ab" * 16}
    with pytest.raises(GrantError, match="restricted to some"):
        VaultTransit("owner").wrap(ring.first)


def test_a_key_of_a_set_does_not_lose_its_restriction(tmp_path):
    lineage = "cd" * 16
    options = {"lineage": lineage, "least_version": 7}
    ring = Grants.issue(KEY, [ALICE.recipient], signer=OWNER, **options).unlock(ALICE)
    with pytest.raises(GrantError, match="restricted to some"):
        ring.first.save(tmp_path / "alice.key")
    for other in ({}, {"lineage": lineage}, {"lineage": "ef" * 16, "least_version": 7}, options | {"least_version": 6}):
        with pytest.raises(GrantError, match="expected the lineage="):
            Grants.issue(ring.first, [BOB.recipient], signer=OWNER, **other)
    passed = Grants.issue(ring.first, [BOB.recipient], signer=OWNER, **options | {"least_version": 8}).unlock(BOB)
    assert (passed.first.lineage, passed.first.least_version) == (lineage, 8)


class TestConfidential:
    """Grants for confidential GPUs, or certain ones."""

    @pytest.fixture(autouse=True)
    def _anew(self, monkeypatch):
        monkeypatch.setattr(confidential, "_process", confidential._Process())

    @each("gpus", [None, ["41E23D711E1C4FBFAC"]])
    def test_the_key_asks_of_gpus_from_before_it_is_opened(self, gpus, monkeypatch):
        grants = Grants.issue(KEY, [ALICE.recipient], signer=OWNER, require="confidential", gpus=gpus)
        again = Grants.from_bytes(grants.envelope, owner=OWNER.verifier)
        assert (again, payload_of(again)["version"]) == (grants, 3)
        assert again.unlock(ALICE).first == KEY
        with pytest.raises(DeviceError, match=f"as key {KEY.id} requires"):
            confidential.check("cuda:0")
        monkeypatch.setattr(confidential, "_process", confidential._Process())
        confidential.check("cuda:0")  # is open: nothing asks anything of it yet
        monkeypatch.setattr(confidential, "_find_place", lambda _: "0000:1B:00.0")
        monkeypatch.setattr(Identity, "decrypt", lambda *_: pytest.fail("it was decrypted"))
        with pytest.raises(DeviceError, match=f"as key {KEY.id} requires"):
            again.unlock(ALICE)

    def test_the_key_does_not_lose_its_restriction(self, tmp_path):
        place = {"require": "confidential", "gpus": ["41E23D711E1C4FBFAC"]}
        key = Grants.issue(KEY, [ALICE.recipient], signer=OWNER, **place).unlock(ALICE).first
        with pytest.raises(GrantError, match="restricted to some"):
            key.save(tmp_path / "alice.key")
        with pytest.raises(GrantError, match="granted for confidential GPUs"):
            Grants.issue(key, [BOB.recipient], signer=OWNER, **place)
        assert np.array_equal(fastrack.unseal(fastrack.seal(np.ones(2), KEY), key, framework="numpy"), np.ones(2))

    @each(
        "change",
        [
            {"gpus": None},
            {"gpus": ["41E23D711E1C4FBFAD"]},
            {"require": None},
            {"require": "any"},
            {"gpus": ["x"]},
            {"version": 1},
            {"version": 2},
        ],
    )
    def test_it_is_bound_like_the_other_constraints(self, change):
        grants = Grants.issue(KEY, [ALICE.recipient], signer=OWNER, require="confidential", gpus=["41E23D711E1C4FBFAC"])
        text = json.dumps(payload_of(grants) | change, sort_keys=True, separators=(",", ":")).encode()
        with pytest.raises((GrantError, FormatError), match=r"does not authenticate|is not a grants file"):
            Grants.from_bytes(sign(text, GRANTS, OWNER), owner=OWNER.verifier).unlock(ALICE)

    def test_chips_without_the_mode_are_refused(self):
        for options in ({"gpus": []}, {"require": "yes"}):
            with pytest.raises(ValueError, match="expected require='confidential'"):
                Grants.issue(KEY, [ALICE.recipient], signer=OWNER, **options)


def test_a_tensor_that_was_copied_counts_for_the_file_it_is_in(sealed, tmp_path):
    fastrack.save_file({"x": sealed["x"], "y": np.arange(3)}, tmp_path / "copy.safetensors", KEY)
    with fastrack.load_file(tmp_path / "copy.safetensors") as copied:
        for file, works in ((copied, True), (sealed, False)):
            ring = Grants.issue(KEY, [ALICE.recipient], signer=OWNER, files=[file.file_id]).unlock(ALICE)
            if works:
                fastrack.unseal(copied["x"], ring)
            else:
                with pytest.raises(GrantError):
                    fastrack.unseal(copied["x"], ring)


def test_a_grant_ends():
    grants = Grants.issue(KEY, [ALICE.recipient], signer=OWNER, expires=NOW)
    assert grants.unlock(ALICE, now=NOW - timedelta(seconds=1)).first == KEY
    for late in (NOW, NOW + timedelta(days=1)):
        with pytest.raises(GrantError, match="expired at 2026-11-22T12:00:00Z"):
            grants.unlock(ALICE, now=late)
    past = Grants.issue(KEY, [ALICE.recipient], signer=OWNER, expires=datetime(2020, 1, 1, tzinfo=UTC))
    with pytest.raises(GrantError, match="expired"):
        past.unlock(ALICE)
    with pytest.raises(ValueError, match="time zone"):
        Grants.issue(KEY, [ALICE.recipient], signer=OWNER, expires=datetime(2030, 1, 1))  # noqa: DTZ001


def test_the_other_claims_are_kept(tmp_path):
    grants = Grants.issue(KEY, [ALICE.recipient], signer=OWNER, lineage="ab" * 16, least_version=7)
    grants.save(tmp_path / "a.grants")
    again = Grants.load(tmp_path / "a.grants", owner=[Signer.generate().verifier, OWNER.verifier])
    assert again == grants
    assert (again.lineage, again.least_version, again.key_id, again.bits) == ("ab" * 16, 7, KEY.id, 256)


def test_a_grant_for_a_set_opens_its_files_by_an_anchor_alone(tmp_path):
    path, anchor = tmp_path / "set" / "a.safetensors", tmp_path / "reader.anchor"
    path.parent.mkdir()
    fastrack.save_file({"x": np.arange(6).reshape(3, 2)}, path, KEY)
    first = fastrack.publish(path.parent, signer=OWNER)
    fastrack.publish(path.parent, signer=OWNER)
    fastrack.Anchor.create(anchor, owner=OWNER.verifier)
    for limits, opens in (
        ({"lineage": first.lineage}, True),
        ({"least_version": 2}, True),
        ({"lineage": first.lineage, "least_version": 2}, True),
        ({"lineage": "ff" * 16}, False),
        ({"least_version": 3}, False),
        ({"lineage": first.lineage, "least_version": 3}, False),
        ({"lineage": first.lineage, "files": ["00" * 16]}, False),
    ):
        ring = Grants.issue(KEY, [ALICE.recipient], signer=OWNER, **limits).unlock(ALICE)
        for anchored in (False, True):
            with fastrack.load_file(path, anchor=anchor if anchored else None) as file:
                for handle in (file["x"], file["x"][1:], file["x"][:, 1], pickle.loads(pickle.dumps(file["x"]))):
                    if opens and anchored:
                        assert fastrack.unseal(handle, ring).size
                        assert fastrack.to_device(handle, keys=ring, framework="numpy").size
                    else:
                        with pytest.raises(GrantError):
                            fastrack.unseal(handle, ring)
                        with pytest.raises(GrantError):
                            fastrack.to_device(handle, keys=ring, framework="numpy")
            data = fastrack.SealedDataset(path.parent, anchor=anchor if anchored else None)
            for is_pickled in (False, True):
                if is_pickled:
                    pickled = pickle.dumps(data)
                    del data  # which has open files that its pickles would find again
                    data = pickle.loads(pickled)
                if opens and anchored:
                    assert fastrack.unseal(data[:2]["x"], ring).size
                else:
                    with pytest.raises(GrantError):
                        fastrack.unseal(data[:2]["x"], ring)
        with pytest.raises(GrantError):
            fastrack.rekey_file(path, tmp_path / "other.safetensors", keys=ring, key=Key.generate())


def test_limits_of_several_grants_add_up():
    key, other = Key(b"k" * 32), Key(b"k" * 32)
    key.restrict(lineage="aa" * 16, least_version=7)
    key.restrict(least_version=3)
    assert (key.lineage, key.least_version, key.files) == ("aa" * 16, 7, None)
    key.restrict(lineage="bb" * 16)
    assert key.files == frozenset()  # no file is of two lineages
    for files in (["00" * 16, "11" * 16], ["11" * 16, "22" * 16]):
        other.restrict(files)
    assert other.files == {"11" * 16}
    assert not Key(b"k" * 32).is_restricted


def test_a_grant_for_a_set_opens_a_sealed_folder_of_it(tmp_path):
    (tmp_path / "model").mkdir()
    safetensors.numpy.save_file({"x": np.arange(3)}, tmp_path / "model" / "model.safetensors")
    fastrack.seal_folder(tmp_path / "model", tmp_path / "sealed", KEY)
    lineage = fastrack.publish(tmp_path / "sealed", signer=OWNER).lineage
    fastrack.Anchor.create(tmp_path / "reader.anchor", owner=OWNER.verifier)
    ring = Grants.issue(KEY, [ALICE.recipient], signer=OWNER, lineage=lineage, least_version=1).unlock(ALICE)
    weights = fastrack.load_folder(tmp_path / "sealed", ring, anchor=tmp_path / "reader.anchor").weights()
    assert fastrack.unseal(weights["x"], ring, framework="numpy").tolist() == [0, 1, 2]
    with pytest.raises(GrantError, match="got no anchor"):
        fastrack.load_folder(tmp_path / "sealed", ring)
    with pytest.raises(GrantError, match="got no anchor"):
        fastrack.unseal(fastrack.load_folder(tmp_path / "sealed", KEY).weights()["x"], ring)


# Forgeries


def test_grants_of_another_or_unsigned_are_refused(tmp_path):
    unsigned = json.dumps({**json.loads(ISSUED.envelope), "signatures": []}).encode()
    for content in (forged(lambda _: None, Signer.generate()), unsigned):
        with pytest.raises(SignatureError, match="got none that holds"):
            Grants.from_bytes(content, owner=OWNER.verifier)
    for bare in (json.dumps(payload_of(ISSUED)).encode(), b"", b"null", KEY.material().tobytes()):
        with pytest.raises(FormatError, match="not a signed document"):
            Grants.from_bytes(bare, owner=OWNER.verifier)
    (tmp_path / "large.grants").write_bytes(b" " * (16 * 1024 * 1024 + 1))
    with pytest.raises(FormatError, match="expected a grants file of at most"):
        Grants.load(tmp_path / "large.grants", owner=OWNER.verifier)


@pytest.mark.slow
def test_every_flipped_byte_is_refused():
    for index in range(0, len(ISSUED.envelope), 1):
        changed = bytearray(ISSUED.envelope)
        changed[index] ^= 1
        try:
            grants = Grants.from_bytes(bytes(changed), owner=OWNER.verifier)
        except (FormatError, SignatureError):
            continue
        assert grants.recipients == ISSUED.recipients  # such as the id of a key, which is a hint


@each(
    "change",
    [
        lambda payload: payload.update(version=2),
        lambda payload: payload.update(version=True),
        lambda payload: payload.update(bits=256.0),
        lambda payload: payload.update(more=1),
        lambda payload: payload.pop("files"),
        lambda payload: payload.update(bits=192),
        lambda payload: payload.update(key="x"),
        lambda payload: payload.update(key=None),
        lambda payload: payload.update(files=["x"]),
        lambda payload: payload.update(files="ab" * 16),
        lambda payload: payload.update(lineage=7),
        lambda payload: payload.update(serial=-1),
        lambda payload: payload.update(serial=True),
        lambda payload: payload.update(least_version=2**53),
        lambda payload: payload.update(expires="tomorrow"),
        lambda payload: payload.update(issued=None),
        lambda payload: payload.update(recipients=[]),
        lambda payload: payload.update(recipients={}),
        lambda payload: payload["recipients"].append(payload["recipients"][0]),
        lambda payload: payload["recipients"][0].update(id="0" * 32),
        lambda payload: payload["recipients"][0].update(ciphertext="*"),
        lambda payload: payload["recipients"][0].update(algorithm="Argon2id"),
        lambda payload: payload["recipients"][0].update(more=1),
        lambda payload: payload["recipients"][0].pop("name"),
        lambda payload: payload["recipients"].append(7),
    ],
)
def test_what_a_signer_should_not_have_signed_is_refused(change):
    with pytest.raises(FormatError, match="is not a grants file"):
        Grants.from_bytes(forged(change), owner=OWNER.verifier)


def test_another_form_of_the_same_content_is_refused():
    envelope = sign(json.dumps(payload_of(ISSUED)).encode(), GRANTS, OWNER)
    with pytest.raises(FormatError, match="canonical"):
        Grants.from_bytes(envelope, owner=OWNER.verifier)


@each("member", ["expires", "files", "lineage", "least_version", "bits", "key"])
def test_a_wrapped_key_is_bound_to_its_constraints(member):
    """Also against a signer that mixes the entries of one file with the constraints of another."""
    other = Key.generate(128)
    values = {
        "expires": "2030-01-01T00:00:00Z",
        "files": ["ab" * 16],
        "lineage": "cd" * 16,
        "least_version": 1,
        "bits": 128,
        "key": other.id,
    }
    grants = Grants.from_bytes(forged(lambda payload: payload.update({member: values[member]})), owner=OWNER.verifier)
    with pytest.raises(GrantError, match="does not authenticate"):
        grants.unlock(ALICE)


def test_entries_cannot_be_swapped():
    def swap(payload):
        first, second = payload["recipients"]
        first["ciphertext"], second["ciphertext"] = second["ciphertext"], first["ciphertext"]

    grants = Grants.from_bytes(forged(swap), owner=OWNER.verifier)
    with pytest.raises(GrantError, match="does not authenticate"):
        grants.unlock(ALICE)


def test_an_entry_of_another_algorithm_is_for_others():
    envelope = forged(lambda payload: payload["recipients"][0].update(algorithm="MLKEM1024_P384"))
    with pytest.raises(GrantError, match="was not granted to"):
        Grants.from_bytes(envelope, owner=OWNER.verifier).unlock(ALICE)


def test_an_entry_of_an_algorithm_that_comes_later_stays_as_it_is():
    later = {"algorithm": "MLKEM1024_P384", "ciphertext": "AA==", "id": "1" * 32, "more": [1], "name": "later"}
    envelope = forged(lambda payload: payload["recipients"].append(later))
    grants = Grants.from_bytes(envelope, owner=OWNER.verifier)
    added = grants.add([Identity.generate().recipient], identity=ALICE, signer=OWNER)
    assert later in payload_of(added)["recipients"]
    known = forged(lambda payload: payload["recipients"][0].update(more=[1]))
    with pytest.raises(FormatError):
        Grants.from_bytes(known, owner=OWNER.verifier)


def test_as_many_files_are_granted_as_the_encryption_takes():
    key, signer = Key.generate(), Signer.generate()
    many = [f"{number:032x}" for number in range(2000)]
    with pytest.raises(ValueError, match="some 1,870 at most"):
        Grants.issue(key, [ALICE.recipient], files=many, signer=signer)
    assert Grants.issue(key, [ALICE.recipient], files=many[:1800], signer=signer).unlock(ALICE).first == key
    other = Identity.generate("P-384")
    assert Grants.issue(key, [other.recipient], files=many, signer=signer).unlock(other).first.files == set(many)


def test_an_owner_cannot_grant_another_key_than_the_named_one():
    other = Key.generate()
    mixed = copy.copy(ISSUED)
    object.__setattr__(mixed, "recipients", ())
    entry = ALICE.recipient.encrypt(other.material(), _info(mixed))
    envelope = forged(lambda payload: payload["recipients"][0].update(ciphertext=base64.b64encode(entry).decode()))
    with pytest.raises(GrantError, match=f"expected key {KEY.id} of 256 bits, got key {other.id}"):
        Grants.from_bytes(envelope, owner=OWNER.verifier).unlock(ALICE)


@each(
    "change",
    [{"memory": 2**40}, {"iterations": 10**9}, {"lanes": 0}, {"memory": 8}, {"iterations": 1}, {"salt": "AA=="}],
)
@pytest.mark.slow
def test_a_passphrase_costs_neither_too_little_nor_the_machine(change):
    grants = Grants.issue(KEY, [], signer=OWNER, passphrase="long enough to be guessed by none")
    payload = payload_of(grants)
    payload["recipients"][0].update(change)
    text = json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(FormatError, match="within bounds"):
        Grants.from_bytes(sign(text, GRANTS, OWNER), owner=OWNER.verifier)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=8) | st.booleans(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    ),
    st.sampled_from(sorted(payload_of(ISSUED))),
)
def test_garbage_in_a_signed_payload_is_refused_or_harmless(value, member):
    with contextlib.suppress(FormatError):
        Grants.from_bytes(forged(lambda payload: payload.update({member: value})), owner=OWNER.verifier)


# Use


def test_use_by_the_environment(sealed, tmp_path, monkeypatch):
    ISSUED.save(tmp_path / "data.grants")
    ALICE.save(tmp_path / "alice")
    OWNER.verifier.save(tmp_path / "owner.pub")
    with pytest.raises(UnknownKeyError, match="set FASTRACK_IDENTITY and FASTRACK_OWNER"):
        fastrack.unseal(sealed["x"], tmp_path / "data.grants")
    monkeypatch.setenv("FASTRACK_IDENTITY", str(tmp_path / "alice"))
    monkeypatch.setenv("FASTRACK_OWNER", str(tmp_path / "owner.pub"))
    fastrack.unseal(sealed["x"], tmp_path / "data.grants")
    with fastrack.use_keys(tmp_path / "data.grants"):
        fastrack.unseal(sealed["x"])


def test_what_cannot_be_meant_is_told():
    with pytest.raises(ValueError, match="at least one recipient"):
        Grants.issue(KEY, [], signer=OWNER)
    with pytest.raises(ValueError, match="at least one recipient"):
        ISSUED.remove([ALICE.recipient, "bob"], signer=OWNER)
    with pytest.raises(GrantError, match="the name or the id of one, got 'dave'; the grants are for alice, bob"):
        ISSUED.remove(["dave"], signer=OWNER)
    with pytest.raises(ValueError, match="expected key"):
        ISSUED.add([CAROL.recipient], key=Key.generate(), signer=OWNER)
    with pytest.raises(TypeError, match="got neither"):
        ISSUED.unlock()
    with pytest.raises(GrantError, match="was not granted to a passphrase"):
        ISSUED.unlock(passphrase="x")


def test_an_entry_is_removed_by_recipient_id_name_or_passphrase():
    grants = ISSUED.add([CAROL.recipient], key=KEY, signer=OWNER, passphrase="x")
    for wanted in (BOB.recipient, BOB.recipient.id, "bob"):
        assert [grant.name for grant in grants.remove([wanted], signer=OWNER).recipients] == ["alice", "carol", ""]
    assert [grant.name for grant in grants.remove(["passphrase"], signer=OWNER).recipients] == ["alice", "bob", "carol"]


@pytest.mark.parametrize("algorithm", ["MLKEM768_X25519", "P-384"])
def test_identities_are_saved_and_loaded(tmp_path, algorithm):
    alice = Identity.generate(algorithm, name="alice")
    alice.save(tmp_path / "alice")
    alice.recipient.save(tmp_path / "alice.pub")
    again = Identity.load(tmp_path / "alice")
    assert again.recipient == alice.recipient == Recipient.load(tmp_path / "alice.pub")
    assert again.decrypt(alice.recipient.encrypt(b"secret", b"a"), b"a") == b"secret"
    with pytest.raises(GrantError):
        again.decrypt(alice.recipient.encrypt(b"secret", b"a"), b"b")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(alice)
    with pytest.raises(FormatError, match="got one of"):
        Signer.load(tmp_path / "alice")
    with pytest.raises(FormatError, match="expected a public key of"):
        Recipient.parse(str(Signer.generate().verifier))


@pytest.mark.parametrize("algorithm", ["MLKEM768_X25519", "P-384"])
def test_a_bad_point_or_key_is_refused(algorithm):
    public = Identity.generate(algorithm).recipient.public
    for wrong in (b"", public[:-1], public + b"\0", b"\xff" * len(public), bytes(len(public))):
        if algorithm != "P-384" and wrong == bytes(len(public)):
            continue  # zeros are a valid key of ML-KEM, though X25519 refuses to agree with it
        with pytest.raises(FormatError, match="expected a public key of"):
            Recipient(algorithm, wrong)


# The format


@pytest.mark.parametrize("signing", ["Ed25519", "ML-DSA-65"])
def test_a_second_implementation_reads_it(tmp_path, signing):
    owner = Signer.generate(signing)
    people = [Identity.generate(algorithm) for algorithm in ("MLKEM768_X25519", "P-384")]
    limits = {"files": ["ab" * 16], "expires": NOW}
    grants = Grants.issue(KEY, [one.recipient for one in people], signer=owner, passphrase="äpfel", **limits)
    owner.verifier.save(tmp_path / "owner.pub")
    content = read_grants(grants.envelope, [(tmp_path / "owner.pub").read_text().strip()])
    assert content["key"] == KEY.id
    for index, identity in enumerate(people):
        identity.save(tmp_path / str(index))
        assert unwrap(content, secret_file=(tmp_path / str(index)).read_bytes()) == KEY.material()
    assert unwrap(content, passphrase="äpfel") == KEY.material()
