"""Verify the ECDSA signatures of hardware: two integers of fixed size."""

from dataclasses import dataclass
from typing import Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, HashAlgorithm

from fastrack.attest._errors import malformed, refused


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve and its hash, prescribed by a structure. Coordinates have `size` bytes each."""

    name: str
    kind: type[ec.EllipticCurve]
    size: int
    algorithm: type[HashAlgorithm]

    def load_point(self, point: bytes, *, evidence: str, field: str) -> ec.EllipticCurvePublicKey:
        """Load a public key from its two big-endian coordinates."""
        try:
            return ec.EllipticCurvePublicKey.from_encoded_point(self.kind(), b"\x04" + point)
        except (ValueError, UnsupportedAlgorithm):
            raise malformed(evidence, field, None, wanted=f"a point of the curve {self.name}", found=point) from None

    def verify(
        self,
        key: object,
        signature: bytes,
        data: bytes,
        evidence: str,
        field: str = "signature",
        byteorder: Literal["little", "big"] = "big",
    ) -> None:
        """Verify a signature r || s over `data`, in `byteorder`, by a key of this curve."""
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, self.kind):
            wanted = f"an ECDSA key of the curve {self.name}"
            actual = key.curve.name if isinstance(key, ec.EllipticCurvePublicKey) else type(key).__name__
            advice = "Ask for evidence with the certificates that belong to it."
            raise refused(evidence, f"key of the {field}", wanted=wanted, found=actual, advice=advice)
        if len(signature) != 2 * self.size:
            raise malformed(evidence, field, None, wanted=f"{2 * self.size} bytes", found=f"{len(signature)} bytes")
        numbers = (int.from_bytes(part, byteorder) for part in (signature[: self.size], signature[self.size :]))
        try:
            key.verify(encode_dss_signature(*numbers), data, ec.ECDSA(self.algorithm()))
        except InvalidSignature:
            wanted = f"an ECDSA signature on {self.name} by the key above it in the chain"
            advice = "The evidence was altered or is of another machine; ask for it again."
            raise refused(evidence, field, wanted=wanted, found="one that does not hold", advice=advice) from None


P256 = Curve("P-256", ec.SECP256R1, 32, SHA256)
P384 = Curve("P-384", ec.SECP384R1, 48, SHA384)
