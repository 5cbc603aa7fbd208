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

from fastrack import AttestationError, FormatError, GrantError, Key, ProviderError, SignatureError, attest
from fastrack._keys.grants import PAYLOAD_TYPE
from fastrack._keys.key_files import public_id
from fastrack._keys.recipients import PassphraseParameters
from fastrack._keys.signing import sign_envelope
from fastrack._keys.wrapped import _wrapper_class, open_source
from fastrack._util.locations import NO_PATH
from fastrack.errors import UnknownKeyError
from fastrack.grants import Grants, Identity, Recipient, Signer, Verifier
from fastrack.providers import WrappedKey, open_wrapper
from fuzz import mutators
from fuzz.evidence import mutate_parts, pack, same_every_time, unpack

KEY = Key.from_bytes(bytes(range(32)))
MARK = b"@@@@"
END = datetime(2099, 1, 1, tzinfo=UTC)


def write_secret(algorithm, secret, key_id):
    head = f"# fastrack secret key, {algorithm}, id {key_id}\n"
    return f"{head}fastrack-secret-1:{algorithm}:{secret.hex()}\n".encode()


@cache
def pairs():
    """Return identities and signers of every algorithm that are the same in every run, and their secret files."""
    chance = Random(3)
    kinds = {
        "MLKEM768_X25519": (Identity, 96),
        "P-384": (Identity, 48),
        "Ed25519": (Signer, 32),
        "ML-DSA-65": (Signer, 32),
    }
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

    @staticmethod
    def mutate(data, random):
        return mutate_parts(data, random, 3)

    def run(self, data):
        first, second, third = unpack(data, 3)
        challenge, offer = _read(attest.Challenge, first), _read(attest.Offer, second)
        if challenge is not None and offer is not None:
            with contextlib.suppress(AttestationError, FormatError):
                verified = self._verify(challenge, offer)
                if (challenge, offer) not in self._known or verified.recipient != identity().recipient:
                    raise AssertionError("an offer was verified that no machine made")
        for number, (_, known) in enumerate(self._known):
            pending = attest.PendingOffer(known, identity())
            grants = third.replace(MARK, self._envelopes[number])
            with contextlib.suppress(AttestationError, FormatError, SignatureError, GrantError):
                ring = pending.unlock(grants, owner=signer().verifier, now=NOW)
                if list(ring) != [KEY]:
                    raise AssertionError("grants gave another key")


def _read(kind, data):
    """Parse a document, which has one form only."""
    try:
        found = kind.from_bytes(data)
    except FormatError:
        return None
    if found.to_bytes() != data:
        raise AssertionError("a document has two forms")
    return found


class GrantsFiles:
    """`Grants.from_bytes` and `unlock`, of a payload that was signed, or of an envelope. The first byte chooses."""

    name = "grants"

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
        self._bound = made._constraints()

    def seeds(self):
        payload = self._payload
        for mark, text in self._wrapped.items():
            payload = payload.replace(text, mark)
        return [
            b"\0" + payload,
            b"\1" + b'{"payload":"@@@@","payloadType":"text","signatures":[{"keyid":"","sig":""}]}',
        ]

    @staticmethod
    def mutate(data, random):
        return data[:1] + mutators.mutate_json(data[1:], random)

    def run(self, data):
        payload = data[1:]
        for mark, text in self._wrapped.items():
            payload = payload.replace(mark, text)
        if data[:1] == b"\1":
            envelope = payload.replace(MARK, json.loads(self._envelope)["payload"].encode())
        else:
            envelope = sign_envelope(payload, PAYLOAD_TYPE, [signer()])
        try:
            grants = Grants.from_bytes(envelope, owner=signer().verifier)
        except (FormatError, SignatureError):
            return
        if data[:1] == b"\1":
            raise AssertionError("an envelope without a signature was taken")
        for algorithm in ("MLKEM768_X25519", "P-384"):
            with contextlib.suppress(GrantError):
                found = grants.unlock(identity(algorithm), now=NOW).first
                if found != KEY or grants._constraints() != self._bound:
                    raise AssertionError("a key came out under other conditions than it was granted under")
        for entry in grants.recipients:
            if (given := entry.parameters) is not None:  # which the derivation takes, or refuses before it begins
                Argon2id(
                    salt=given.salt, length=32, iterations=given.iterations, lanes=given.lanes, memory_cost=given.memory
                )


class KeyPairs:
    """Public files, secret files, and ciphertexts for identities. The first byte chooses."""

    name = "pair"

    def __init__(self):
        from fuzz.targets import put

        self._put = put
        self._ciphertexts = [one.recipient.encrypt(b"secret", b"info") for one in (identity(), identity("P-384"))]

    def seeds(self):
        public = [b"\0" + str(found).encode() for _, found, _ in pairs().values()]
        secret = [b"\1" + text for _, _, text in pairs().values()]
        masks = [bytes([2 + number]) + bytes(len(one)) for number, one in enumerate(self._ciphertexts)]
        return [*public, b"\0" + str(public_with_name()).encode(), *secret, *masks]

    @staticmethod
    def mutate(data, random):
        return data[:1] + mutators.mutate_bytes(data[1:], random)

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
            with contextlib.suppress(FormatError):
                found = kind.parse(text)
                if str(found) != text.removesuffix("\n") or found.id != public_id(found.algorithm, found.public):
                    raise AssertionError("a public key has two forms")

    def _read_secret(self, data):
        path = self._put("some.secret", data)
        path.chmod(0o600)
        for kind in (Identity, Signer):
            try:
                found = kind.load(path)
            except FormatError:
                continue
            public = found.recipient if kind is Identity else found.verifier
            if public not in [one for _, one, _ in pairs().values()] and public.id.encode() not in data:
                raise AssertionError("a secret file gave a key of another id")

    def _decrypt(self, number, mask):
        whole = self._ciphertexts[number]
        altered = bytes(a ^ b for a, b in zip(whole, mask, strict=False)) + mask[len(whole) :]
        one = (identity(), identity("P-384"))[number]
        try:
            secret = one.decrypt(altered, b"info")
        except GrantError:
            if altered == whole:
                raise AssertionError("what was encrypted does not open") from None
            return
        if altered != whole or secret != b"secret":
            raise AssertionError("an altered ciphertext opened")


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

    @staticmethod
    def mutate(data, random):
        alter = mutators.mutate_json if data[1:2] == b"{" else mutators.mutate_bytes
        return data[:1] + alter(data[1:], random)

    def run(self, data):
        kind, data = data[:1], data[1:]
        if kind == b"\0":
            wrapped = self._read_file(data)
            if wrapped is not None:
                with contextlib.suppress(FormatError, ProviderError):
                    repr(_wrapper_class(wrapped.provider).from_wrapped(wrapped))
        elif kind == b"\1":
            with contextlib.suppress(ValueError):
                repr(open_wrapper(data.decode(errors="replace")))
        elif kind == b"\2":
            text = data.decode(errors="replace").replace("\0", "")
            try:
                open_source(text)
            except (FormatError, UnknownKeyError, OSError):
                pass
            except ValueError as error:
                if not str(error).endswith(NO_PATH):
                    raise

    def _read_file(self, data):
        try:
            wrapped = WrappedKey.from_bytes(data)
        except FormatError:
            return None
        if wrapped.to_bytes() != data:
            raise AssertionError("a wrapped key has two forms")
        return wrapped
