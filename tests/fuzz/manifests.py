"""Manifests and anchors: anything at all is either what was signed, or refused as documented."""

import base64
import json
from dataclasses import replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from helpers.signed import MANIFEST, sign

import fastrack
from fastrack import Anchor, AuthenticationError, FormatError, Key, Manifest, SignatureError
from fastrack._sets.entries import PlainEntry, SealedEntry, encode
from fastrack.grants import Signer
from fuzz import mutators
from fuzz.common import FOLDER, attempt, put, require, same_salts

KEY = Key.from_bytes(bytes(range(32)))
OWNER = Signer("Ed25519", Ed25519PrivateKey.from_private_bytes(bytes(32)))
NAME, PLAIN = "data.safetensors", "config.json"


def sealed_file(folder):
    """Write a sealed file that is the same in every run."""
    path = folder / NAME
    tensors = {"x": [1.0, 2.0], "naïve": [[3.0]], "open": [4.0]}
    with same_salts():
        fastrack.save_file({name: np.array(value) for name, value in tensors.items()}, path, KEY, plain=["open"])
    return path


class Manifests:
    """`Manifest`: the signed payload after a byte 1, else the envelope; and the comparison of a file with it."""

    name = "manifest"

    def __init__(self):
        self._file = fastrack.load_file(sealed_file(FOLDER), mapped=False)
        self._entry = SealedEntry.of(self._file)
        entries = {NAME: self._entry, PLAIN: PlainEntry(3, "0" * 64)}
        hashed = {NAME: SealedEntry.of(self._file, digests=True)}
        self._payloads = [self._payload(entries, 1), self._payload(hashed, 3)]
        self._envelopes = [sign(payload, MANIFEST, OWNER) for payload in self._payloads]

    @staticmethod
    def _payload(entries, version):
        return encode(
            {
                "files": {name: entry.members() for name, entry in entries.items()},
                "format": 1,
                "history": [f"{number:064x}" for number in range(version - 1)],
                "issued": "2026-11-22T12:00:00Z",
                "lineage": "5" * 32,
                "version": version,
            }
        )

    def seeds(self):
        return [*(b"\1" + payload for payload in self._payloads), *(b"\0" + one for one in self._envelopes)]

    @staticmethod
    def mutate(data, random):
        if data[:1] != b"\1" or random.random() < 0.2:
            return data[:1] + mutators.mutate_bytes(data[1:], random)
        return data[:1] + _canonical(mutators.mutate_json(data[1:], random))

    def run(self, data):
        is_signed = data[:1] == b"\1"
        envelope = sign(data[1:], MANIFEST, OWNER) if is_signed else data[1:]
        manifest = attempt(lambda: Manifest.from_bytes(envelope, owner=OWNER.verifier), FormatError, SignatureError)
        if manifest is None:
            return
        require(is_signed or envelope in self._envelopes, "a manifest was accepted that nothing signed")
        payload = encode(json.loads(base64.b64decode(json.loads(envelope)["payload"])))
        require(not is_signed or payload == data[1:], "a payload was accepted that is not canonical")
        for name, entry in manifest.files.items():
            require(not name.startswith("/") and ".." not in name.split("/"), f"a name leads elsewhere: {name!r}")
            if isinstance(entry, SealedEntry):
                self._compare(entry)

    def _compare(self, entry):
        try:
            entry.check(self._file)
            for name in entry.plain:
                entry.check_plain(name, self._file.stored(name)[2], self._file.path)
        except AuthenticationError:
            return
        require(replace(entry, digests={}) == self._entry, "a file was taken for another")


def _canonical(text):
    """Write mutated JSON in canonical form, so that what is behind that check is reached."""
    try:
        return encode(json.loads(text))
    except (ValueError, RecursionError):
        return text


class Anchors:
    """`Anchor`, of the content of its file."""

    name = "anchor"

    def seeds(self):
        members = {"anchor": 1, "digest": "1" * 64, "lineage": "2" * 32, "owner": str(OWNER.verifier), "version": 7}
        return [encode(one) + b"\n" for one in (members, {**members, "digest": None, "lineage": None, "version": 0})]

    @staticmethod
    def mutate(data, random):
        if random.random() < 0.3:
            return mutators.mutate_bytes(data, random)
        return _canonical(mutators.mutate_json(data, random)) + b"\n"

    def run(self, data):
        path = put("anchor", data)
        path.chmod(0o600)
        anchor = attempt(lambda: Anchor(path), FormatError)
        if anchor is not None:
            members = {name: getattr(anchor, name) for name in ("digest", "lineage", "version")}
            members |= {"anchor": 1, "owner": str(anchor.owner)}
            is_one = encode(members) + b"\n" == data and 0 <= anchor.version < 2**53
            require(is_one, "an anchor was accepted that is not of the one form")
