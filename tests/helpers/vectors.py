"""Published test vectors that do not travel with the repository, where they are at hand."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[3] / "shared/vectors/c2sp_chunked_encryption_aes_128_gcm_test.json"


@dataclass(frozen=True, slots=True)
class Vector:
    """One case of Wycheproof's Cobblestone-128 vectors. The last four are None where the file does not give them."""

    number: int
    comment: str
    flags: frozenset[str]
    valid: bool
    key: bytes
    context: bytes
    message: bytes
    plain_size: int | None
    plain_sha512: bytes | None
    aead_key: bytes | None
    base_nonce: bytes | None


def cobblestone_128():
    """Every vector as a pytest parameter; one that is skipped where the file is absent."""
    if not _FILE.exists():
        reason = "the Cobblestone-128 vectors are not at hand"
        return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason=reason))]
    groups = json.loads(_FILE.read_text())["testGroups"]
    vectors = [_parse(case) for group in groups for case in group["tests"]]
    return [pytest.param(vector, id=f"{vector.number}-{vector.comment.replace(' ', '-')}") for vector in vectors]


def _parse(case):
    def unhex(name):
        return bytes.fromhex(case[name]) if name in case else None

    return Vector(
        number=case["tcId"],
        comment=case["comment"],
        flags=frozenset(case["flags"]),
        valid=case["result"] == "valid",
        key=bytes.fromhex(case["key"]),
        context=bytes.fromhex(case["ctx"]),
        message=zlib.decompress(bytes.fromhex(case["ct"])),
        plain_size=case.get("msgLength"),
        plain_sha512=unhex("msgSha512"),
        aead_key=unhex("aeadKey"),
        base_nonce=unhex("baseNonce"),
    )
