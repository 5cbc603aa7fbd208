"""The vectors of C2SP chunked encryption with AES-GCM that the package `cryptography_vectors` holds.

Their keys are derived with SHA-256, where Cobblestone has SHA-512; all else is the same. So what looks at a header puts
the other hash in its place, with `derive_as_published`. Cobblestone's own headers are compared with those of
`cryptography.cobblestone`.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

import pytest
from cryptography.hazmat.primitives.hashes import SHA256

from fastrack._crypto import derivation, engine, openssl
from fastrack.errors import FormatError
from fastrack.format import HEADER_SIZE, raw_plain_size

BITS = {"AEAD_AES_128_GCM": 128, "AEAD_AES_256_GCM": 256}


@dataclass(frozen=True, slots=True)
class Vector:
    """One case. The last four are None where the file does not give them.

    A case without a message key is one whose header must be refused. One that is not valid and yet has a size and a
    digest of plaintext has a prefix of whole chunks that are valid, and these two speak of that.
    """

    name: str
    bits: int
    valid: bool
    key: bytes
    context: bytes
    message: bytes
    plain_size: int | None
    plain_sha256: bytes | None
    aead_key: bytes | None
    base_nonce: bytes | None

    @property
    def has_good_header(self):
        return self.aead_key is not None

    @property
    def has_valid_prefix(self):
        return not self.valid and self.plain_size is not None


@cache
def load_vectors():
    """Load every case that has AES for its cipher."""
    text = (resources.files("cryptography_vectors") / "chunked-encryption/vectors.json").read_text()
    return tuple(_parse(case) for case in json.loads(text)["vectors"] if case["aead"] in BITS)


def published(wanted=lambda vector: True):
    """List those cases that satisfy `wanted`."""
    return [vector for vector in load_vectors() if wanted(vector)]


def is_a_run(vector):
    """Check that its chunks have the sizes of a message's; the host refuses any other before a kernel runs."""
    try:
        raw_plain_size(len(vector.message) - HEADER_SIZE)
    except FormatError:
        return False
    return vector.has_good_header


@pytest.fixture
def derive_as_published(monkeypatch):
    """Derive keys with the hash of the vectors, which OpenSSL can replace."""
    engine.make_engine("openssl", 1)  # its known answers first, with its own hash: what they say is kept
    monkeypatch.setattr(openssl, "_SHA512", SHA256())
    monkeypatch.setattr(derivation, "make_engine", lambda *_: openssl.OpenSSLEngine())


def _parse(case):
    def unhex(name):
        return bytes.fromhex(case[name]) if name in case else None

    message = base64.b64decode(case["ciphertext"] or "")
    return Vector(
        name=case["name"],
        bits=BITS[case["aead"]],
        valid=case["expect"] == "success",
        key=bytes.fromhex(case["key"]),
        context=case["context"].encode(),
        message=zlib.decompress(message) if case.get("compressed") else message,
        plain_size=case.get("payload_length"),
        plain_sha256=unhex("payload_sha256"),
        aead_key=unhex("aead_key"),
        base_nonce=unhex("base_nonce"),
    )
