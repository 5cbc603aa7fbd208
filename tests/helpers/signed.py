"""Envelopes that are signed as the library signs, of any payload: also of one that no writer makes."""

from fastrack._keys import signing

GRANTS = "application/vnd.fastrack.grants.v1+json"
MANIFEST = "application/vnd.fastrack.manifest.v1+json"


def sign(payload, kind, *signers):
    """Sign a payload of a kind, which is one of those above or any other text."""
    return signing.sign_envelope(payload, kind, signers)


def payload_of(envelope):
    """Return the payload of an envelope, without a look at its signatures."""
    return signing.read_unverified_payload(envelope)
