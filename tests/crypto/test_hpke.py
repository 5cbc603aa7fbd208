"""The HPKE of cryptography against the vectors of RFC 9180 and of the post-quantum draft, which a package has."""

import hashlib
import importlib.resources
import json

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.bindings._rust import openssl
from cryptography.hazmat.primitives.asymmetric import ec, mlkem, x25519
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, MLKEM768X25519PrivateKey, Suite
from helpers.cases import each

VECTORS = importlib.resources.files("cryptography_vectors") / "HPKE"
KEMS = {0x20: KEM.X25519, 0x10: KEM.P256, 0x11: KEM.P384, 0x12: KEM.P521, 0x647A: KEM.MLKEM768_X25519}
KDFS = {1: KDF.HKDF_SHA256, 2: KDF.HKDF_SHA384, 3: KDF.HKDF_SHA512, 16: KDF.SHAKE128, 17: KDF.SHAKE256}
AEADS = {1: AEAD.AES_128_GCM, 2: AEAD.AES_256_GCM, 3: AEAD.CHACHA20_POLY1305}
CURVES = {0x10: ec.SECP256R1(), 0x11: ec.SECP384R1(), 0x12: ec.SECP521R1()}


def vectors(name):
    for vector in json.loads((VECTORS / name).read_text()):
        if vector["mode"] == 0 and vector["kem_id"] in KEMS and vector["kdf_id"] in KDFS and vector["aead_id"] in AEADS:
            yield vector


def private_key(kem, secret):
    if kem == 0x20:
        return x25519.X25519PrivateKey.from_private_bytes(secret)
    if kem in CURVES:
        return ec.derive_private_key(int.from_bytes(secret, "big"), CURVES[kem])
    expanded = hashlib.shake_256(secret).digest(96)  # the seed of ML-KEM, and the scalar of X25519
    return MLKEM768X25519PrivateKey(
        mlkem.MLKEM768PrivateKey.from_seed_bytes(expanded[:64]),
        x25519.X25519PrivateKey.from_private_bytes(expanded[64:]),
    )


@each("vector", [*vectors("test-vectors.json"), *vectors("hpke-pq-test-vectors.json")])
def test_the_published_ciphertexts_open(vector):
    suite = Suite(KEMS[vector["kem_id"]], KDFS[vector["kdf_id"]], AEADS[vector["aead_id"]])
    key = private_key(vector["kem_id"], bytes.fromhex(vector["skRm"]))
    first = vector["encryptions"][0]
    sealed, info, aad = (bytes.fromhex(text) for text in (vector["enc"] + first["ct"], vector["info"], first["aad"]))
    assert openssl.hpke._decrypt_with_aad(suite, sealed, key, info, aad) == bytes.fromhex(first["pt"])
    for wrong in (sealed[:-1] + bytes([sealed[-1] ^ 1]), sealed[:-1]):
        with pytest.raises(InvalidTag):
            openssl.hpke._decrypt_with_aad(suite, wrong, key, info, aad)
    with pytest.raises(InvalidTag):
        openssl.hpke._decrypt_with_aad(suite, sealed, key, info + b"x", aad)


def test_there_are_vectors_of_the_mechanisms_that_grants_use():
    ids = {vector["kem_id"] for vector in vectors("hpke-pq-test-vectors.json")}
    assert ids >= {0x11, 0x647A}
