"""Load certificates and revocation lists, and verify chains of them up to a pinned root (RFC 5280).

Chains of ECDSA keys, as of Intel and NVIDIA, go through pyca's verifier as well as through the checks of this module.
It knows no RSASSA-PSS, so AMD's chains go through these checks and `verify_directly_issued_by` alone.
"""

from __future__ import annotations

import threading
import warnings
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import verification
from cryptography.x509.oid import ExtensionOID, SignatureAlgorithmOID

from fastrack._util.fork import after_fork
from fastrack.attest._errors import malformed, refused
from fastrack.attest._formats.roots import Roots

E = TypeVar("E", x509.BasicConstraints, x509.KeyUsage)

_LONGEST_CHAIN = 10
_CACHED_SIZE = 4096  # bytes of a certificate
_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
_UNREADABLE = (
    ValueError,
    TypeError,
    OverflowError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
_KNOWN_CRITICAL = {ExtensionOID.BASIC_CONSTRAINTS, ExtensionOID.KEY_USAGE}
_warnings_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class VerifiedChain:
    """Certificates of which each was issued by the next, up to a root that was pinned.

    Attributes
    ----------
    certificates : tuple of cryptography.x509.Certificate
        The leaf first, the root last.
    verified_at : datetime.datetime
        The time at which all were valid.
    """

    certificates: tuple[x509.Certificate, ...]
    verified_at: datetime

    @property
    def leaf(self) -> x509.Certificate:
        """The certificate of the key that signed the evidence."""
        return self.certificates[0]

    @property
    def issuer(self) -> x509.Certificate:
        """The certificate of the authority that issued the leaf."""
        return self.certificates[1]

    @property
    def root(self) -> x509.Certificate:
        """The pinned certificate."""
        return self.certificates[-1]

    @property
    def valid_until(self) -> datetime:
        """The first time at which one of the certificates ends."""
        return min(certificate.not_valid_after_utc for certificate in self.certificates)


def verify_chain(
    certificates: Sequence[x509.Certificate], *, roots: Roots, now: datetime, evidence: str
) -> VerifiedChain:
    """Verify a chain of ECDSA certificates: the leaf first, the root last, none besides.

    Parameters
    ----------
    certificates : sequence of cryptography.x509.Certificate
        At least two.
    roots : collection of str
        SHA-256 fingerprints of the roots that are trusted.
    now : datetime.datetime
        The time, with a time zone.
    evidence : str
        The name of the chain for errors, such as "PCK chain".

    Raises
    ------
    AttestationError
        If a signature, name, validity period, constraint or the root is wrong.
    ValueError
        If `now` has no time zone.
    """
    chain = _check_profile(certificates, roots, now, evidence)
    authorities = verification.ExtensionPolicy.permit_all().require_present(
        x509.BasicConstraints, verification.Criticality.AGNOSTIC, None
    )
    verifier = (
        verification.PolicyBuilder()
        .store(verification.Store([chain.root]))
        .time(now)
        .max_chain_depth(len(chain.certificates))
        .extension_policies(ca_policy=authorities, ee_policy=verification.ExtensionPolicy.permit_all())
        .build_client_verifier()
    )
    try:
        found = verifier.verify(chain.leaf, list(chain.certificates[1:-1])).chain
    except (verification.VerificationError, *_UNREADABLE) as error:
        raise _broken(evidence, str(error)) from None
    if tuple(found) != chain.certificates:
        raise _broken(evidence, "another path to the root")
    return chain


def verify_pss_chain(
    certificates: Sequence[x509.Certificate], *, roots: Roots, now: datetime, evidence: str
) -> VerifiedChain:
    """Verify a chain as `verify_chain` does, of certificates that RSASSA-PSS with SHA-384 signs.

    Raises
    ------
    AttestationError
        If a signature, name, validity period, constraint or the root is wrong.
    ValueError
        If `now` has no time zone.
    """
    chain = _check_profile(certificates, roots, now, evidence)
    for number, certificate in enumerate(chain.certificates):
        issuer = chain.certificates[min(number + 1, len(chain.certificates) - 1)]
        if certificate.signature_algorithm_oid != SignatureAlgorithmOID.RSASSA_PSS or not isinstance(
            certificate.signature_hash_algorithm, SHA384
        ):
            raise _broken(evidence, f"another algorithm in {_name(certificate)}", wanted="RSASSA-PSS with SHA-384")
        unknown = [e.oid.dotted_string for e in certificate.extensions if e.critical and e.oid not in _KNOWN_CRITICAL]
        if unknown:
            raise _broken(evidence, f"the critical extension {unknown[0]} in {_name(certificate)}")
        try:
            certificate.verify_directly_issued_by(issuer)
        except (InvalidSignature, *_UNREADABLE) as error:
            reason = str(error) or "the signature does not hold"
            raise _broken(evidence, f"{_name(certificate)}, of which {reason}") from None
    return chain


def _check_profile(
    certificates: Sequence[x509.Certificate], roots: Roots, now: datetime, evidence: str
) -> VerifiedChain:
    require_time_zone(now)
    if not 2 <= len(set(certificates)) == len(certificates) <= _LONGEST_CHAIN:
        raise _broken(evidence, len(certificates), wanted=f"2 to {_LONGEST_CHAIN} different certificates")
    root = fingerprint(certificates[-1])
    if root not in roots:
        raise refused(
            evidence,
            "root",
            wanted=f"one of the pinned fingerprints {', '.join(sorted(roots)) or '(none)'}",
            found=root,
            advice="Pass roots= if this root is to be trusted; else the evidence proves nothing.",
        )
    for number, certificate in enumerate(certificates):
        _require_valid(certificate, now, evidence)
        if number:
            _require_authority(certificate, number - 1, evidence)
    _require_signer(certificates[0], evidence)
    return VerifiedChain(tuple(certificates), now)


def _require_valid(certificate: x509.Certificate, now: datetime, evidence: str) -> None:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not start <= now <= end:
        raise refused(
            evidence,
            f"validity of {_name(certificate)}",
            wanted=f"{start.isoformat()} to {end.isoformat()}",
            found=now.isoformat(),
            advice="Check the time that was passed as now=, or ask for evidence under a current certificate.",
        )


def _require_authority(certificate: x509.Certificate, below: int, evidence: str) -> None:
    """Require a certificate that may issue others, with `below` authorities between it and the leaf."""
    basic = _extension(certificate, x509.BasicConstraints)
    if basic is None or not basic.ca:
        raise _broken(evidence, f"{_name(certificate)}, which is no authority", wanted="authorities above the leaf")
    if basic.path_length is not None and basic.path_length < below:
        raise _broken(evidence, below, wanted=f"at most {basic.path_length} authorities below {_name(certificate)}")
    usage = _extension(certificate, x509.KeyUsage)
    if usage is not None and not usage.key_cert_sign:
        raise _broken(evidence, f"{_name(certificate)}, which may sign none", wanted="the key usage keyCertSign")


def _require_signer(certificate: x509.Certificate, evidence: str) -> None:
    basic = _extension(certificate, x509.BasicConstraints)
    if basic is not None and basic.ca:
        raise _broken(evidence, f"the authority {_name(certificate)}", wanted="a leaf that is no authority")
    usage = _extension(certificate, x509.KeyUsage)
    if usage is not None and not usage.digital_signature:
        raise _broken(evidence, f"{_name(certificate)} without it", wanted="the key usage digitalSignature")


@dataclass(frozen=True, slots=True)
class VerifiedCrl:
    """A revocation list that its authority signed, and that is in force.

    Attributes
    ----------
    crl : cryptography.x509.CertificateRevocationList
        The list.
    issuer : cryptography.x509.Name
        The name of the authority.
    issued_at, valid_until : datetime.datetime
        The time at which it was issued, and the first time at which another must be fetched.
    """

    crl: x509.CertificateRevocationList
    issuer: x509.Name
    issued_at: datetime
    valid_until: datetime


def verify_crl(
    crl: x509.CertificateRevocationList, issuer: x509.Certificate, *, now: datetime, evidence: str
) -> VerifiedCrl:
    """Verify that a revocation list was issued by this authority and is in force at `now`.

    Parameters
    ----------
    crl : cryptography.x509.CertificateRevocationList
        The complete list of an authority.
    issuer : cryptography.x509.Certificate
        The certificate of that authority, already verified.
    now : datetime.datetime
        The time, with a time zone.
    evidence : str
        The name of the list for errors, such as "PCK revocation list".

    Raises
    ------
    AttestationError
        If the issuer, the signature, an extension or the time is wrong.
    """
    require_time_zone(now)
    if crl.issuer != _subject(issuer):
        raise refused(
            evidence,
            "issuer",
            wanted=issuer.subject.rfc4514_string(),
            found=crl.issuer.rfc4514_string(),
            advice="Fetch the list that belongs to this authority.",
        )
    usage = _extension(issuer, x509.KeyUsage)
    if usage is not None and not usage.crl_sign:
        raise _broken(evidence, f"{_name(issuer)} without it", wanted="an issuer with the key usage cRLSign")
    if not _is_signed(crl, issuer):
        raise refused(
            evidence,
            "signature",
            wanted=f"one by {_name(issuer)}",
            found="one that does not hold",
            advice="The list was altered; fetch it again.",
        )
    unknown = [extension.oid.dotted_string for extension in crl.extensions if extension.critical]
    if unknown:
        raise _broken(evidence, f"the critical extension {unknown[0]}", wanted="a complete list, without any")
    start, end = crl.last_update_utc, crl.next_update_utc
    if end is None or not start <= now <= end:
        raise refused(
            evidence,
            "validity",
            wanted=f"{start.isoformat()} to {end.isoformat() if end else 'a next update, which it lacks'}",
            found=now.isoformat(),
            advice="Fetch a current list, and check the time that was passed as now=.",
        )
    return VerifiedCrl(crl, _subject(issuer), start, end)


def _is_signed(crl: x509.CertificateRevocationList, issuer: x509.Certificate) -> bool:
    try:
        return crl.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]
    except (InvalidSignature, *_UNREADABLE):
        return False


def require_unrevoked(certificate: x509.Certificate, verified: VerifiedCrl, *, evidence: str) -> None:
    """Require that a verified list does not have a certificate of its issuer.

    Raises
    ------
    AttestationError
        If it was revoked, or has another issuer than the list.
    """
    issuer = _issuer(certificate)
    if issuer != verified.issuer:
        raise refused(
            evidence,
            f"revocation of {_name(certificate)}",
            wanted=f"the list of {issuer.rfc4514_string()}",
            found=f"the list of {verified.issuer.rfc4514_string()}",
            advice="Fetch the list of the authority that issued the certificate.",
        )
    entry = verified.crl.get_revoked_certificate_by_serial_number(certificate.serial_number)
    if entry is not None:
        raise refused(
            evidence,
            f"revocation of {_name(certificate)}",
            wanted="a certificate that was not revoked",
            found=f"serial number {certificate.serial_number:x}, revoked {entry.revocation_date_utc.isoformat()}",
            advice="Do not trust this machine.",
        )


def load_certificate(data: bytes, *, evidence: str) -> x509.Certificate:
    """Load a certificate in DER, and read all parts of it that are read later.

    Raises
    ------
    FormatError
        If a part of it is malformed.
    """
    if len(data) <= _CACHED_SIZE:
        return _load_cached(data, evidence)
    return _load(data, evidence)


def _load(data: bytes, evidence: str) -> x509.Certificate:
    with _reading(evidence):
        certificate = x509.load_der_x509_certificate(data)
        _ = certificate.extensions, certificate.subject, certificate.issuer, certificate.public_key()
        _ = certificate.signature_hash_algorithm, certificate.signature_algorithm_parameters
        _require_whole_bytes(data, certificate.signature)
    return certificate


_load_cached = lru_cache(maxsize=64)(_load)
"""Certificates that `_load` returned: the authorities that all evidence of a kind has in common are loaded once."""


def load_chain(data: bytes, *, evidence: str) -> tuple[x509.Certificate, ...]:
    r"""Load certificates in PEM (RFC 7468), as they are written in its only strict form.

    Lines have 64 characters and may end in CR LF. After the end of the text there may be ends of lines and zero bytes,
    as Intel has them. Since nothing else is accepted, a changed byte never goes unnoticed.

    Raises
    ------
    FormatError
        If it is anything else, or has no certificate or more than ten.
    """
    text = data.rstrip(b"\0\r\n").replace(b"\r\n", b"\n")
    if not 1 <= text.count(_BEGIN) <= _LONGEST_CHAIN:
        raise malformed(
            evidence, "number of certificates", None, wanted=f"1 to {_LONGEST_CHAIN}", found=text.count(_BEGIN)
        )
    encoded = [part.partition(_END)[0] for part in text.split(_BEGIN)[1:]]
    certificates = tuple(load_certificate(_decode(part, evidence), evidence=evidence) for part in encoded)
    written = b"".join(map(_write_pem, certificates))
    if text != written.removesuffix(b"\n"):
        raise malformed(
            evidence, "text", None, wanted="PEM in its strict form", found="another text that decodes alike"
        )
    return certificates


def _decode(text: bytes, evidence: str) -> bytes:
    try:
        return b64decode(text)
    except ValueError as error:
        raise malformed(evidence, "text", None, wanted="base64", found=str(error)) from None


@lru_cache(maxsize=64)
def _write_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def load_crl(data: bytes, *, evidence: str) -> x509.CertificateRevocationList:
    """Load a certificate revocation list in DER, and read all parts of it that are read later.

    Raises
    ------
    FormatError
        If a part of it is malformed.
    """
    with _reading(evidence):
        crl = x509.load_der_x509_crl(data)
        _ = crl.extensions, crl.issuer, crl.last_update_utc, crl.next_update_utc
        _require_whole_bytes(data, crl.signature)
    return crl


def fingerprint(certificate: x509.Certificate) -> str:
    """Return the SHA-256 fingerprint of a certificate, as 64 lower-case hexadecimal digits."""
    return certificate.fingerprint(SHA256()).hex()


def common_name(name: x509.Name) -> str:
    """Return the common name of a subject or issuer, or all of it if it does not have exactly one."""
    found = name.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(found[0].value) if len(found) == 1 else name.rfc4514_string()


@lru_cache(maxsize=64)
def subject_name(certificate: x509.Certificate) -> str:
    """Return the common name of the subject of a certificate."""
    return common_name(certificate.subject)


def extension_value(certificate: x509.Certificate, oid: str) -> bytes | None:
    """Return the DER value of an extension that pyca does not know; None if the certificate lacks it."""
    try:
        value = certificate.extensions.get_extension_for_oid(x509.ObjectIdentifier(oid)).value
    except x509.ExtensionNotFound:
        return None
    return value.public_bytes()


def require_time_zone(now: datetime) -> None:
    """Raise if a time has no time zone.

    Raises
    ------
    ValueError
        If so.
    """
    if now.utcoffset() is None:
        raise ValueError(f"expected now= with a time zone, got {now!r}; datetime.now(timezone.utc) has one")


def _extension(certificate: x509.Certificate, kind: type[E]) -> E | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def _require_whole_bytes(data: bytes, signature: bytes) -> None:
    """Require a signature without unused bits, of which pyca accepts any number that leaves its bytes as they are."""
    if not data.endswith(b"\0" + signature):
        raise ValueError("the signature has unused bits")


@contextmanager
def _reading(evidence: str) -> Iterator[None]:
    """Turn pyca's errors about malformed structures into ours.

    Its warning about the serial number 0, which every VCEK of AMD has, is dropped. A name of which it warns is refused,
    so that it warns of none later.
    """
    try:
        with _warnings_lock, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        if any(str(warning.message).startswith("Attribute's length") for warning in caught):
            raise ValueError("a part of a name is too short or too long")
    except _UNREADABLE as error:
        raise malformed(evidence, "encoding", None, wanted="an X.509 structure", found=str(error)) from None


@lru_cache(maxsize=64)
def _subject(certificate: x509.Certificate) -> x509.Name:
    return certificate.subject


@lru_cache(maxsize=64)
def _issuer(certificate: x509.Certificate) -> x509.Name:
    return certificate.issuer


def _reset_after_fork() -> None:
    """Replace the lock in a forked child, as the thread that holds it may not have come along."""
    global _warnings_lock  # noqa: PLW0603
    _warnings_lock = threading.Lock()


after_fork(_reset_after_fork)


def _name(certificate: x509.Certificate) -> str:
    return repr(subject_name(certificate))


def _broken(
    evidence: str, found: object, *, wanted: object = "certificates of which each was issued by the next"
) -> Exception:
    return refused(
        evidence,
        "certificates",
        wanted=wanted,
        found=found,
        advice="Ask for the evidence again, with the certificates that belong to it.",
    )
