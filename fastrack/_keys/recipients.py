"""Encrypt short secrets to public keys by HPKE (RFC 9180), and to passphrases by Argon2id (RFC 9106).

The suites are MLKEM768_X25519 with SHAKE256 and AES-256-GCM, which resists quantum computers, and P-384 with
HKDF-SHA-384 and AES-256-GCM, which has algorithms of NIST only. Base mode encrypts one message and does not
authenticate the sender, so documents with a ciphertext are signed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec, mlkem, x25519
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, MLKEM768X25519PrivateKey, MLKEM768X25519PublicKey, Suite
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fastrack._crypto.secret_bytes import SecretBytes
from fastrack._keys.key_files import PublicKey, SecretKey
from fastrack._util.shown import shown
from fastrack.errors import FormatError, GrantError

_MLKEM_SEED = 64  # bytes; FIPS 203, d || z
_MLKEM_PUBLIC = 1184
_X25519 = 32
_P384 = 48
_TAG = 16


@dataclass(frozen=True, slots=True)
class _Algorithm:
    """One kind of encryption keys."""

    suite: Suite
    generate: Callable[[], Any]
    read_secret: Callable[[bytes], Any]
    read_public: Callable[[bytes], Any]


class _HybridSecret:
    """A key pair of MLKEM768_X25519, with its bytes, which the class of cryptography does not expose."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != _MLKEM_SEED + _X25519:
            raise ValueError(f"expected {_MLKEM_SEED + _X25519} bytes, got {len(secret)}")
        first = mlkem.MLKEM768PrivateKey.from_seed_bytes(secret[:_MLKEM_SEED])
        second = x25519.X25519PrivateKey.from_private_bytes(secret[_MLKEM_SEED:])
        self.secret = secret
        self.public = first.public_key().public_bytes_raw() + second.public_key().public_bytes_raw()
        self.key = MLKEM768X25519PrivateKey(first, second)


class _CurveSecret:
    """A key pair of P-384, with its bytes."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != _P384:
            raise ValueError(f"expected {_P384} bytes, got {len(secret)}")
        self.key = ec.derive_private_key(int.from_bytes(secret), ec.SECP384R1())
        self.secret = secret
        self.public = self.key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)


def _generate_curve_secret() -> _CurveSecret:
    number = ec.generate_private_key(ec.SECP384R1()).private_numbers().private_value
    return _CurveSecret(number.to_bytes(_P384))


def _read_hybrid_public(public: bytes) -> MLKEM768X25519PublicKey:
    if len(public) != _MLKEM_PUBLIC + _X25519:
        raise ValueError(f"expected {_MLKEM_PUBLIC + _X25519} bytes")
    return MLKEM768X25519PublicKey(
        mlkem.MLKEM768PublicKey.from_public_bytes(public[:_MLKEM_PUBLIC]),
        x25519.X25519PublicKey.from_public_bytes(public[_MLKEM_PUBLIC:]),
    )


def _read_curve_public(public: bytes) -> ec.EllipticCurvePublicKey:
    if len(public) != 2 * _P384 + 1:
        raise ValueError(f"expected an uncompressed point of {2 * _P384 + 1} bytes, got {len(public)}")
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), public)


_ALGORITHMS = {
    "MLKEM768_X25519": _Algorithm(
        Suite(KEM.MLKEM768_X25519, KDF.SHAKE256, AEAD.AES_256_GCM),
        lambda: _HybridSecret(os.urandom(_MLKEM_SEED + _X25519)),
        _HybridSecret,
        _read_hybrid_public,
    ),
    "P-384": _Algorithm(
        Suite(KEM.P384, KDF.HKDF_SHA384, AEAD.AES_256_GCM),
        _generate_curve_secret,
        _CurveSecret,
        _read_curve_public,
    ),
}

ALGORITHMS = frozenset(_ALGORITHMS)
INFO_LIMITS = {"MLKEM768_X25519": 65535}  # bytes, whose number HPKE with SHAKE256 writes in two
"""The largest `info` of those algorithms that have a limit."""


class Recipient(PublicKey):
    """A public key that secrets are encrypted to. `Recipient.load` reads one; an `Identity` has one.

    Parameters
    ----------
    algorithm : {"MLKEM768_X25519", "P-384"}
        The key encapsulation mechanism.
    public : bytes
        The public keys of ML-KEM-768 and X25519, 1216 bytes, or an uncompressed point of P-384, 97 bytes.
    name : str
        A name for people.

    Raises
    ------
    FormatError
        If `public` is not a public key of `algorithm`.

    Examples
    --------
    >>> from fastrack.grants import Identity, Recipient
    >>> alice = Identity.generate(name="alice")
    >>> Recipient.parse(str(alice.recipient)) == alice.recipient
    True
    """

    __slots__ = ()

    _option = "--identity"
    _readers = MappingProxyType({name: kind.read_public for name, kind in _ALGORITHMS.items()})

    def encrypt(self, secret: bytes | bytearray | memoryview, info: bytes) -> bytes:
        """Return a secret encrypted to this key: encapsulated key || ciphertext || tag. `info` is authenticated."""
        return _ALGORITHMS[self.algorithm].suite.encrypt(secret, self._key, info)


class Identity(SecretKey):
    """A secret key that decrypts secrets encrypted to its `recipient`. `generate` and `load` make one.

    It can be neither pickled nor copied.

    Examples
    --------
    >>> from fastrack.grants import Identity
    >>> alice = Identity.generate("P-384", name="alice")
    >>> alice.decrypt(alice.recipient.encrypt(b"secret", b"context"), b"context")
    b'secret'
    """

    __slots__ = ("_key", "recipient")

    _option = "--identity"
    _readers = MappingProxyType({name: kind.read_secret for name, kind in _ALGORITHMS.items()})

    def __init__(self, algorithm: str, key: Any, name: str = "") -> None:
        self._key = key
        self.recipient = Recipient(algorithm, key.public, name)

    @classmethod
    def generate(cls, algorithm: str = "MLKEM768_X25519", *, name: str = "") -> Self:
        """Generate a new key pair.

        Parameters
        ----------
        algorithm : {"MLKEM768_X25519", "P-384"}
            The key encapsulation mechanism: a hybrid that resists quantum computers, or a NIST curve alone.
        name : str
            A name for people: up to 64 characters of printable ASCII.

        Raises
        ------
        ValueError
            If `algorithm` is unknown.
        """
        if algorithm not in _ALGORITHMS:
            raise ValueError(f"expected an algorithm of {', '.join(_ALGORITHMS)}, got {shown(algorithm)}")
        return cls(algorithm, _ALGORITHMS[algorithm].generate(), name)

    @property
    def _public(self) -> Recipient:
        return self.recipient

    def _secret_bytes(self) -> bytes:
        return bytes(self._key.secret)

    def decrypt(self, ciphertext: bytes, info: bytes) -> bytes:
        """Return the secret in a ciphertext of `Recipient.encrypt`.

        Raise GrantError if the ciphertext was altered, or encrypted to another key or with other `info`.
        """
        try:
            return _ALGORITHMS[self.recipient.algorithm].suite.decrypt(ciphertext, self._key.key, info)
        except InvalidTag:
            raise GrantError(
                f"opening a grant failed: expected a ciphertext for {self.recipient!r}, got one that does not "
                "authenticate; get the grant again from its owner"
            ) from None


@dataclass(frozen=True, slots=True)
class PassphraseParameters:
    """Parameters of Argon2id (RFC 9106, section 4, second recommendation)."""

    salt: bytes
    iterations: int = 3
    lanes: int = 4
    memory: int = 64 * 1024  # KiB

    def check(self, most: int = 16 << 20) -> None:
        """Refuse parameters that are weaker than the defaults, or with more than `most` KiB times iterations.

        Raise FormatError if a parameter is out of bounds.
        """
        if not (
            all(type(number) is int for number in (self.iterations, self.lanes, self.memory))
            and len(self.salt) == 16
            and 3 <= self.iterations <= 16
            and 1 <= self.lanes <= 16
            and 64 * 1024 <= self.memory <= 1024 * 1024
            and self.iterations * self.memory <= most
        ):
            raise FormatError("expected parameters of Argon2id within bounds, got others")


def encrypt_to_passphrase(
    secret: bytes | memoryview, passphrase: str | bytes, info: bytes
) -> tuple[PassphraseParameters, bytes]:
    """Return fresh parameters, and a secret encrypted under the key that Argon2id derives from a passphrase.

    AES-256-GCM makes the ciphertext and the tag. The nonce is zero: the key is used once, since its salt is random.
    """
    parameters = PassphraseParameters(os.urandom(16))
    return parameters, _passphrase_cipher(passphrase, parameters).encrypt(bytes(12), bytes(secret), info)


def decrypt_with_passphrase(
    ciphertext: bytes, passphrase: str | bytes, parameters: PassphraseParameters, info: bytes
) -> SecretBytes:
    """Return the secret in a ciphertext of `encrypt_to_passphrase`.

    Raise FormatError if the parameters are out of bounds. Raise GrantError if the passphrase is wrong, or the
    ciphertext, parameters or `info` were altered.
    """
    parameters.check()
    secret = SecretBytes(max(0, len(ciphertext) - _TAG))
    try:
        _passphrase_cipher(passphrase, parameters).decrypt_into(bytes(12), ciphertext, info, secret)
    except InvalidTag:
        raise GrantError("opening a grant failed: expected its passphrase, got another one; try again") from None
    return secret


def _passphrase_cipher(passphrase: str | bytes, parameters: PassphraseParameters) -> AESGCM:
    key = SecretBytes(32)
    Argon2id(
        salt=parameters.salt,
        length=len(key),
        iterations=parameters.iterations,
        lanes=parameters.lanes,
        memory_cost=parameters.memory,
    ).derive_into(passphrase.encode(errors="surrogatepass") if isinstance(passphrase, str) else passphrase, key)
    return AESGCM(key)
