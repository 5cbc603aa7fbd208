"""Proofs that a transparency log holds an entry, verified offline.

The formats are those of C2SP: signed notes (c2sp.org/signed-note), checkpoints (c2sp.org/tlog-checkpoint), cosignatures
(c2sp.org/tlog-cosignature) and proofs (c2sp.org/tlog-proof). Trees are hashed as in RFC 6962, section 2.1.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PublicKey

from fastrack._util.public import public
from fastrack._util.shown import shown
from fastrack.errors import FormatError, SignatureError

_PROOF_LIMIT = 1 << 17  # bytes; a signature by ML-DSA-44 takes some 3300
_SIGNATURES_LIMIT = 32  # signed-note asks for 16 at least
_NUMBER_LIMIT = 2**63
_HASH_SIZE = 32
_NOTE, _COSIGNATURE, _ML_DSA_COSIGNATURE = 0x01, 0x04, 0x06  # signature types
_TIMESTAMP_SIZE = 8

_NUMBER = r"0|[1-9][0-9]{0,18}"
_NAME = r"[^\s+]+"  # \s of text is any space of Unicode
_KEY = re.compile(rf"(?P<name>{_NAME})\+(?P<id>[0-9a-f]{{8}})\+(?P<key>[A-Za-z0-9+/]+=*)")
_SIGNATURE = re.compile(rf"— (?P<name>{_NAME}) (?P<signature>[A-Za-z0-9+/]+=*)")
_PROOF = re.compile(
    rf"c2sp\.org/tlog-proof@v1\n(?:extra [A-Za-z0-9+/]*=*\n)?index (?P<index>{_NUMBER})\n"
    r"(?P<hashes>(?:[A-Za-z0-9+/]{43}=\n){0,63})\n(?P<checkpoint>.*)",
    re.DOTALL,
)
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f]")


@public
class TransparencyLog:
    """A transparency log whose proofs are trusted, and witnesses that watch it.

    A log shows the same entries to everyone, and its witnesses see to that. So an owner who signs two manifests of one
    version is found out by those who read the log.

    Parameters
    ----------
    log : str
        The verifier key of the log: its name, the id of the key, and the key, with ``+`` between them. The name is the
        origin of its checkpoints.
    witnesses : iterable of str
        The verifier keys of witnesses.
    quorum : int, optional
        The number of witnesses that have to have signed a checkpoint. By default all.

    Raises
    ------
    FormatError
        If a key has another form, or its id does not fit.
    ValueError
        If a witness is given twice, or the quorum is more than there are.

    Examples
    --------
    >>> import fastrack
    >>> log = fastrack.TransparencyLog("example.com/log+1dde4531+ATtqJ7zOtqQtYqOo0CpvDXNlMhV3HeJDpjrASKGLWdop")
    >>> log
    <TransparencyLog 'example.com/log': 0 of 0 witnesses>
    """

    def __init__(self, log: str, witnesses: Iterable[str] = (), *, quorum: int | None = None) -> None:
        self._log = _NoteKey.parse(log)
        self._witnesses = [_NoteKey.parse(witness) for witness in witnesses]
        if any(witness.kind == _NOTE for witness in self._witnesses):
            raise FormatError("witnesses=: expected keys of cosignatures (type 4 or 6), got one of a log (type 1)")
        if len({witness.public for witness in self._witnesses}) != len(self._witnesses):
            raise ValueError("witnesses=: expected each key once, got one twice")
        self._quorum = len(self._witnesses) if quorum is None else quorum
        if not 0 <= self._quorum <= len(self._witnesses):
            raise ValueError(f"quorum=: expected 0 to {len(self._witnesses)}, the number of witnesses, got {quorum}")

    @property
    def origin(self) -> str:
        """Name of the log."""
        return self._log.name

    def verify(self, proof: bytes, entry: bytes, *, source: str = "the proof") -> Inclusion:
        """Verify that the log holds an entry.

        Parameters
        ----------
        proof : bytes
            The content of a ``.tlog-proof`` file.
        entry : bytes
            The entry, such as `Manifest.log_entry`.
        source : str
            A name of the proof, for errors.

        Returns
        -------
        Inclusion
            The place of the entry, and the checkpoint.

        Raises
        ------
        SignatureError
            If the checkpoint is not signed by the log and enough witnesses, or does not hold the entry.
        FormatError
            If it is no proof.
        """
        if len(proof) > _PROOF_LIMIT:
            raise FormatError(f"{source}: expected a proof of at most {_PROOF_LIMIT} bytes, got a larger one")
        try:
            index, hashes, note = _parse_proof(proof)
            text, signatures = _parse_note(note)
            origin, size, root = _parse_checkpoint(text)
        except ValueError as error:
            raise FormatError(
                f"{source} is no proof of inclusion (c2sp.org/tlog-proof): {error!s:.200}; get it again from the log"
            ) from None
        if origin != self.origin:
            raise SignatureError(f"{source}: expected a checkpoint of {self.origin}, got one of {origin!r:.200}")
        if not self._log.has_signed(text, signatures, origin, size, root, source):
            raise SignatureError(f"{source}: expected a signature by the log {self.origin}, got none")
        signed = [one.name for one in self._witnesses if one.has_signed(text, signatures, origin, size, root, source)]
        if len(signed) < self._quorum:
            raise SignatureError(
                f"{source}: expected signatures by {self._quorum} of the witnesses, got {len(signed)}; get a proof "
                "with a checkpoint that they have signed"
            )
        if root_of(entry, index, size, hashes) != root:
            raise SignatureError(
                f"{source}: expected the entry at index {index} of {origin}, got a proof of another entry; get the one "
                "of this entry"
            )
        return Inclusion(origin, index, size, root, tuple(signed))

    def __repr__(self) -> str:
        return f"<TransparencyLog {self.origin!r}: {self._quorum} of {len(self._witnesses)} witnesses>"


@dataclass(frozen=True, slots=True)
class Inclusion:
    """The place of an entry in a log: index, and size, root hash and witnesses of the checkpoint that proves it."""

    origin: str
    index: int
    size: int
    root: bytes
    witnesses: tuple[str, ...]


def root_of(entry: bytes, index: int, size: int, hashes: list[bytes]) -> bytes | None:
    """Return the root of the tree that a proof of inclusion leads to (RFC 9162, section 2.1.3.2), or None if none."""
    if index >= size:
        return None
    node, last = index, size - 1
    root = hashlib.sha256(b"\0" + entry).digest()
    for sibling in hashes:
        if last == 0:
            return None
        if node & 1 or node == last:
            root = hashlib.sha256(b"\1" + sibling + root).digest()
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            root = hashlib.sha256(b"\1" + root + sibling).digest()
        node, last = node >> 1, last >> 1
    return root if last == 0 else None


@dataclass(frozen=True, slots=True)
class _NoteKey:
    """A verifier key of signed notes: a name, a signature type and a public key."""

    name: str
    id: bytes
    kind: int
    public: bytes
    key: Any

    @classmethod
    def parse(cls, text: str) -> Self:
        match = _KEY.fullmatch(text)
        if match is None:
            raise FormatError(f"expected a verifier key NAME+ID+KEY (c2sp.org/signed-note), got {shown(text, 200)}")
        try:
            content = _decode(match["key"])
            kind, public = content[0], content[1:]
            key: Any
            if kind in {_NOTE, _COSIGNATURE}:
                key = Ed25519PublicKey.from_public_bytes(public)
            elif kind == _ML_DSA_COSIGNATURE:
                key = MLDSA44PublicKey.from_public_bytes(public)
            else:
                raise ValueError(f"expected signature type 1, 4 or 6, got {kind}")  # noqa: TRY301 - told below
        except (ValueError, IndexError) as error:
            raise FormatError(f"verifier key of {match['name']!r:.200}: {error}") from None
        key_id = hashlib.sha256(match["name"].encode() + b"\n" + content).digest()[:4]
        if key_id.hex() != match["id"]:
            raise FormatError(
                f"verifier key of {match['name']!r:.200}: expected the id {key_id.hex()}, got {match['id']}; it was "
                "altered. Get it again from its owner"
            )
        return cls(match["name"], key_id, kind, public, key)

    def has_signed(
        self, text: str, signatures: list[tuple[str, bytes]], origin: str, size: int, root: bytes, source: str
    ) -> bool:
        """Return True if there are signatures by this key, all of which have to hold."""
        own = [signature[4:] for name, signature in signatures if (name, signature[:4]) == (self.name, self.id)]
        for signature in own:
            timestamp, rest = signature[:_TIMESTAMP_SIZE], signature[_TIMESTAMP_SIZE:]
            message = text.encode()
            if self.kind == _NOTE:
                rest = signature
            elif self.kind == _COSIGNATURE:
                message = b"cosignature/v1\ntime %d\n%s" % (int.from_bytes(timestamp, "big"), message)
            else:
                message = self._cosigned(timestamp, origin, size, root)
            try:
                if self.kind != _NOTE and (len(timestamp) != _TIMESTAMP_SIZE or timestamp[0] & 0x80):
                    raise InvalidSignature  # noqa: TRY301 - told below
                self.key.verify(rest, message)
            except InvalidSignature:
                raise SignatureError(
                    f"{source}: a signature by {self.name} does not hold; get the proof again from the log"
                ) from None
        return bool(own)

    def _cosigned(self, timestamp: bytes, origin: str, size: int, root: bytes) -> bytes:
        """Return the `cosigned_message` of a checkpoint, which ML-DSA-44 signs."""
        names = [bytes([len(name)]) + name for name in (self.name.encode(), origin.encode()) if len(name) < 256]
        if len(names) != 2:
            raise InvalidSignature
        return b"".join([b"subtree/v1\n\0", names[0], timestamp, names[1], bytes(8), size.to_bytes(8, "big"), root])


def _parse_proof(proof: bytes) -> tuple[int, list[bytes], str]:
    match = _PROOF.fullmatch(proof.decode())
    if match is None:
        raise ValueError("expected an index, hashes, an empty line and a checkpoint")
    index = _parse_number(match["index"])
    return index, [_decode(line) for line in match["hashes"].split()], match["checkpoint"]


def _parse_note(note: str) -> tuple[str, list[tuple[str, bytes]]]:
    """Return the text and the signatures of a signed note."""
    text, gap, lines = note.rpartition("\n\n")
    if not gap or not lines.endswith("\n") or _CONTROL.search(note):
        raise ValueError("expected a text, an empty line and signatures")
    signatures = []
    for line in lines[:-1].split("\n"):
        match = _SIGNATURE.fullmatch(line)
        if match is None:
            raise ValueError(f"expected a line with a signature, got {line!r:.80}")
        signatures.append((match["name"], _decode(match["signature"])))
    if len(signatures) > _SIGNATURES_LIMIT:
        raise ValueError(f"expected {_SIGNATURES_LIMIT} signatures at most, got {len(signatures)}")
    return f"{text}\n", signatures


def _parse_checkpoint(text: str) -> tuple[str, int, bytes]:
    """Return the origin, the size and the root hash in the text of a checkpoint. Lines after them are ignored."""
    lines = text.split("\n")[:-1]
    if len(lines) < 3 or not all(lines):
        raise ValueError("expected a checkpoint of three lines or more, and none empty")
    root = _decode(lines[2])
    if len(root) != _HASH_SIZE:
        raise ValueError(f"expected a root hash of {_HASH_SIZE} bytes, got {len(root)}")
    return lines[0], _parse_number(lines[1]), root


def _parse_number(text: str) -> int:
    if re.fullmatch(_NUMBER, text) is None or int(text) >= _NUMBER_LIMIT:
        raise ValueError(f"expected a decimal number below 2**63, got {shown(text, 40)}")
    return int(text)


def _decode(text: str) -> bytes:
    """Decode base64 that has one form only."""
    content = base64.b64decode(text, validate=True)
    if base64.b64encode(content).decode() != text:
        raise ValueError("expected base64 in canonical form")
    return content
