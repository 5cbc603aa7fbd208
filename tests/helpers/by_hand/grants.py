"""Grants: who may open what, until when, and the key in it."""

import re

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from helpers.by_hand import messages
from helpers.by_hand.documents import (
    RefusedError,
    canonical,
    is_hexadecimal,
    is_number,
    members,
    read_base64,
    read_time,
    require,
)
from helpers.by_hand.keys import open_secret, pair_id
from helpers.by_hand.signed import open_grants_envelope

TYPE = "application/vnd.fastrack.grants.v1+json"
BOUND = ("bits", "expires", "files", "key", "least_version", "lineage", "version")
MEMBERS = "version key bits files lineage least_version expires issued serial recipients"
LEASE, PLACE = ("renew_after", "seconds"), ("gpus", "require")
MORE = {1: (), 2: LEASE, 3: PLACE, 4: (*LEASE, *PLACE)}  # members of versions
COSTS = {"iterations": (3, 17), "lanes": (1, 17), "memory": (65536, (1 << 20) + 1)}
SUITES = {
    "P-384": Suite(KEM.P384, KDF.HKDF_SHA384, AEAD.AES_256_GCM),
    "MLKEM768_X25519": Suite(KEM.MLKEM768_X25519, KDF.SHAKE256, AEAD.AES_256_GCM),
}


def read_grants(content, owners, version=1):
    """Return the payload of a grants file, after its signature was verified. `owners` are lines of public files.

    Grants of version 2 are a lease, of version 3 for confidential GPUs only, and of version 4 both.
    """
    owners = [line.partition(" ")[0] for line in owners]
    payload = members(open_grants_envelope(content, TYPE, owners), " ".join((MEMBERS, *MORE[version])))
    require(is_number(payload["version"]) and payload["version"] == version, f"version {version}")
    if version in {2, 4}:
        require(is_number(payload["seconds"], 2, 31_622_401), "seconds")
        require(is_number(payload["renew_after"], 1, payload["seconds"]), "seconds until a renewal")
    if version in {3, 4}:
        chips = payload["gpus"] or []
        require(payload["require"] == "confidential" and isinstance(chips, list) and len(chips) <= 32, "a place")
        require(all(re.fullmatch("[0-9A-F]{16,40}", chip) for chip in chips), "chips")
    require(is_hexadecimal(payload["key"], 32), "the id of a key")
    require(is_number(payload["bits"]) and payload["bits"] in {128, 256}, "a size")
    require(payload["files"] is None or isinstance(payload["files"], list), "files")
    require(all(is_hexadecimal(each, 32) for each in payload["files"] or []), "ids of files")
    require(payload["lineage"] is None or is_hexadecimal(payload["lineage"], 32), "a lineage")
    require(is_number(payload["least_version"]) and is_number(payload["serial"]), "numbers")
    if payload["expires"] is not None:
        read_time(payload["expires"])
    read_time(payload["issued"])
    recipients = payload["recipients"]
    require(isinstance(recipients, list) and 1 <= len(recipients) <= 4096, "recipients")
    for entry in recipients:
        _check_recipient(entry)
    require(len({entry["id"] for entry in recipients}) == len(recipients), "different recipients")
    return payload


def _check_recipient(entry):
    has_passphrase = entry["algorithm"] == "Argon2id"
    names = "algorithm id name ciphertext" + " salt iterations lanes memory" * has_passphrase
    if has_passphrase or entry["algorithm"] in SUITES:
        members(entry, names)
    else:  # one of a later version, for others
        require(entry.keys() >= set(names.split()), "the members of all entries")
    require(is_hexadecimal(entry["id"], 32), "the id of a recipient")
    require(isinstance(entry["name"], str), "a name")
    read_base64(entry["ciphertext"])
    require(isinstance(entry["algorithm"], str), "an algorithm")
    require(has_passphrase == (entry["id"] == "0" * 32), "zeros for a passphrase")
    if has_passphrase:
        read_base64(entry["salt"], [16])
        require(all(is_number(entry[name], *ends) for name, ends in COSTS.items()), "costs")


def unwrap(grants, secret_file=None, passphrase=None):
    """Return the bytes of the granted key."""
    info = b"fastrack/grant@1\0" + canonical({name: grants[name] for name in BOUND + MORE[grants["version"]]})
    is_bounded = any(entry["algorithm"] == "MLKEM768_X25519" for entry in grants["recipients"])
    require(len(info) <= 65535 or not is_bounded, "constraints of 65,535 bytes at most")
    if passphrase is None:
        private, algorithm, public = open_secret(secret_file)
        wanted = algorithm, pair_id(algorithm, public)
    else:
        wanted = "Argon2id", "0" * 32
    entries = [entry for entry in grants["recipients"] if (entry["algorithm"], entry["id"]) == wanted]
    require(entries, "a grant for this recipient", "grant")
    ciphertext = read_base64(entries[0]["ciphertext"])
    try:
        if passphrase is None:
            key = SUITES[algorithm].decrypt(ciphertext, private, info)
        else:
            key = AESGCM(stretch(entries[0], passphrase)).decrypt(bytes(12), ciphertext, info)
    except (InvalidTag, ValueError):
        raise RefusedError("grant", "a grant that this recipient opens") from None
    require((messages.key_id(key), len(key) * 8) == (grants["key"], grants["bits"]), "the key as named", "grant")
    return key


def stretch(entry, passphrase):
    costs = {"iterations": entry["iterations"], "lanes": entry["lanes"], "memory_cost": entry["memory"]}
    """Return the key that a passphrase gives, by the costs and the salt of an entry."""
    return Argon2id(salt=read_base64(entry["salt"]), length=32, **costs).derive(passphrase.encode())


def read_granted(content, owners, time, secret_file=None, passphrase=None):
    grants = read_grants(content, owners)
    expires = grants["expires"]
    require(expires is None or read_time(time) < read_time(expires), "a grant before its end", "grant")
    key = unwrap(grants, secret_file, passphrase)
    return {"key": key.hex(), **{name: grants[name] for name in ("files", "lineage", "least_version", "expires")}}
