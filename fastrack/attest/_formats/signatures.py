"""Verify ECDSA signatures that consist of two integers of fixed size, as hardware makes them."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, SHA384

from fastrack.attest._errors import malformed, refused
from fastrack.attest._formats.binary import ByteOrder

_CURVES: dict[str, tuple[type[ec.EllipticCurve], int, type[SHA256 | SHA384]]] = {
    "P-256": (ec.SECP256R1, 32, SHA256),
    "P-384": (ec.SECP384R1, 48, SHA384),
}


def load_point(curve: str, point: bytes, *, evidence: str, field: str) -> ec.EllipticCurvePublicKey:
    """Load a public key of "P-256" or "P-384" that is given as its two coordinates, big-endian."""
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(_CURVES[curve][0](), b"\x04" + point)
    except (ValueError, UnsupportedAlgorithm):
        raise malformed(evidence, field, None, wanted=f"a point of the curve {curve}", found=point) from None


def verify_ecdsa(
    key: object, signature: bytes, data: bytes, *, curve: str, evidence: str, field: str, byteorder: ByteOrder = "big"
) -> None:
    """Verify an ECDSA signature r || s over `data`, with SHA-256 for "P-256" and SHA-384 for "P-384".

    The key must be one of the curve that the structure prescribes. r and s have the size of its coordinates each, in
    `byteorder`. `evidence` and `field` name the structure and the signature in the error.
    """
    kind, size, algorithm = _CURVES[curve]
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, kind):
        raise refused(
            evidence,
            f"key of the {field}",
            wanted=f"an ECDSA key of the curve {curve}",
            found=type(key).__name__ if not isinstance(key, ec.EllipticCurvePublicKey) else key.curve.name,
            advice="Ask for evidence with the certificates that belong to it.",
        )
    if len(signature) != 2 * size:
        raise malformed(evidence, field, None, wanted=f"{2 * size} bytes", found=f"{len(signature)} bytes")
    numbers = (int.from_bytes(part, byteorder) for part in (signature[:size], signature[size:]))
    try:
        key.verify(encode_dss_signature(*numbers), data, ec.ECDSA(algorithm()))
    except InvalidSignature:
        raise refused(
            evidence,
            field,
            wanted=f"an ECDSA signature on {curve} by the key above it in the chain",
            found="one that does not hold",
            advice="The evidence was altered or is of another machine; ask for it again.",
        ) from None
