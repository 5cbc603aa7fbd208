"""Key pairs, and what they sign: section "Key pairs" of the page."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, derive_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from dilithium_py.ml_dsa import ML_DSA_65
from kyber_py.ml_kem import ML_KEM_768

from generator.case import base64_text, draw


@dataclass(frozen=True)
class Pair:
    """Hold a key pair by its algorithm and its secret."""

    algorithm: str
    secret: bytes

    @cached_property
    def public(self) -> bytes:
        """The public key."""
        if self.algorithm == "Ed25519":
            return Ed25519PrivateKey.from_private_bytes(self.secret).public_key().public_bytes_raw()
        if self.algorithm == "ML-DSA-65":
            return bytes(ML_DSA_65.key_derive(self.secret)[0])
        if self.algorithm == "P-384":
            key = derive_private_key(int.from_bytes(self.secret, "big"), SECP384R1())
            return key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
        point = X25519PrivateKey.from_private_bytes(self.secret[64:]).public_key().public_bytes_raw()
        return bytes(ML_KEM_768.key_derive(self.secret[:64])[0]) + point

    @property
    def id(self) -> str:
        """The id of the key pair."""
        text = b"fastrack/public-key-id@1\0" + self.algorithm.encode() + b"\0" + self.public
        return hashlib.sha256(text).hexdigest()[:32]

    @property
    def line(self) -> str:
        """The line of the public file, without a name."""
        return f"fastrack-public-1:{self.algorithm}:{base64_text(self.public)}"

    @property
    def secret_file(self) -> str:
        """The secret file."""
        secret = f"fastrack-secret-1:{self.algorithm}:{self.secret.hex()}"
        return f"# fastrack secret key, {self.algorithm}, id {self.id}\n{secret}\n"

    def sign(self, data: bytes) -> bytes:
        """Return the signature that this key always makes of the data."""
        if self.algorithm == "ML-DSA-65":
            return bytes(ML_DSA_65.sign(ML_DSA_65.key_derive(self.secret)[1], data, deterministic=True))
        return Ed25519PrivateKey.from_private_bytes(self.secret).sign(data)


SIZES = {"Ed25519": 32, "ML-DSA-65": 32, "MLKEM768_X25519": 96, "P-384": 48}


def pair(label: str, algorithm: str = "Ed25519") -> Pair:
    """Return the key pair of a label."""
    secret = draw(f"{algorithm} of {label}", SIZES[algorithm])
    return Pair(algorithm, b"\x7f" + secret[1:] if algorithm == "P-384" else secret)


OWNER = pair("owner")
OWNER_ML = pair("owner", "ML-DSA-65")
STRANGER = pair("stranger")
RECIPIENT = pair("recipient", "MLKEM768_X25519")
RECIPIENT_P384 = pair("recipient", "P-384")
OTHER_RECIPIENT = pair("other recipient", "MLKEM768_X25519")
