"""Sign documents, and verify them: Ed25519 (RFC 8032) or ML-DSA-65 (FIPS 204), in DSSE envelopes.

An envelope is a JSON object with the payload in base64, its type, and signatures over both. Version 1.0 of the Dead
Simple Signing Envelope defines it; in-toto and Sigstore use it too.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey, MLDSA65PublicKey

from fastrack._documents.canonical import decode_bytes, encode, encode_bytes, require
from fastrack._documents.fields import TEXT, Field, FieldError
from fastrack._documents.strict import parse_strict
from fastrack._keys.key_files import PublicKey, SecretKey
from fastrack._util.gate import admit
from fastrack._util.rights import open_own
from fastrack._util.shown import shown
from fastrack.errors import FormatError, SignatureError

_SIGNATURES_LIMIT = 16
_PRIME = 2**255 - 19  # RFC 8032, section 5.1, as is the next
_CURVE = -121665 * pow(121666, -1, _PRIME)


def _read_ed25519(public: bytes) -> Ed25519PublicKey:
    """Read a public key, and refuse points of small order, by which one signature holds for many documents.

    Of -x^2 + y^2 = 1 + d x^2 y^2 they are those with x = 0, with y = 0, and, of order 8, with x^2 = -y^2.
    """
    key = Ed25519PublicKey.from_public_bytes(public)
    y = int.from_bytes(public, "little") & (1 << 255) - 1  # without the sign of x; an encoding may exceed the prime
    if y * (y**2 - 1) * (_CURVE * y**4 + 2 * y**2 - 1) % _PRIME == 0:
        raise ValueError("it is a point of small order, by which anyone can sign")
    return key


def _read_mldsa(public: bytes) -> MLDSA65PublicKey:
    """Read a public key, and refuse t1 = 0, under which a signature needs no secret (FIPS 204, algorithm 8)."""
    key = MLDSA65PublicKey.from_public_bytes(public)
    if not any(public[32:]):  # behind the seed of the matrix
        raise ValueError("its t1 is zero, by which anyone can sign")
    return key


_GENERATE: dict[str, Callable[[], Any]] = {
    "Ed25519": Ed25519PrivateKey.generate,
    "ML-DSA-65": MLDSA65PrivateKey.generate,
}
_READ_SECRET: dict[str, Callable[[bytes], Any]] = {
    "Ed25519": Ed25519PrivateKey.from_private_bytes,
    "ML-DSA-65": MLDSA65PrivateKey.from_seed_bytes,
}
_READ_PUBLIC: dict[str, Callable[[bytes], Any]] = {
    "Ed25519": _read_ed25519,
    "ML-DSA-65": _read_mldsa,
}


class Verifier(PublicKey):
    """A public key that verifies signatures. `Verifier.load` reads one; a `Signer` has one.

    Parameters
    ----------
    algorithm : {"Ed25519", "ML-DSA-65"}
        The algorithm of the signatures.
    public : bytes
        The public key: 32 bytes for Ed25519, 1952 for ML-DSA-65.
    name : str
        A name for people, which is not authenticated.

    Raises
    ------
    FormatError
        If `public` is not a public key of `algorithm`.

    Examples
    --------
    >>> from fastrack.grants import Signer, Verifier
    >>> verifier = Signer.generate(name="owner").verifier
    >>> Verifier.parse(str(verifier)) == verifier
    True
    """

    __slots__ = ()

    _option = "--signer"
    _readers = MappingProxyType(_READ_PUBLIC)
    _open = staticmethod(open_own)  # the file decides which signatures are trusted

    def verify(self, signature: bytes, message: bytes) -> None:
        """Verify a signature over a message.

        Raise SignatureError if the signature is wrong.
        """
        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            raise SignatureError(
                f"verifying a signature failed: expected one by {self.algorithm} key {self.id}, got one that does not "
                "hold; get the document again from its owner"
            ) from None


def _read_verifier(value: object) -> Verifier:
    """Read the line of a public file, without the name that could stand there, as it is not authenticated."""
    with suppress(FormatError):
        verifier = Verifier.parse(TEXT.read(value))
        if str(verifier) == value and not verifier.name:
            return verifier
    raise FieldError(f"a public key of {' or '.join(_READ_PUBLIC)} without a name", "another text")


VERIFIER = Field(_read_verifier, lambda verifier: str(Verifier(verifier.algorithm, verifier.public)))
"""The field of a public key in a document."""


class Signer(SecretKey):
    """A secret key that signs. `generate` and `load` make one.

    The secret is in OpenSSL's memory, which is cleared when the object is deleted. Signers cannot be pickled or copied.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from fastrack.grants import Signer
    >>> signer = Signer.generate("ML-DSA-65")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     signer.save(Path(folder) / "owner.signer")
    ...     Signer.load(Path(folder) / "owner.signer").verifier == signer.verifier
    True
    """

    __slots__ = ("_key", "verifier")

    _option = "--signer"
    _readers = MappingProxyType(_READ_SECRET)

    def __init__(self, algorithm: str, key: Any, name: str = "") -> None:
        self._key = key
        self.verifier = Verifier(algorithm, key.public_key().public_bytes_raw(), name)

    @classmethod
    def generate(cls, algorithm: str = "Ed25519", *, name: str = "") -> Self:
        """Generate a new key.

        Parameters
        ----------
        algorithm : {"Ed25519", "ML-DSA-65"}
            The algorithm; ML-DSA-65 resists quantum computers, with signatures of 3309 bytes instead of 64.
        name : str
            A name for people: up to 64 characters of printable ASCII.

        Raises
        ------
        ValueError
            If `algorithm` is unknown.
        """
        if algorithm not in _GENERATE:
            raise ValueError(f"expected an algorithm of {', '.join(_GENERATE)}, got {shown(algorithm)}")
        return cls(algorithm, _GENERATE[algorithm](), name)

    @property
    def _public(self) -> Verifier:
        return self.verifier

    def _secret_bytes(self) -> bytes:
        return bytes(self._key.private_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """Return the signature over a message."""
        signature: bytes = self._key.sign(message)
        return signature


def sign_envelope(payload: bytes, payload_type: str, signers: Iterable[Signer]) -> bytes:
    """Return a DSSE envelope with a signature of each signer."""
    message = _pre_authentication_encoding(payload_type, payload)
    signatures = [(signer.verifier.id, signer.sign(message)) for signer in signers]
    return _write_envelope(base64.b64encode(payload), payload_type, signatures)


def _write_envelope(payload: bytes, payload_type: str, signatures: Iterable[tuple[str, bytes]]) -> bytes:
    """Return an envelope of a payload in base64."""
    entries = [{"keyid": key_id, "sig": encode_bytes(signature)} for key_id, signature in signatures]
    # Joined by hand: for a large payload `json` would take longer than the signature.
    head = encode({"payloadType": payload_type, "signatures": entries}, end=b"\n")
    return b'{"payload":"%s",%s' % (payload, head[1:])


def open_envelope(
    envelope: bytes, payload_type: str, trusted: Verifier | Iterable[Verifier], *, source: str = "the document"
) -> tuple[bytes, Verifier]:
    """Return the payload of a DSSE envelope after verification, and the trusted key that signed it.

    Raise FormatError if `envelope` is no envelope, or one of another type. Raise SignatureError if it has no valid
    signature of a trusted key.
    """
    return _verify_envelope(envelope, payload_type, trusted, source)[:2]


def open_canonical(
    envelope: bytes, payload_type: str, trusted: Verifier | Iterable[Verifier], *, source: str
) -> tuple[bytes, Verifier]:
    """Return what `open_envelope` does, of an envelope with one signature in the one form that `sign_envelope` writes.

    No byte of it can be changed unheard. Raise FormatError if it has another form.
    """
    payload, signer, text, signatures = _verify_envelope(envelope, payload_type, trusted, source)
    if _write_envelope(text.encode(), payload_type, [(signer.id, signatures[0])]) != envelope:
        raise FormatError(f"{source}: expected one signature, in canonical form, got another form. Get it again")
    return payload, signer


def _verify_envelope(
    envelope: bytes, payload_type: str, trusted: Verifier | Iterable[Verifier], source: str
) -> tuple[bytes, Verifier, str, list[bytes]]:
    """Return the payload of an envelope, the trusted key that signed it, the payload in base64, and all signatures."""
    payload, text, found_type, signatures = _parse_envelope(envelope, source)
    if found_type != payload_type:
        raise FormatError(f"{source}: expected a document of type {payload_type}, got {found_type!r:.80}")
    message = _pre_authentication_encoding(payload_type, payload)
    verifiers = (trusted,) if isinstance(trusted, Verifier) else tuple(trusted)
    for verifier in verifiers:
        for signature in signatures:
            try:
                verifier.verify(signature, message)
            except SignatureError:
                continue
            return payload, verifier, text, signatures
    names = ", ".join(verifier.id for verifier in verifiers) or "none was named"
    raise SignatureError(
        f"{source}: expected a signature by a trusted key ({names}), got none that holds; it was altered, or signed by "
        "another key. Get it again from its owner"
    )


def read_unverified_payload(envelope: bytes, *, source: str = "the document") -> bytes:
    """Return the unverified payload of a DSSE envelope. It must not be trusted.

    Raise FormatError if `envelope` is no envelope.
    """
    return _parse_envelope(envelope, source)[0]


def _parse_envelope(envelope: bytes, source: str) -> tuple[bytes, str, str, list[bytes]]:
    """Return the payload, the same in base64, its type and the signatures."""
    try:
        text, rest = _cut_payload(bytes(envelope))
        admit(rest, "envelope")
        document = parse_strict(str(rest, "utf-8"))
        if text is not None:
            require("payload" not in document, "payload")  # another parser may take that one
        else:
            text = document["payload"]
        payload = decode_bytes(text)
        payload_type = document["payloadType"]
        signatures = [decode_bytes(entry["sig"]) for entry in document["signatures"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{source} is not a signed document: expected a DSSE envelope in JSON, got something else "
            f"({type(error).__name__}). Get it again from its owner"
        ) from None
    if not isinstance(payload_type, str) or len(signatures) > _SIGNATURES_LIMIT:
        raise FormatError(
            f"{source} is not a signed document: expected a type and at most {_SIGNATURES_LIMIT} signatures"
        )
    return payload, text, payload_type, signatures


def _cut_payload(envelope: bytes) -> tuple[str | None, bytes]:
    """Cut the payload out of an envelope that begins with it, as `sign_envelope` writes them: JSON has no part in it.

    Return its base64, and the envelope without it; (None, envelope) where JSON has to say where it ends.
    """
    begin = b'{"payload":"'
    if envelope.startswith(begin):
        end = envelope.find(b'",', len(begin))
        text = envelope[len(begin) : end]
        if end > 0 and b"\\" not in text and b'"' not in text:
            return text.decode("ascii"), b"{" + envelope[end + 2 :]
    return None, envelope


def _pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes to sign: PAE of DSSE 1.0, "protocol"."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
