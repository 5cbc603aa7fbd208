"""Another verifier of chains, to compare fastrack's with: that of cryptography, which knows no RSASSA-PSS."""

from unittest.mock import patch

from cryptography.x509 import BasicConstraints, verification

from fastrack import AttestationError
from fastrack.attest._formats import x509


def verify_chain(certificates, *, now, **options):
    """Verify the links of a chain with only cryptography, and roots, times and constraints by both."""
    with patch.object(x509, "_find_problem", lambda *_: None):
        chain = x509.verify_chain(certificates, now=now, **options)
    extensions = verification.ExtensionPolicy
    authorities = extensions.permit_all().require_present(BasicConstraints, verification.Criticality.AGNOSTIC, None)
    verifier = (
        verification.PolicyBuilder()
        .store(verification.Store([chain.root]))
        .time(now)
        .max_chain_depth(len(chain.certificates))
        .extension_policies(ca_policy=authorities, ee_policy=extensions.permit_all())
        .build_client_verifier()
    )
    try:
        found = verifier.verify(chain.leaf, list(chain.certificates[1:-1])).chain
    except (verification.VerificationError, ValueError) as error:
        reason = str(error)
        raise AttestationError(reason, evidence="chain", field="path", wanted="one", found="none") from None
    if tuple(found) != chain.certificates:
        raise AttestationError("another path", evidence="chain", field="path", wanted="this one", found="another")
    return chain
