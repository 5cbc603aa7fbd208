"""Keys of earlier versions open: key files, key pairs, grants and wrapped keys."""

import base64
import json
from datetime import UTC, datetime, timedelta

import golden_contents as contents
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from golden_files import HERE, NOW, VERSIONS, cli, key_id, load_keys, load_verifiers, opens, owner_key
from helpers.by_hand import grants as by_hand
from helpers.by_hand import keys

import fastrack
from fastrack.errors import FormatError, GrantError
from fastrack.grants import Grants, Identity, Recipient, Signer, Verifier
from fastrack.providers import Passphrase, WrappedKey

# Keys.


@opens("keys/*")
def test_key_files_open(golden):
    for name, secret in contents.SECRETS.items():
        path, bits = golden(f"keys/{name}"), 8 * len(secret)
        text = f"# fastrack key, {bits} bits, id {key_id(secret)}\nfastrack-key-1:{secret.hex()}\n"
        assert path.read_text() == text
        key = fastrack.Key.from_bytes(secret)
        assert (key.id, key.bits) == (key_id(secret), bits)
        with path.open("rb") as file:
            assert fastrack.Key.read(file.fileno()) == key
        assert fastrack.Key.load(path) == fastrack.Key.from_text(text) == fastrack.Key.from_text(text[:-1]) == key
        assert fastrack.KeyRing(golden("keys"))[key.id] == key
    shown = cli("key", *sorted(golden("keys").iterdir()))["keys"]
    assert [one["id"] for one in shown] == [key_id(contents.SECRETS[name]) for name in sorted(contents.SECRETS)]


def check_pair(secret_file, public_line, algorithm):
    """Compare both halves of a key pair by hand, and return its public key and id."""
    _, found, public = keys.open_secret(secret_file.read_bytes())
    assert (found, keys.read_public(public_line.split(" ")[0])) == (algorithm, (algorithm, public))
    return public, keys.pair_id(algorithm, public)


@opens("pairs/alice*", "pairs/carol*")
def test_identities_and_recipients_open(golden):
    for name, algorithm in (("alice", "MLKEM768_X25519"), ("carol", "P-384")):
        public, pair_id = check_pair(
            golden(f"pairs/{name}"), golden(f"pairs/{name}.pub").read_text().rstrip(), algorithm
        )
        identity, recipient = Identity.load(golden(f"pairs/{name}")), Recipient.load(golden(f"pairs/{name}.pub"))
        found = recipient.id, recipient.public, recipient.algorithm, recipient.name
        assert found == (pair_id, public, algorithm, name)
        assert identity.recipient == recipient == Recipient.parse(golden(f"pairs/{name}.pub").read_text())
        assert bytes(identity.decrypt(recipient.encrypt(b"a secret", b"bound"), b"bound")) == b"a secret"


@opens("pairs/owner*")
def test_signers_and_verifiers_open(golden):
    for name, algorithm, called in (("owner", "Ed25519", "owner"), ("owner-65", "ML-DSA-65", "")):
        path, public_path = golden(f"pairs/{name}.signer"), golden(f"pairs/{name}.signer.pub")
        public, pair_id = check_pair(path, public_path.read_text().rstrip(), algorithm)
        signer, verifier = Signer.load(path), Verifier.load(public_path)
        assert (verifier.id, verifier.public, verifier.algorithm, verifier.name) == (pair_id, public, algorithm, called)
        assert signer.verifier == verifier
        verifier.verify(signer.sign(b"text"), b"text")


# Grants.


@opens("grants/alone.grants", "grants/several.grants", "grants/limited.grants", "grants/passphrase")
def test_grants_open_for_each_recipient(golden):
    verifiers = load_verifiers(golden)
    lines = [golden(f"pairs/{name}.signer.pub").read_text().rstrip() for name in ("owner", "owner-65")]
    people = {name: Identity.load(golden(f"pairs/{name}")) for name in ("alice", "carol")}
    texts = {name: golden(f"pairs/{name}").read_bytes() for name in people}
    phrase = golden("grants/passphrase").read_text().rstrip("\n")
    assert phrase == contents.PASSPHRASE
    owned = load_keys(golden)
    made = {
        "alone": ("owner256", 0, ["alice"], False, 1),
        "several": ("owner256", 0, ["alice", "carol"], True, 2),
        "limited": ("owner128", 1, ["alice", "carol"], False, 1),
    }
    for name, (key, owner, recipients, has_phrase, serial) in made.items():
        path = golden(f"grants/{name}.grants")
        grants = Grants.load(path, owner=verifiers)
        payload = by_hand.read_grants(path.read_bytes(), [lines[owner]])
        assert (grants.key_id, grants.bits, grants.serial) == (owned[key].id, owned[key].bits, serial)
        assert grants.envelope == path.read_bytes()
        assert [grant.name for grant in grants.recipients if grant.name] == recipients
        for person in recipients:
            assert grants.unlock(people[person], now=NOW).first == owned[key]
            assert by_hand.unwrap(payload, texts[person]) == contents.SECRETS[key]
        if has_phrase:
            assert grants.unlock(passphrase=phrase).first == owned[key]
            assert by_hand.unwrap(payload, passphrase=phrase) == contents.SECRETS[key]
        for person in people.keys() - set(recipients):
            with pytest.raises(GrantError):
                grants.unlock(people[person])


def require_opens(path, golden, version):
    """Require that the key of grants comes out by the format, and by fastrack if they are no lease."""
    grants, alice = Grants.load(path, owner=load_verifiers(golden)), Identity.load(golden("pairs/alice"))
    if is_lease := version in {2, 4}:
        assert (grants.seconds, grants.renew_after, grants.serial) == (3600, 1800, 1)
    if is_placed := version in {3, 4}:
        assert (grants.require, grants.gpus) == ("confidential", (contents.CHIP,))
    assert (grants.seconds is not None, grants.require is not None) == (is_lease, is_placed)
    if is_lease:
        with pytest.raises(GrantError, match="lease_keys"):
            grants.unlock(alice)
    else:
        assert grants.unlock(alice).first == owner_key(golden)
    owner = golden("pairs/owner.signer.pub").read_text().rstrip()
    payload = by_hand.read_grants(path.read_bytes(), [owner], version=version)
    assert by_hand.unwrap(payload, golden("pairs/alice").read_bytes()) == contents.SECRETS["owner256"]


LATER = [*VERSIONS[2:], pytest.param("written now", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("golden", LATER, indirect=True)
@opens("grants/leased.grants", "grants/placed.grants", "grants/leased-placed.grants")
def test_grants_of_leases_and_places_open(golden):
    for name, version in (("leased", 2), ("placed", 3), ("leased-placed", 4)):
        require_opens(golden(f"grants/{name}.grants"), golden, version)


@pytest.mark.parametrize("golden", ["0.2"], indirect=True)
@opens("pairs/alice")
def test_grants_of_a_lease_that_were_written_after_0_2_open(golden):
    require_opens(HERE / "since-0.2" / "leased.grants", golden, version=2)


@opens("grants/limited.grants")
def test_grants_keep_their_limits(golden):
    path = golden("grants/limited.grants")
    grants = Grants.load(path, owner=Verifier.load(golden("pairs/owner-65.signer.pub")))
    assert (grants.files, grants.lineage, grants.least_version) == ((contents.FILE_ID,), contents.LINEAGE, 3)
    assert grants.expires == datetime(2999, 12, 31, 23, 59, 59, tzinfo=UTC)
    alice = Identity.load(golden("pairs/alice"))
    assert grants.unlock(alice, now=grants.expires - timedelta(seconds=1)).first.files == {contents.FILE_ID}
    with pytest.raises(GrantError, match="expired"):
        grants.unlock(alice, now=grants.expires)


@opens("grants/several.grants")
def test_grants_are_continued(golden):
    key, owner = owner_key(golden), Signer.load(golden("pairs/owner.signer"))
    grants = Grants.load(golden("grants/several.grants"), owner=owner.verifier)
    alice, carol, bob = Identity.load(golden("pairs/alice")), Identity.load(golden("pairs/carol")), Identity.generate()
    later = grants.add([bob.recipient], identity=alice, signer=owner).remove(["carol"], signer=owner)
    assert later.serial == grants.serial + 2
    assert later.unlock(bob).first == later.unlock(passphrase=contents.PASSPHRASE).first == key
    with pytest.raises(GrantError):
        later.unlock(carol)


# Wrapped keys.


class StandIn:
    """A stand-in for tokens and vaults, with the wrapping keys that lie beside the files."""

    def __init__(self, golden):
        self._rsa = load_pem_private_key(golden("wrapped/wrapping-rsa.pem").read_bytes(), None)
        self._aes = bytes.fromhex(golden("wrapped/wrapping-aes.hex").read_text())

    def open(self, document):
        if document["provider"] in {"pkcs11", "azure-keyvault"}:
            return keys.unwrap(document, self._aes if document["algorithm"] == "AES-KW" else self._rsa)
        ciphertext, context = base64.b64decode(document["ciphertext"]), b""
        if document["provider"] == "vault-transit":
            ciphertext = base64.b64decode(ciphertext.removeprefix(b"vault:v1:"))
        elif document["provider"] == "aws-kms":
            context = json.dumps({"fastrack-key": document["key"]}).encode()
        elif document["provider"] == "gcp-kms":
            context = f"fastrack-key:{document['key']}".encode()
        return AESGCM(self._aes).decrypt(ciphertext[:12], ciphertext[12:], context)

    def unwrap(self, wrapped):
        """Do what a `KeyWrapper` does."""
        return fastrack.Key.from_bytes(self.open(json.loads(wrapped.to_bytes())))


@opens("wrapped/*")
def test_wrapped_keys_open(golden):
    key, stand_in = owner_key(golden), StandIn(golden)
    sealed = fastrack.seal(np.arange(3), key)
    for path in sorted(golden("wrapped").glob("*.wrapped")):
        wrapped, document = WrappedKey.load(path, wrapper=stand_in), keys.read_wrapped(path.read_bytes())
        assert wrapped.to_bytes() == path.read_bytes()
        assert (wrapped.key_id, wrapped.bits) == (key.id, key.bits)
        members = wrapped.provider, wrapped.algorithm, dict(wrapped.parameters), wrapped.ciphertext
        content = base64.b64decode(document["ciphertext"])
        assert members == (document["provider"], document["algorithm"], document["parameters"], content)
        if wrapped.provider == "tpm":  # which nothing opens: no TPM made it
            continue
        assert stand_in.open(document) == contents.SECRETS["owner256"]
        assert fastrack.unseal(sealed, keys=wrapped, framework="numpy").tolist() == [0, 1, 2]


@pytest.mark.parametrize("golden", LATER, indirect=True)
@opens("phrase/owner256.wrapped")
def test_a_key_under_a_passphrase_opens(golden):
    wrapped, content = WrappedKey.load(path := golden("phrase/owner256.wrapped")), path.read_bytes()
    assert wrapped.unwrap(Passphrase(contents.PASSPHRASE)) == owner_key(golden)
    document = keys.read_wrapped(content)
    costs = {name: int(document["parameters"][name]) for name in ("iterations", "lanes", "memory")}
    key = by_hand.stretch(document["parameters"] | costs, contents.PASSPHRASE)
    data = f"fastrack-key:{document['key']}".encode()
    assert (
        AESGCM(key).decrypt(bytes(12), base64.b64decode(document["ciphertext"]), data) == contents.SECRETS["owner256"]
    )


@opens("wrapped/pkcs11-aes.wrapped")
def test_a_wrapped_key_of_another_form_is_refused(golden):
    content = golden("wrapped/pkcs11-aes.wrapped").read_bytes()
    for changed in (content[:-1], content.replace(b":1}", b":2}"), content.replace(b'"bits":256', b'"bits": 256')):
        assert changed != content
        with pytest.raises(FormatError):
            WrappedKey.from_bytes(changed)


@opens("wrapped/*.wrapped")
def test_wrapped_keys_name_what_wrapped_them(golden):
    wrapped = {path.stem: WrappedKey.load(path) for path in golden("wrapped").glob("*.wrapped")}
    made = {name: (one.provider, one.algorithm, dict(one.parameters)) for name, one in wrapped.items()}
    assert made == contents.WRAPPED
