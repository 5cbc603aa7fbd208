"""Load certificates and revocation lists, and verify chains of them up to a pinned root (RFC 5280).

Chains are verified link by link, and links are cached: eight GPUs of a machine share all links but one. pyca's own
verifier caches nothing. It refuses AMD's encoding of RSASSA-PSS, which states the trailer field although it is the
default, against RFC 4055, section 3.1, and GeneralizedTime for dates before 2050, which the authorities of NVIDIA's
reference manifests use, against RFC 5280, section 4.1.2.5.
"""

import sys
import threading
import warnings
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512, HashAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtensionOID, SignatureAlgorithmOID

from fastrack._util import gate
from fastrack._util.fork import per_process
from fastrack.attest._errors import malformed, refused, require_in_force, require_time_zone
from fastrack.attest._formats import der
from fastrack.attest._formats.binary import Cursor
from fastrack.attest._formats.roots import Roots
from fastrack.errors import AttestationError

E = TypeVar("E", x509.BasicConstraints, x509.KeyUsage, x509.ExtendedKeyUsage)

_LONGEST_CHAIN = gate.LIMITS["certificates"]["certificates"]
_CACHED_SIZE = 4096  # bytes of a certificate
_LARGEST_PART = 2048  # bytes of names and of extensions; Intel's extensions have 780
_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
UNREADABLE = (  # pyca raises these for unreadable structures and unknown keys
    ValueError,
    TypeError,
    OverflowError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
KNOWN_CRITICAL = frozenset({ExtensionOID.BASIC_CONSTRAINTS, ExtensionOID.KEY_USAGE})
_STANDARD = "2.5.29."  # the arc of the extensions of X.509
_OF_WHOLE_LISTS = frozenset(f"{_STANDARD}{number}" for number in (18, 20, 35, 47, 60))  # none leaves a certificate out
_AGAIN = "Ask for the evidence again, with the certificates that belong to it."
_warnings_lock = per_process(sys.modules[__name__], "_warnings_lock", threading.Lock)


@dataclass(frozen=True, slots=True)
class Algorithms:
    """The allowed signature algorithms of a vendor's certificates."""

    name: str
    oids: frozenset[x509.ObjectIdentifier]
    hashes: tuple[type[HashAlgorithm], ...]


ECDSA = Algorithms(
    "ECDSA",
    frozenset(getattr(SignatureAlgorithmOID, f"ECDSA_WITH_SHA{size}") for size in (256, 384, 512)),
    (SHA256, SHA384, SHA512),
)
PSS_SHA384 = Algorithms("RSASSA-PSS with SHA-384", frozenset({SignatureAlgorithmOID.RSASSA_PSS}), (SHA384,))


@dataclass(frozen=True, slots=True)
class VerifiedChain:
    """Certificates from the leaf to a pinned root, each issued by the next; valid at `verified_at`."""

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
        """The first time that a certificate expires."""
        return min(certificate.not_valid_after_utc for certificate in self.certificates)


def verify_chain(
    certificates: Sequence[x509.Certificate],
    *,
    roots: Roots,
    now: datetime,
    evidence: str,
    algorithms: Algorithms = ECDSA,
    is_cut: bool = False,
) -> VerifiedChain:
    """Verify a chain of two or more certificates: the leaf first, the root last, no others.

    With `is_cut` the first is that of an authority, whose leaves are elsewhere. `evidence` is the name of the chain for
    errors, such as "PCK chain". A hash of all its bytes pins the root, so its own signature is not checked.
    """
    require_time_zone(now)
    if not 2 <= len(set(certificates)) == len(certificates) <= _LONGEST_CHAIN:
        raise _broken(evidence, len(certificates), wanted=f"2 to {_LONGEST_CHAIN} different certificates")
    root = fingerprint(certificates[-1])
    if root not in roots:
        wanted = f"one of the pinned fingerprints {', '.join(sorted(roots)) or '(none)'}"
        advice = "Pass roots= if this root is to be trusted; else the evidence proves nothing."
        if not _is_self_issued(certificates[-1]):  # an authority, which is not to be pinned in place of its root
            last = f"{quoted_name(certificates[-1])}, which {common_name(certificates[-1].issuer)!r} issued"
            advice = f"The last certificate is that of {last}: get the whole chain, the leaf first and the root last."
        raise refused(evidence, "root", wanted=wanted, found=root, advice=advice)
    for number, certificate in enumerate(certificates):
        start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        advice = "Check the time that was passed as now=, or ask for evidence under a current certificate."
        require_in_force(evidence, f"validity of {quoted_name(certificate)}", start, end, now, advice)
        if number:
            _require_authority(certificate, number - 1, evidence)
    if is_cut:
        _require_authority(certificates[0], 0, evidence)
    else:
        _require_signer(certificates[0], evidence)
    for certificate, issuer in pairwise(certificates):
        if problem := _find_problem(certificate, issuer, algorithms):
            wanted = f"{quoted_name(certificate)} issued by {quoted_name(issuer)}"
            raise _broken(evidence, problem, wanted=wanted)
    return VerifiedChain(tuple(certificates), now)


@lru_cache(maxsize=256)
def _find_problem(certificate: x509.Certificate, issuer: x509.Certificate, algorithms: Algorithms) -> str | None:
    """Return why an issuer did not issue a certificate; None if it did. The result is cached."""
    is_known = certificate.signature_algorithm_oid in algorithms.oids
    if not is_known or not isinstance(certificate.signature_hash_algorithm, algorithms.hashes):
        return f"a signature by another algorithm than {algorithms.name}"
    key = issuer.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey) and not isinstance(key.curve, _CURVES):
        return f"a signature by a key on the curve {key.curve.name}"
    for extension in (*certificate.extensions, *issuer.extensions):
        if extension.oid == ExtensionOID.NAME_CONSTRAINTS or (
            extension.critical and extension.oid not in KNOWN_CRITICAL
        ):
            kind = "critical extension" if extension.critical else "extension"
            return f"the {kind} {extension.oid.dotted_string}"
    return find_issuing_problem(certificate, issuer)


def find_issuing_problem(certificate: x509.Certificate, issuer: x509.Certificate) -> str | None:
    """Return why an issuer's name or key does not match a certificate; None if it does."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, *UNREADABLE) as error:
        return str(error) or "a signature that does not hold"
    return None


def _require_authority(certificate: x509.Certificate, below: int, evidence: str) -> None:
    """Require a certificate that may issue others, with `below` authorities down to the leaf."""
    basic = read_extension(certificate, x509.BasicConstraints)
    if basic is None or not basic.ca:
        problem = f"{quoted_name(certificate)}, which is no authority"
        raise _broken(evidence, problem, wanted="authorities above the leaf")
    if basic.path_length is not None and basic.path_length < below:
        most = f"at most {basic.path_length} authorities below {quoted_name(certificate)}"
        raise _broken(evidence, below, wanted=most)
    usage = read_extension(certificate, x509.KeyUsage)
    if usage is not None and not usage.key_cert_sign:
        raise _broken(evidence, f"{quoted_name(certificate)}, which may sign none", wanted="the key usage keyCertSign")


def _require_signer(certificate: x509.Certificate, evidence: str) -> None:
    basic = read_extension(certificate, x509.BasicConstraints)
    if basic is not None and basic.ca:
        raise _broken(evidence, f"the authority {quoted_name(certificate)}", wanted="a leaf that is no authority")
    usage = read_extension(certificate, x509.KeyUsage)
    if usage is not None and not usage.digital_signature:
        raise _broken(evidence, f"{quoted_name(certificate)} without it", wanted="the key usage digitalSignature")


@dataclass(frozen=True, slots=True)
class VerifiedCrl:
    """A revocation list, signed by the authority `issuer` and in force until `valid_until`."""

    crl: x509.CertificateRevocationList
    issuer: x509.Name
    issued_at: datetime
    valid_until: datetime


def verify_crl(
    crl: x509.CertificateRevocationList, issuer: x509.Certificate, *, now: datetime, evidence: str
) -> VerifiedCrl:
    """Verify that a list is complete, in force at `now`, and issued by an authority with a verified certificate."""
    require_time_zone(now)
    if crl.issuer != issuer.subject:
        wanted, found = issuer.subject.rfc4514_string(), crl.issuer.rfc4514_string()
        advice = "Fetch the list that belongs to this authority."
        raise refused(evidence, "issuer", wanted=wanted, found=found, advice=advice)
    usage = read_extension(issuer, x509.KeyUsage)
    if usage is not None and not usage.crl_sign:
        raise _broken(evidence, f"{quoted_name(issuer)} without it", wanted="an issuer with the key usage cRLSign")
    if not _is_signed(crl, issuer):
        wanted, found = f"one by {quoted_name(issuer)}", "one that does not hold"
        advice = "The list was altered; fetch it again."
        raise refused(evidence, "signature", wanted=wanted, found=found, advice=advice)
    for extension in crl.extensions:
        oid = extension.oid.dotted_string
        # Delta lists and those of some certificates or reasons should say so critically (RFC 5280, 5.2), and may not.
        if extension.critical or (oid.startswith(_STANDARD) and oid not in _OF_WHOLE_LISTS):
            kind = "critical extension" if extension.critical else "extension"
            raise _broken(evidence, f"the {kind} {oid}", wanted="a list of all revoked certificates, by itself")
    start, end = crl.last_update_utc, crl.next_update_utc
    advice = "Fetch a current list, and check the time that was passed as now=."
    end = require_in_force(evidence, "validity", start, end, now, advice)
    return VerifiedCrl(crl, issuer.subject, start, end)


def _is_signed(crl: x509.CertificateRevocationList, issuer: x509.Certificate) -> bool:
    try:
        return crl.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]
    except (InvalidSignature, *UNREADABLE):
        return False


def require_unrevoked(certificate: x509.Certificate, verified: VerifiedCrl, *, evidence: str) -> None:
    """Require that a verified list is by a certificate's issuer, and does not have it."""
    field, issuer = f"revocation of {quoted_name(certificate)}", certificate.issuer
    if issuer != verified.issuer:
        wanted, found = (f"the list of {name.rfc4514_string()}" for name in (issuer, verified.issuer))
        advice = "Fetch the list of the authority that issued the certificate."
        raise refused(evidence, field, wanted=wanted, found=found, advice=advice)
    entry = verified.crl.get_revoked_certificate_by_serial_number(certificate.serial_number)
    if entry is not None:
        found = f"serial number {certificate.serial_number:x}, revoked {entry.revocation_date_utc.isoformat()}"
        wanted, advice = "a certificate that was not revoked", "Do not trust this machine."
        raise refused(evidence, field, wanted=wanted, found=found, advice=advice)


def load_certificate(data: bytes, *, evidence: str) -> x509.Certificate:
    """Load a certificate in DER, and read now all parts that are used later."""
    if len(data) <= _CACHED_SIZE:
        return _load_cached(data, evidence)
    return _load(data, evidence)


def _load(data: bytes, evidence: str) -> x509.Certificate:
    with reading(evidence):
        certificate = x509.load_der_x509_certificate(data)
        _require_small_parts(data, evidence)
        _ = certificate.extensions, certificate.subject, certificate.issuer, certificate.public_key()
        _ = certificate.signature_hash_algorithm, certificate.signature_algorithm_parameters
        _require_whole_bytes(data, certificate.signature)
    return certificate


_load_cached = lru_cache(maxsize=64)(_load)
"""Certificates that `_load` returned: the authorities that all evidence of a kind has in common are loaded once."""


def load_chain(data: bytes, *, evidence: str) -> tuple[x509.Certificate, ...]:
    r"""Load one to ten certificates in the strict form of PEM (RFC 7468), and return them the leaf first.

    Lines have 64 characters and may end in CR LF. Newlines and zero bytes may follow the text,
    as in Intel's files. Nothing else is accepted, so that every changed byte is noticed.
    """
    gate.admit(data, "certificates", name=evidence)
    text = _strip(data)
    if _BEGIN not in text:
        raise malformed(evidence, "number of certificates", None, wanted=f"1 to {_LONGEST_CHAIN}", found=0)
    try:
        encoded = [b64decode(part.partition(_END)[0]) for part in text.split(_BEGIN)[1:]]
    except ValueError as error:
        raise malformed(evidence, "text", None, wanted="base64", found=str(error)) from None
    certificates = tuple(load_certificate(data, evidence=evidence) for data in encoded)
    written = b"".join(map(_write_pem, certificates))
    if text != written.removesuffix(b"\n"):
        other = "another text that decodes alike"
        raise malformed(evidence, "text", None, wanted="PEM in its strict form", found=other)
    is_turned = _is_self_issued(certificates[0]) and not _is_self_issued(certificates[-1])
    is_turned = is_turned and all(above.subject == below.issuer for above, below in pairwise(certificates))
    return certificates[::-1] if is_turned else certificates  # as tools write them that begin at the root


def _is_self_issued(certificate: x509.Certificate) -> bool:
    return certificate.issuer == certificate.subject


def _strip(text: bytes) -> bytes:
    return text.rstrip(b"\0\r\n").replace(b"\r\n", b"\n")


@lru_cache(maxsize=64)
def _write_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def load_crl(data: bytes, *, evidence: str) -> x509.CertificateRevocationList:
    """Load a certificate revocation list, and read now all parts that are used later.

    It is in DER, or, as services hand it out too, in the strict form of PEM or in hexadecimal.
    """
    with reading(evidence):
        data = _read_text(data)
        crl = x509.load_der_x509_crl(data)
        _require_small_parts(data, evidence)
        _ = crl.extensions, crl.issuer, crl.last_update_utc, crl.next_update_utc
        _require_whole_bytes(data, crl.signature)
    return crl


def _read_text(data: bytes) -> bytes:
    """Return a list in DER, be it so or as text."""
    text = _strip(data)
    if text.startswith(b"-----"):
        crl = x509.load_pem_x509_crl(text)
        der, written = crl.public_bytes(Encoding.DER), {crl.public_bytes(Encoding.PEM).removesuffix(b"\n")}
    elif text.startswith(b"30"):  # of a SEQUENCE, whose first byte in DER is "0"
        der = bytes.fromhex(text.decode())
        written = {der.hex().encode(), der.hex().upper().encode()}
    else:
        return data
    if text not in written:
        raise ValueError("another text that decodes alike")
    return der


def fingerprint(certificate: x509.Certificate) -> str:
    """Return the SHA-256 fingerprint of a certificate, as 64 lower-case hexadecimal digits."""
    return certificate.fingerprint(SHA256()).hex()


def common_name(name: x509.Name) -> str:
    """Return the common name of a subject or issuer, or the whole name unless there is exactly one."""
    names = name.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(names[0].value) if len(names) == 1 else name.rfc4514_string()


@lru_cache(maxsize=64)
def subject_name(certificate: x509.Certificate) -> str:
    """Return the common name of the subject of a certificate."""
    return common_name(certificate.subject)


def extension_value(certificate: x509.Certificate, oid: str) -> bytes | None:
    """Return the DER value of an extension that pyca does not know; None if the certificate lacks it."""
    return next((item.value.public_bytes() for item in certificate.extensions if item.oid.dotted_string == oid), None)


def read_extension(certificate: x509.Certificate, kind: type[E]) -> E | None:
    """Return an extension that pyca knows; None if the certificate lacks it."""
    return next((item.value for item in certificate.extensions if isinstance(item.value, kind)), None)


def _require_small_parts(data: bytes, evidence: str) -> None:
    """Require names and extensions of a usual size: pyca makes objects of up to 58 times their bytes.

    It makes none of a public key and of a list of revoked certificates, which are sequences of sequences.
    """
    content = der.read_element(der.read_element(Cursor(data, evidence), "structure")[1], "content")[1]
    while content.remaining:
        tag, part = der.read_element(content, "part")
        if (size := part.remaining) > _LARGEST_PART and (tag, part.u8("part")) != (der.SEQUENCE, der.SEQUENCE):
            raise ValueError(f"a name or extensions of {size} bytes")


def _require_whole_bytes(data: bytes, signature: bytes) -> None:
    """Require a signature without unused bits. Pyca ignores them, so bytes could change unnoticed."""
    if not data.endswith(b"\0" + signature):
        raise ValueError("the signature has unused bits")


@contextmanager
def reading(evidence: str) -> Iterator[None]:
    """Turn pyca's errors about malformed structures into ours.

    Warnings about the serial number 0, which every VCEK of AMD has, are dropped. Names with warnings are refused,
    so that none appears later.
    """
    try:
        with _warnings_lock, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        if any(str(warning.message).startswith("Attribute's length") for warning in caught):
            raise ValueError("a part of a name is too short or too long")
    except UNREADABLE as error:
        raise malformed(evidence, "encoding", None, wanted="an X.509 structure", found=str(error)) from None


def quoted_name(certificate: x509.Certificate) -> str:
    """Return the common name of the subject of a certificate, in quotes."""
    return repr(subject_name(certificate))


def _broken(evidence: str, found: object, *, wanted: object) -> AttestationError:
    return refused(evidence, "certificates", wanted=wanted, found=found, advice=_AGAIN)
