"""Verify stored responses of the Online Certificate Status Protocol (RFC 6960), without asking a responder."""

import hmac
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import pairwise

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, SignatureAlgorithmOID

from fastrack._util.public import public
from fastrack.attest._errors import malformed, refused, require_in_force, require_time_zone
from fastrack.attest._formats import der
from fastrack.attest._formats import x509 as chains
from fastrack.attest._formats.cache import Cache
from fastrack.attest._formats.x509 import quoted_name, read_extension

EVIDENCE = "OCSP response"

_CERTIFICATES_TAG = 0xA0
_RSA = {getattr(SignatureAlgorithmOID, f"RSA_WITH_SHA{size}") for size in (256, 384, 512)}
_RESPONDER_CRITICAL = chains.KNOWN_CRITICAL | {ExtensionOID.EXTENDED_KEY_USAGE}
_FETCH = "Fetch a current response of the responder that the certificate names, and check the time passed as now=."


@public
@dataclass(frozen=True, slots=True)
class VerifiedOcspResponse:
    """A response, by a certificate's issuer or its appointed responder, that the certificate was not revoked.

    The certificate `serial_number` was known to be good at `this_update`; a newer response is available at
    `next_update` at the latest. `fastrack.attest` describes the other times, which include the responder's
    certificate.

    Examples
    --------
    >>> from datetime import UTC, datetime, timedelta
    >>> from fastrack import attest
    >>> start, now = datetime(2026, 5, 31, tzinfo=UTC), datetime(2026, 6, 1, tzinfo=UTC)
    >>> end = now + timedelta(days=6)
    >>> attest.VerifiedOcspResponse(7, start, end, verified_at=now, valid_until=end).age.days
    1
    """

    serial_number: int
    this_update: datetime
    next_update: datetime
    verified_at: datetime
    valid_until: datetime

    @property
    def age(self) -> timedelta:
        """The time from `this_update` to the verification."""
        return self.verified_at - self.this_update


@public
def verify_ocsp_response(
    response: bytes,
    certificate: x509.Certificate,
    issuer: x509.Certificate,
    *,
    now: datetime,
    nonce: bytes | None = None,
    evidence: str = EVIDENCE,
) -> VerifiedOcspResponse:
    """Verify a stored OCSP response that a certificate was not revoked.

    Raise `AttestationError` if it is of another certificate or responder, not in force or altered, or if the
    certificate is revoked or unknown. `fastrack.attest` describes other parameters and errors.

    Parameters
    ----------
    response : bytes
        The response in DER.
    certificate, issuer : cryptography.x509.Certificate
        The certificate, and its issuer's certificate, verified before.
    nonce : bytes, optional
        The nonce that the response must have. Responses that were stored for all clients have none.

    Notes
    -----
    A delegated responder's certificate is not checked for revocation, which RFC 6960, section 4.2.2.2.1, leaves to
    clients if the certificate lacks id-pkix-ocsp-nocheck.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import attest
    >>> attest.verify_ocsp_response(b"no response", None, None, now=datetime(2026, 6, 1, tzinfo=UTC))
    Traceback (most recent call last):
        ...
    fastrack.FormatError: reading the OCSP response failed: expected an X.509 structure as its encoding, got error ...
    """
    verified, single = verify_status(response, certificate, issuer, now=now, nonce=nonce, evidence=evidence)
    if single.certificate_status is not ocsp.OCSPCertStatus.GOOD:
        status = single.certificate_status.name.lower()
        if single.revocation_time_utc is not None:
            status += f" since {single.revocation_time_utc.isoformat()}"
        if single.revocation_reason is not None:
            status += f" ({single.revocation_reason.value})"
        advice = "Do not trust this device, or these reference values."
        raise refused(evidence, f"status of {quoted_name(certificate)}", wanted="good", found=status, advice=advice)
    return verified


def verify_status(
    response: bytes,
    certificate: x509.Certificate,
    issuer: x509.Certificate,
    *,
    now: datetime,
    nonce: bytes | None = None,
    evidence: str = EVIDENCE,
) -> tuple[VerifiedOcspResponse, ocsp.OCSPSingleResponse]:
    """Verify a response as `verify_ocsp_response` does, whatever it says of the certificate, and return that too."""
    require_time_zone(now)
    loaded = _load(bytes(response), evidence=evidence)
    responder = _verify_responder(loaded, issuer, evidence=evidence)
    if responder != issuer:
        subject = f"{quoted_name(responder)} with a validity of "
        validity = responder.not_valid_before_utc, responder.not_valid_after_utc
        require_in_force(evidence, "responder", *validity, now, _FETCH, subject=subject)
    if nonce is not None:
        _require_nonce(loaded.response, nonce, evidence)
    (single,) = loaded.response.responses
    if not _is_about(single, certificate, issuer):
        wanted = f"the status of {quoted_name(certificate)}, serial number {certificate.serial_number:x}"
        other, advice = f"that of serial number {single.serial_number:x}", "Fetch the response for this certificate."
        raise refused(evidence, "certificate", wanted=wanted, found=other, advice=advice)
    start, end = single.this_update_utc, single.next_update_utc
    end = require_in_force(evidence, "validity", start, end, now, _FETCH)
    valid_until = min(end, responder.not_valid_after_utc)
    return VerifiedOcspResponse(certificate.serial_number, start, end, now, valid_until), single


def check_revocation(
    chain: chains.VerifiedChain, responses: Collection[bytes] | None, *, evidence: str, first: int = 0
) -> tuple[datetime | None, datetime]:
    """Require a good response for every certificate of a verified chain from `first` on, except the root.

    Return the time of the oldest response, None without `responses`, and the first time that the chain or a response
    expires.
    """
    if responses is None:
        return None, chain.valid_until
    evidence = f"OCSP response for the {evidence}"
    loaded = [(data, _load(bytes(data), evidence=evidence).response) for data in responses]
    verified = []
    for certificate, issuer in pairwise(chain.certificates[first:]):
        matching = [
            data for data, response in loaded if any(_is_about(s, certificate, issuer) for s in response.responses)
        ]
        if not matching:
            field, found_none = f"status of {quoted_name(certificate)}", f"none among {len(loaded)}"
            advice = "Fetch responses for all certificates, or pass ocsp=None so that revocation is not checked."
            raise refused(evidence, field, wanted="a response for it", found=found_none, advice=advice)
        now = chain.verified_at
        verified += [verify_ocsp_response(data, certificate, issuer, now=now, evidence=evidence) for data in matching]
    return min(good.this_update for good in verified), min(chain.valid_until, *(good.valid_until for good in verified))


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """A response with all parts read, and its certificates. `_load` caches it, so equality is identity."""

    response: ocsp.OCSPResponse
    certificates: tuple[x509.Certificate, ...]


def _read(data: bytes, evidence: str) -> _Loaded:
    """Load a response, and read now all parts that are used later."""
    critical, encoded = [], []
    with chains.reading(evidence):
        response = ocsp.load_der_ocsp_response(data)
        status = response.response_status
        if status is ocsp.OCSPResponseStatus.SUCCESSFUL:
            count = len(list(response.responses))
            if count != 1:  # pyca hides the extensions of several
                raise malformed(evidence, "number of statuses", None, wanted=1, found=count)
            extensions = [*response.extensions, *response.single_extensions]
            critical = [extension.oid.dotted_string for extension in extensions if extension.critical]
            _ = response.signature_hash_algorithm, response.responder_name, response.responder_key_hash
            for single in response.responses:
                _ = single.certificate_status, single.this_update_utc, single.next_update_utc, single.hash_algorithm
                _ = single.revocation_time_utc, single.revocation_reason
            encoded = [certificate.public_bytes(Encoding.DER) for certificate in response.certificates]
    if status is not ocsp.OCSPResponseStatus.SUCCESSFUL:
        raise refused(evidence, "status", wanted="a successful response", found=status.name, advice=_FETCH)
    if critical:
        raise refused(evidence, "extensions", wanted="none that is critical", found=critical[0], advice=_FETCH)
    _require_strict(data, response, evidence)
    name = f"certificate in the {evidence}"
    return _Loaded(response, tuple(chains.load_certificate(item, evidence=name) for item in encoded))


_load = Cache(_read, 128)


def _require_strict(data: bytes, response: ocsp.OCSPResponse, evidence: str) -> None:
    """Require a signature without unused bits, and no structure after it but certificates."""
    outer = der.open_value(data, evidence, der.SEQUENCE, "response")
    der.read_bytes(outer, der.ENUMERATED, "status")
    _, wrapper = der.read_element(outer, "response bytes")
    outer.done()
    pair = der.read_last(wrapper, der.SEQUENCE, "response bytes")
    der.read_oid(pair, "response type")
    basic_text = der.read_last(pair, der.OCTET_STRING, "basic response")
    basic = der.read_last(basic_text, der.SEQUENCE, "basic response")
    der.read(basic, der.SEQUENCE, "response data")
    der.read(basic, der.SEQUENCE, "signature algorithm")
    offset = basic.offset
    _, signature = der.read_element(basic, "signature")
    if signature.rest("signature") != b"\0" + response.signature:
        raise malformed(evidence, "signature", offset, wanted="a string of whole bytes", found="unused bits")
    if basic.remaining:
        der.read(basic, _CERTIFICATES_TAG, "certificates")
    basic.done()


def _verify(loaded: _Loaded, issuer: x509.Certificate, evidence: str) -> x509.Certificate:
    """Verify the signature of a response at any time, and return its responder's certificate."""
    responder = _find_responder(loaded, issuer, evidence)
    _verify_signature(loaded.response, responder, evidence)
    return responder


_verify_responder = Cache(_verify, 256)


def _find_responder(loaded: _Loaded, issuer: x509.Certificate, evidence: str) -> x509.Certificate:
    """Find the responder's certificate: the issuer, or an appointed responder (RFC 6960, 4.2.2.2)."""
    response = loaded.response
    if _is_responder(response, issuer):
        return issuer
    responders = [certificate for certificate in loaded.certificates if _is_responder(response, certificate)]
    if len(responders) != 1:
        name = response.responder_name
        wanted = f"{quoted_name(issuer)}, or a responder with its certificate in the response"
        responder = repr(chains.common_name(name)) if name is not None else (response.responder_key_hash or b"")
        raise refused(evidence, "responder", wanted=wanted, found=responder, advice=_FETCH)
    _require_appointed(responders[0], issuer, evidence)
    return responders[0]


def _is_responder(response: ocsp.OCSPResponse, certificate: x509.Certificate) -> bool:
    if response.responder_name is not None:
        return response.responder_name == certificate.subject
    return response.responder_key_hash == _hash(hashes.SHA1(), _key_bits(certificate))  # noqa: S303 - RFC 6960, 4.2.1


def _require_appointed(responder: x509.Certificate, issuer: x509.Certificate, evidence: str) -> None:
    """Require a certificate that the issuer issued for OCSP responses."""
    problem: str | None
    usages = read_extension(responder, x509.ExtendedKeyUsage)
    usage = read_extension(responder, x509.KeyUsage)
    basic = read_extension(responder, x509.BasicConstraints)
    if usages is None or ExtendedKeyUsageOID.OCSP_SIGNING not in usages:
        problem = "no extended key usage id-kp-OCSPSigning"
    elif usage is not None and not usage.digital_signature:
        problem = "no key usage digitalSignature"
    elif basic is not None and basic.ca:
        problem = "an authority"
    elif any(item.critical and item.oid not in _RESPONDER_CRITICAL for item in responder.extensions):
        problem = "an unknown critical extension"
    else:
        problem = chains.find_issuing_problem(responder, issuer)
    if problem is not None:
        wanted = f"a responder that {quoted_name(issuer)} has appointed"
        raise refused(evidence, "responder", wanted=wanted, found=f"{quoted_name(responder)}: {problem}", advice=_FETCH)


def _verify_signature(response: ocsp.OCSPResponse, responder: x509.Certificate, evidence: str) -> None:
    algorithm = response.signature_hash_algorithm
    if not isinstance(algorithm, chains.ECDSA.hashes):
        name = "none" if algorithm is None else algorithm.name
        raise refused(evidence, "signature algorithm", wanted="SHA-256, -384 or -512", found=name, advice=_FETCH)
    key, signature, data = responder.public_key(), response.signature, response.tbs_response_bytes
    oid = response.signature_algorithm_oid
    try:
        if isinstance(key, ec.EllipticCurvePublicKey) and oid in chains.ECDSA.oids:
            key.verify(signature, data, ec.ECDSA(algorithm))
            return
        if isinstance(key, rsa.RSAPublicKey) and oid in _RSA:
            key.verify(signature, data, padding.PKCS1v15(), algorithm)
            return
    except InvalidSignature:
        pass
    wanted = f"one by {quoted_name(responder)}"
    advice = "The response was altered, or is of another responder; fetch it again."
    raise refused(evidence, "signature", wanted=wanted, found="one that does not hold", advice=advice)


def _require_nonce(response: ocsp.OCSPResponse, nonce: bytes, evidence: str) -> None:
    values = [extension.value for extension in response.extensions]
    sent = next((value.nonce for value in values if isinstance(value, x509.OCSPNonce)), None)
    if sent is None or not hmac.compare_digest(sent, nonce):
        raise refused(evidence, "nonce", wanted=nonce, found=sent if sent is not None else "none", advice=_FETCH)


def _is_about(single: ocsp.OCSPSingleResponse, certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    if single.serial_number != certificate.serial_number:
        return False
    algorithm = single.hash_algorithm
    name_hash = _hash(algorithm, certificate.issuer.public_bytes())
    return (single.issuer_name_hash, single.issuer_key_hash) == (name_hash, _hash(algorithm, _key_bits(issuer)))


def _hash(algorithm: hashes.HashAlgorithm, data: bytes) -> bytes:
    digest = hashes.Hash(algorithm)
    digest.update(data)
    return digest.finalize()


@lru_cache(maxsize=64)  # compared with each response for each certificate, and encoded slowly
def _key_bits(certificate: x509.Certificate) -> bytes:
    """Return the bits of a public key, without its algorithm (RFC 6960, section 4.1.1)."""
    key = certificate.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey):
        return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    if isinstance(key, rsa.RSAPublicKey):
        return key.public_bytes(Encoding.DER, PublicFormat.PKCS1)
    return b""
