"""Verify chains of ECDSA certificates link by link, with the links that chains have in common verified once.

pyca's verifier, which `verify_chain` uses, can neither keep the links above a device, which eight GPUs of a machine
have in common, nor take NVIDIA's reference manifests: their authorities write dates before 2050 as GeneralizedTime,
against RFC 5280, section 4.1.2.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from itertools import pairwise

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.x509.oid import ExtensionOID, SignatureAlgorithmOID

from fastrack.attest._errors import refused
from fastrack.attest._formats.roots import Roots
from fastrack.attest._formats.x509 import VerifiedChain, _check_profile, common_name

_ALGORITHMS = {
    SignatureAlgorithmOID.ECDSA_WITH_SHA256,
    SignatureAlgorithmOID.ECDSA_WITH_SHA384,
    SignatureAlgorithmOID.ECDSA_WITH_SHA512,
}
_KNOWN_CRITICAL = {ExtensionOID.BASIC_CONSTRAINTS, ExtensionOID.KEY_USAGE}
_AGAIN = "Ask for the evidence again, with the certificates that belong to it."


def verify_ecdsa_chain(
    certificates: Sequence[x509.Certificate], *, roots: Roots, now: datetime, evidence: str
) -> VerifiedChain:
    """Verify a chain as `verify_chain` does, without pyca's verifier. The pinned root's own signature is not needed.

    Raises
    ------
    AttestationError
        If a signature, name, validity period, constraint or the root is wrong.
    ValueError
        If `now` has no time zone.
    """
    chain = _check_profile(certificates, roots, now, evidence)
    for certificate, issuer in pairwise(chain.certificates):
        problem = _find_problem(certificate, issuer)
        if problem is not None:
            raise refused(
                evidence,
                "certificates",
                wanted=f"{common_name(certificate.subject)!r} issued by {common_name(issuer.subject)!r}",
                found=problem,
                advice=_AGAIN,
            )
    return chain


@lru_cache(maxsize=256)
def _find_problem(certificate: x509.Certificate, issuer: x509.Certificate) -> str | None:
    """Return why an issuer did not issue a certificate; None if it did. That depends on nothing else, and is kept."""
    if certificate.signature_algorithm_oid not in _ALGORITHMS:
        return "a signature by another algorithm than ECDSA"
    for extension in certificate.extensions:
        if extension.critical and extension.oid not in _KNOWN_CRITICAL:
            return f"the critical extension {extension.oid.dotted_string}"
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm) as error:
        return str(error) or "a signature that does not hold"
    return None
