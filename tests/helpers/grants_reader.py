"""A second implementation of grants files, from docs/format.md alone: the standard library and cryptography."""

import base64
import json

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, mldsa, mlkem, x25519
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, MLKEM768X25519PrivateKey, Suite
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

TYPE = "application/vnd.fastrack.grants.v1+json"
BOUND = ("bits", "expires", "files", "key", "least_version", "lineage", "version")


def read_grants(content, public_line):
    """Return the payload of a grants file, after its signature was verified."""
    envelope = json.loads(content)
    payload = base64.b64decode(envelope["payload"])
    assert envelope["payloadType"] == TYPE
    _, algorithm, encoded = public_line.split(" ")[0].split(":")
    public = base64.b64decode(encoded)
    if algorithm == "Ed25519":
        key = ed25519.Ed25519PublicKey.from_public_bytes(public)
    else:
        key = mldsa.MLDSA65PublicKey.from_public_bytes(public)
    signature = base64.b64decode(envelope["signatures"][0]["sig"])
    key.verify(signature, f"DSSEv1 {len(TYPE)} {TYPE} {len(payload)} ".encode() + payload)
    return json.loads(payload)


def unwrap(grants, identity_text=None, passphrase=None):
    """Return the bytes of the granted key."""
    bound = json.dumps({name: grants[name] for name in BOUND}, sort_keys=True, separators=(",", ":"))
    info = b"fastrack/grant@1\0" + bound.encode()
    if passphrase is not None:
        (entry,) = (entry for entry in grants["recipients"] if entry["algorithm"] == "Argon2id")
        salt, costs = base64.b64decode(entry["salt"]), {name: entry[name] for name in ("iterations", "lanes")}
        key = Argon2id(salt=salt, length=32, memory_cost=entry["memory"], **costs).derive(passphrase.encode())
        return AESGCM(key).decrypt(bytes(12), base64.b64decode(entry["ciphertext"]), info)
    head, line = identity_text.splitlines()
    (entry,) = (entry for entry in grants["recipients"] if entry["id"] == head.rsplit(" ", 1)[1])
    _, algorithm, secret = line.split(":")
    secret = bytes.fromhex(secret)
    if algorithm == "P-384":
        suite = Suite(KEM.P384, KDF.HKDF_SHA384, AEAD.AES_256_GCM)
        key = ec.derive_private_key(int.from_bytes(secret, "big"), ec.SECP384R1())
    else:
        suite = Suite(KEM.MLKEM768_X25519, KDF.SHAKE256, AEAD.AES_256_GCM)
        first = mlkem.MLKEM768PrivateKey.from_seed_bytes(secret[:64])
        key = MLKEM768X25519PrivateKey(first, x25519.X25519PrivateKey.from_private_bytes(secret[64:]))
    return suite.decrypt(base64.b64decode(entry["ciphertext"]), key, info)
