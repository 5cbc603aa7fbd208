"""Encrypt by HPKE with randomness that is given: RFC 9180, base mode, single shot.

Sources: RFC 9180, sections 4.1 and 5.1; draft-ietf-hpke-hpke, section 5 ("one-stage KDF");
draft-connolly-cfrg-xwing-kem, section 5.
"""

import hashlib

from cryptography.hazmat.primitives.asymmetric.ec import ECDH, SECP384R1, EllipticCurvePublicKey, derive_private_key
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from kyber_py.ml_kem import ML_KEM_768

from generator.parts.case import draw

MLKEM = 1184
XWING_LABEL = b"\\.//^\\"
AES_256_GCM = 2


def encrypt(algorithm: str, public: bytes, info: bytes, plaintext: bytes, label: str) -> bytes:
    """Return encapsulated key and ciphertext; the label decides what is drawn."""
    if algorithm == "P-384":
        shared, encapsulated = _p384(public, label)
        key, nonce = _schedule_p384(shared, info)
    else:
        shared, encapsulated = _xwing(public, label)
        key, nonce = _schedule_shake(shared, info)
    return encapsulated + AESGCM(key).encrypt(nonce, plaintext, b"")


def _xwing(public: bytes, label: str) -> tuple[bytes, bytes]:
    pq_shared, pq_text = ML_KEM_768._encaps_internal(public[:MLKEM], draw(f"{label} m", 32))
    ephemeral = X25519PrivateKey.from_private_bytes(draw(f"{label} x", 32))
    shared = ephemeral.exchange(X25519PublicKey.from_public_bytes(public[MLKEM:]))
    text = ephemeral.public_key().public_bytes_raw()
    combined = hashlib.sha3_256(bytes(pq_shared) + shared + text + public[MLKEM:] + XWING_LABEL)
    return combined.digest(), bytes(pq_text) + text


def _schedule_shake(shared: bytes, info: bytes) -> tuple[bytes, bytes]:
    suite = b"HPKE" + b"\x64\x7a" + b"\x00\x11" + AES_256_GCM.to_bytes(2, "big")
    size = 32 + 12 + 64
    secrets = _prefixed(b"") + _prefixed(shared)
    context = b"\0" + _prefixed(b"") + _prefixed(info)
    labelled = secrets + b"HPKE-v1" + suite + _prefixed(b"secret") + size.to_bytes(2, "big") + context
    text = hashlib.shake_256(labelled).digest(size)
    return text[:32], text[32:44]


def _p384(public: bytes, label: str) -> tuple[bytes, bytes]:
    ephemeral = derive_private_key(int.from_bytes(draw(f"{label} p", 47), "big"), SECP384R1())
    point = EllipticCurvePublicKey.from_encoded_point(SECP384R1(), public)
    text = ephemeral.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    suite = b"KEM" + b"\x00\x11"
    extracted = _extract(b"", suite, b"eae_prk", ephemeral.exchange(ECDH(), point))
    return _expand(extracted, suite, b"shared_secret", text + public, 48), text


def _schedule_p384(shared: bytes, info: bytes) -> tuple[bytes, bytes]:
    suite = b"HPKE" + b"\x00\x11" + b"\x00\x02" + AES_256_GCM.to_bytes(2, "big")
    context = b"\0" + _extract(b"", suite, b"psk_id_hash", b"") + _extract(b"", suite, b"info_hash", info)
    secret = _extract(shared, suite, b"secret", b"")
    return _expand(secret, suite, b"key", context, 32), _expand(secret, suite, b"base_nonce", context, 12)


def _extract(salt: bytes, suite: bytes, label: bytes, material: bytes) -> bytes:
    return HKDF.extract(SHA384(), salt or bytes(48), b"HPKE-v1" + suite + label + material)


def _expand(key: bytes, suite: bytes, label: bytes, info: bytes, size: int) -> bytes:
    return HKDFExpand(SHA384(), size, size.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info).derive(key)


def _prefixed(data: bytes) -> bytes:
    """Return bytes behind their number in two, which is cut short for those that have too many: no valid grant has."""
    return (len(data) & 0xFFFF).to_bytes(2, "big") + data
