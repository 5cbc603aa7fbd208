"""Wycheproof's vectors of Cobblestone, which derive keys with SHA-512 as the format does.

No package has them, so they are read from a folder beside the checkout, or from the one that FASTRACK_VECTORS names.
"""

import json
import os
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(os.environ.get("FASTRACK_VECTORS") or Path(__file__).parents[3] / "shared" / "vectors")
FILES = sorted(FOLDER.glob("c2sp_chunked_encryption_aes_*_gcm_test.json"))


@dataclass(frozen=True, slots=True)
class Vector:
    """One case; `aead_key` and `base_nonce` are None where the header must be refused.

    `size` and `digest` speak of the plaintext, or of the longest prefix of it that whole valid chunks have.
    """

    name: str
    bits: int
    valid: bool
    flags: frozenset
    key: bytes
    context: bytes
    message: bytes
    size: int | None
    digest: bytes | None
    aead_key: bytes | None
    base_nonce: bytes | None


@cache
def load(path):
    groups = json.loads(path.read_text())["testGroups"]
    bits = {"AEAD_AES_128_GCM": 128, "AEAD_AES_256_GCM": 256}
    assert {group["sha"] for group in groups} == {"SHA-512"}
    return [_parse(test, bits[group["aead"]]) for group in groups for test in group["tests"]]


def _parse(test, bits):
    def unhex(name):
        return bytes.fromhex(test[name]) if name in test else None

    return Vector(
        name=f"{test['tcId']} {test['comment']}",
        bits=bits,
        valid=test["result"] == "valid",
        flags=frozenset(test["flags"]),
        key=unhex("key"),
        context=unhex("ctx"),
        message=zlib.decompress(unhex("ct")) if test["ct"] else b"",
        size=test.get("msgLength"),
        digest=unhex("msgSha512"),
        aead_key=unhex("aeadKey"),
        base_nonce=unhex("baseNonce"),
    )
