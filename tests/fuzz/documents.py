"""Documents of keys: exchanges, grants, key pairs, wrapped keys and URIs of providers.

HPKE uses random numbers of its own. So a seed has a mark where an encrypted key stands, and `run` puts the key there.
"""

import contextlib
import json
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from functools import cache
from random import Random
from unittest import mock

from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from helpers.foundry import machine as machines
from helpers.foundry import nvidia, snp, tdx
from helpers.foundry.authority import NOW
from helpers.signed import GRANTS, sign

from fastrack import AttestationError, FormatError, GrantError, Key, ProviderError, SignatureError, attest
from fastrack._keys import key_files
from fastrack._keys.grants import _constraints
from fastrack._keys.recipients import PassphraseParameters
from fastrack._keys.wrapped import _wrapper_class, open_source
from fastrack._util.locations import NO_PATH
from fastrack.errors import UnknownKeyError
from fastrack.grants import Grants, Identity, Recipient, Signer, Verifier
from fastrack.providers import WrappedKey, open_wrapper
from fuzz import mutators
from fuzz.common import attempt, put, require
from fuzz.evidence import mutate_parts, pack, same_every_time, unpack
from fuzz.mutators import behind_a_byte

KEY = Key.from_bytes(bytes(range(32)))
MARK = b"@@@@"
REFUSALS = AttestationError, FormatError, SignatureError, GrantError
END = datetime(2099, 1, 1, tzinfo=UTC)


def write_secret(algorithm, secret, key_id):
    head = f"# fastrack secret key, {algorithm}, id {key_id}\n"
    return f"{head}fastrack-secret-1:{algorithm}:{secret.hex()}\n".encode()


@cache
def pairs():
    """Return identities and signers of every algorithm that are the same in every run, and their secret files."""
    chance = Random(3)
    kinds = {"MLKEM768_X25519": (Identity, 96), "P-384": (Identity, 48)}
    kinds |= {"Ed25519": (Signer, 32), "ML-DSA-65": (Signer, 32)}
    found = {}
    for algorithm, (kind, size) in kinds.items():
        secret = chance.randbytes(size)
        pair = kind(algorithm, kind._readers[algorithm](secret))
        public = pair.recipient if kind is Identity else pair.verifier
        found[algorithm] = pair, public, write_secret(algorithm, secret, public.id)
    return found


def identity(algorithm="MLKEM768_X25519"):
    return pairs()[algorithm][0]


def signer(algorithm="Ed25519"):
    return pairs()[algorithm][0]


@contextlib.contextmanager
def own_vendors():
    """Let the foundry make vendors anew, in place of those that tests have in common."""
    made = [(tdx, "intel"), (snp, "amd"), (nvidia, "device_root"), (nvidia, "hopper"), (nvidia, "rim_signer")]
    made.append((machines, "roots"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(same_every_time())
        for module, name in made:
            stack.enter_context(mock.patch.object(module, name, cache(getattr(module, name).__wrapped__)))
        yield


class Exchanges:
    """A challenge, an offer for it, and the grants for the offer."""

    name = "exchange"
    mutate = mutate_parts(3)

    def __init__(self):
        chance = Random(4)
        self._policy = attest.Policy.from_toml(machines.policy(1))
        self._known = []
        with own_vendors():
            for cpu in ("tdx", "snp"):
                challenge = attest.Challenge(
                    chance.randbytes(16).hex(), chance.randbytes(32), NOW + timedelta(minutes=5)
                )
                recipient = identity().recipient
                evidence = machines.Machine(cpu, 1, is_small=True).collect(attest.OfferBinding(challenge, recipient))
                self._known.append((challenge, attest.Offer(challenge.id, recipient, evidence)))
            self._roots = machines.roots()
        self._grants = [attest.issue_grants(self._verify(*one), KEY, signer=signer(), now=NOW) for one in self._known]
        self._envelopes = [json.loads(one)["grants"][0].encode() for one in self._grants]

    def _verify(self, challenge, offer):
        return attest.verify_offer(offer, challenge, self._policy, now=NOW, roots=self._roots)

    def seeds(self):
        marked = [data.replace(one, MARK) for data, one in zip(self._grants, self._envelopes, strict=True)]
        known = zip(self._known, marked, strict=True)
        return [pack([challenge.to_bytes(), offer.to_bytes(), grants]) for (challenge, offer), grants in known]

    def run(self, data):
        first, second, third = unpack(data, 3)
        challenge, offer = _read(attest.Challenge, first), _read(attest.Offer, second)
        if challenge is not None and offer is not None:
            verified = attempt(lambda: self._verify(challenge, offer), AttestationError, FormatError)
            is_known = (challenge, offer) in self._known
            is_good = verified is None or (is_known and verified.recipient == identity().recipient)
            require(is_good, "an offer was verified that no machine made")
        for (_, known), envelope in zip(self._known, self._envelopes, strict=True):
            pending, grants = attest.PendingOffer(known, identity()), third.replace(MARK, envelope)
            ring = attempt(lambda p=pending, g=grants: p.unlock(g, owner=signer().verifier, now=NOW), *REFUSALS)
            require(ring is None or list(ring) == [KEY], "grants gave another key")


def _read(kind, data):
    """Parse a document, which has one form only."""
    found = attempt(lambda: kind.from_bytes(data), FormatError)
    require(found is None or found.to_bytes() == data, "a document has two forms")
    return found


class GrantsFiles:
    """`Grants.from_bytes` and `unlock`, of a payload that was signed, or of an envelope. The first byte chooses."""

    name = "grants"
    mutate = behind_a_byte(mutators.mutate_json)

    def __init__(self):
        derived = PassphraseParameters(bytes(range(16))), bytes(48)  # not by Argon2id, which takes long
        with mock.patch("fastrack._keys.grants.encrypt_to_passphrase", return_value=derived):
            recipients = [pairs()[name][1] for name in ("MLKEM768_X25519", "P-384")]
            made = Grants.issue(
                KEY, recipients, signer=signer(), passphrase="correct horse battery", files=["ab" * 16], expires=END
            )
        self._envelope = made.envelope
        document = json.loads(b64decode(json.loads(made.envelope)["payload"]))
        self._wrapped = {b"@%d@@" % n: entry["ciphertext"].encode() for n, entry in enumerate(document["recipients"])}
        document["issued"] = "2026-06-01T00:00:00Z"
        self._payload = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        self._bound = _constraints(made)

    def seeds(self):
        payload = self._payload
        for mark, text in self._wrapped.items():
            payload = payload.replace(text, mark)
        envelope = b'{"payload":"@@@@","payloadType":"text","signatures":[{"keyid":"","sig":""}]}'
        return [b"\0" + payload, b"\1" + envelope]

    def run(self, data):
        payload, is_envelope = data[1:], data[:1] == b"\1"
        for mark, text in self._wrapped.items():
            payload = payload.replace(mark, text)
        if is_envelope:
            envelope = payload.replace(MARK, json.loads(self._envelope)["payload"].encode())
        else:
            envelope = sign(payload, GRANTS, signer())
        grants = attempt(lambda: Grants.from_bytes(envelope, owner=signer().verifier), FormatError, SignatureError)
        if grants is None:
            return
        require(not is_envelope, "an envelope without a signature was taken")
        for algorithm in ("MLKEM768_X25519", "P-384"):
            ring = attempt(lambda name=algorithm: grants.unlock(identity(name), now=NOW), GrantError)
            bound = ring is None or (ring.first == KEY and _constraints(grants) == self._bound)
            require(bound, "a key came out under other conditions than it was granted under")
        for entry in grants.recipients:
            if (given := entry.parameters) is not None:  # which the derivation takes, or refuses before it begins
                Argon2id(
                    salt=given.salt, length=32, iterations=given.iterations, lanes=given.lanes, memory_cost=given.memory
                )


class KeyPairs:
    """Public files, secret files, and ciphertexts for identities. The first byte chooses."""

    name = "pair"
    mutate = behind_a_byte(mutators.mutate_bytes)

    def __init__(self):
        self._ciphertexts = [one.recipient.encrypt(b"secret", b"info") for one in (identity(), identity("P-384"))]

    def seeds(self):
        public = [b"\0" + str(found).encode() for _, found, _ in pairs().values()]
        secret = [b"\1" + text for _, _, text in pairs().values()]
        masks = [bytes([2 + number]) + bytes(len(one)) for number, one in enumerate(self._ciphertexts)]
        return [*public, b"\0" + str(public_with_name()).encode(), *secret, *masks]

    def run(self, data):
        kind, data = data[:1], data[1:]
        if kind == b"\0":
            self._read_public(data)
        elif kind == b"\1":
            self._read_secret(data)
        elif kind in {b"\2", b"\3"}:
            self._decrypt(kind[0] - 2, data)

    def _read_public(self, data):
        text = data.decode(errors="replace")
        for kind in (Recipient, Verifier):
            found = attempt(lambda k=kind: k.parse(text), FormatError)
            if found is not None:
                identity = key_files.public_id(found.algorithm, found.public)
                is_one = str(found) == text.removesuffix("\n") and found.id == identity
                require(is_one, "a public key has two forms")

    def _read_secret(self, data):
        path = put("some.secret", data)
        path.chmod(0o600)
        known = [one for _, one, _ in pairs().values()]
        for kind in (Identity, Signer):
            found = attempt(lambda k=kind: k.load(path), FormatError)
            if found is not None:
                public = found.recipient if kind is Identity else found.verifier
                require(public in known or public.id.encode() in data, "a secret file gave a key of another id")

    def _decrypt(self, number, mask):
        whole = self._ciphertexts[number]
        altered = bytes(a ^ b for a, b in zip(whole, mask, strict=False)) + mask[len(whole) :]
        one = (identity(), identity("P-384"))[number]
        secret = attempt(lambda: one.decrypt(altered, b"info"), GrantError)
        require(altered != whole or secret == b"secret", "what was encrypted does not open")
        require(altered == whole or secret is None, "an altered ciphertext opened")


def public_with_name():
    found = identity().recipient
    return Recipient(found.algorithm, found.public, "Alice of the lab")


URIS = (
    "pkcs11:token=owner;object=fastrack?module-path=/usr/lib/libsofthsm2.so&pin-source=file:/run/pin",
    "pkcs11:serial=12%2034;id=%01%02;type=private",
    "tpm:sha256:0,7",
    "vault-transit:transit/owner",
    "aws-kms:arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab",
    "aws-kms:alias/owner",
    "gcp-kms:projects/p/locations/global/keyRings/r/cryptoKeys/k",
    "azure-keyvault:https://owner.vault.azure.net/keys/fastrack/0123456789abcdef0123456789abcdef",
)
PARAMETERS = {
    "pkcs11": {"uri": "pkcs11:object=fastrack;token=owner"},
    "tpm": {"parent": "00" * 34, "pcrs": "sha256:0,7"},
    "vault-transit": {"mount": "transit", "name": "owner"},
    "aws-kms": {"key": URIS[4].partition(":")[2]},
    "gcp-kms": {"key": URIS[6].partition(":")[2]},
    "azure-keyvault": {"key": URIS[7].partition(":")[2]},
}


class WrappedKeys:
    """Wrapped key files, URIs of providers, and both as a source of keys. The first byte chooses."""

    name = "wrapped"
    mutate = behind_a_byte(mutators.mutate_any)

    def seeds(self):
        files = [
            WrappedKey(name, "TPM2-SEALED" if name == "tpm" else "RSA", KEY.id, 256, b"ciphertext", given)
            for name, given in PARAMETERS.items()
        ]
        uris = [uri.encode() for uri in URIS]
        sources = [uri + b"#missing.wrapped" for uri in uris[:1]]
        return (
            [b"\0" + one.to_bytes() for one in files] + [b"\1" + one for one in uris] + [b"\2" + one for one in sources]
        )

    def run(self, data):
        kind, data = data[:1], data[1:]
        text = data.decode(errors="replace")
        if kind == b"\0":
            wrapped = _read(WrappedKey, data)
            if wrapped is not None:
                attempt(
                    lambda: repr(_wrapper_class(wrapped.provider).from_wrapped(wrapped)), FormatError, ProviderError
                )
        elif kind == b"\1":
            attempt(lambda: repr(open_wrapper(text)), ValueError)
        elif kind == b"\2":
            try:
                open_source(text.replace("\0", ""))
            except (FormatError, UnknownKeyError, OSError):
                pass
            except ValueError as error:
                if not str(error).endswith(NO_PATH):
                    raise
