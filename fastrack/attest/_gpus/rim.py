"""Verify NVIDIA's reference integrity manifests (RIM), which hold the measurements of a driver or VBIOS.

A manifest is a SWID tag (ISO/IEC 19770-2:2015; TCG, "Reference Integrity Manifest Information Model") with an enveloped
XML Signature (https://www.w3.org/TR/xmldsig-core1/) by ECDSA on P-384 with SHA-384.
"""

import hmac
import re
from base64 import b64decode, b64encode
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha384

from cryptography import x509

from fastrack._util.public import public
from fastrack.attest._errors import refused, require_time_zone
from fastrack.attest._formats.cache import Cache
from fastrack.attest._formats.ocsp import check_revocation
from fastrack.attest._formats.roots import NVIDIA_RIM_ROOTS, Roots
from fastrack.attest._formats.signatures import P384
from fastrack.attest._formats.x509 import load_certificate, subject_name, verify_chain
from fastrack.attest._formats.xml import Element, canonicalize, parse
from fastrack.attest._gpus.report import DIGEST_SIZE

EVIDENCE = "RIM"

_SWID = "http://standards.iso.org/iso/19770/-2/2015/schema.xsd"
_DSIG = "http://www.w3.org/2000/09/xmldsig#"
_HASHES = "http://www.w3.org/2001/04/xmlenc#sha384"  # used by NVIDIA's files; elsewhere it names an algorithm
_C14N = "http://www.w3.org/2006/12/xml-c14n11"
_ENVELOPED = "http://www.w3.org/2000/09/xmldsig#enveloped-signature"
_ECDSA = "http://www.w3.org/2001/04/xmldsig-more#ecdsa-sha384"
_SHA384 = "http://www.w3.org/2001/04/xmldsig-more#sha384"
_LONGEST_CHAIN = 10
_MOST_INDEXES = 256
_NUMBER = re.compile(r"0|[1-9]\d{0,2}")
_DIGEST = re.compile(rf"[0-9a-fA-F]{{{2 * DIGEST_SIZE}}}")
_FETCH = "Fetch the manifest again, by its id."


@public
@dataclass(frozen=True, slots=True)
class RimMeasurement:
    r"""The allowed values of a measurement.

    `index` counts from 0. The measurement must equal one of `values`, SHA-384 digests, unless `is_active` is False:
    then the manifest says nothing about this index.

    Examples
    --------
    >>> from fastrack import attest
    >>> measurement = attest.RimMeasurement(7, "Measurement_7", True, (bytes(48), b"\1" * 48))
    >>> b"\1" * 48 in measurement.values
    True
    """

    index: int
    name: str
    is_active: bool
    values: tuple[bytes, ...]


@public
@dataclass(frozen=True, slots=True)
class Rim:
    """A parsed reference integrity manifest. All values are untrusted.

    `data` is the whole file and `tag_id` the identifier of this version of the tag. `product` is the chip, such as
    "GH100", `edition` is "GPU" or "SWITCH", and `version` is of the driver, VBIOS or switch BIOS: a manifest
    names neither the part nor a board. `measurements` are in the order of their indexes.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.Rim.__match_args__[:3]
    ('data', 'tag_id', 'product')
    """

    data: bytes
    tag_id: str
    product: str
    edition: str
    version: str
    measurements: tuple[RimMeasurement, ...]

    @property
    def active(self) -> tuple[RimMeasurement, ...]:
        """The measurements with values."""
        return tuple(measurement for measurement in self.measurements if measurement.is_active)


@public
@dataclass(frozen=True, slots=True)
class VerifiedRim:
    """A fully signed manifest, and the name of its `signer`, whose certificates lead to a pinned root.

    `fastrack.attest` describes the times.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.VerifiedRim.__match_args__
    ('rim', 'signer', 'verified_at', 'revocation_checked_at', 'valid_until')
    """

    rim: Rim
    signer: str
    verified_at: datetime
    revocation_checked_at: datetime | None
    valid_until: datetime


@public
def parse_rim(data: bytes) -> Rim:
    """Parse a manifest, an XML file in UTF-8, without verifying its signature.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.parse_rim(b"<tag/>")
    Traceback (most recent call last):
        ...
    fastrack.FormatError: reading the RIM failed: expected SoftwareIdentity as its name of <tag> in line 1, got tag. ...
    """
    data = bytes(data)
    return _read_rim(data, parse(data, EVIDENCE))


@public
def verify_rim(
    rim: Rim | bytes,
    *,
    now: datetime,
    roots: Roots = NVIDIA_RIM_ROOTS,
    ocsp: Collection[bytes] | None = None,
    evidence: str = EVIDENCE,
) -> VerifiedRim:
    """Verify a manifest, offline.

    The key of the first certificate signed the whole document except the signature; the certificates lead to the root
    and are valid at `now`. `fastrack.attest` describes other parameters and errors.

    Parameters
    ----------
    rim : Rim or bytes
        The manifest. A parsed one is parsed again.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import attest
    >>> attest.verify_rim(b"no manifest", now=datetime(2026, 6, 1, tzinfo=UTC))
    Traceback (most recent call last):
        ...
    fastrack.FormatError: reading the RIM failed: expected well-formed XML as its text, got syntax error: line 1, ...
    """
    require_time_zone(now)
    parsed, certificates = open_signed(bytes(rim.data if isinstance(rim, Rim) else rim), evidence=evidence)
    chain = verify_chain(certificates, roots=roots, now=now, evidence=f"certificate chain of the {evidence}")
    checked_at, valid_until = check_revocation(chain, ocsp, evidence=evidence)
    return VerifiedRim(parsed, subject_name(chain.leaf), now, checked_at, valid_until)


def _verify_signature(data: bytes, evidence: str) -> tuple[Rim, tuple[x509.Certificate, ...]]:
    """Parse a manifest, and verify its signature by the key of its first, still untrusted certificate."""
    root = parse(data, EVIDENCE)
    rim = _read_rim(data, root)
    signature = root.elements[-1]
    signed_info, value, key_info = signature.only(*_dsig("SignedInfo", "SignatureValue", "KeyInfo"))
    signature.expect_attributes()
    certificates = _read_certificates(key_info, evidence)
    digest = _read_signed_info(signed_info)
    P384.verify(certificates[0].public_key(), _read_base64(value), canonicalize(signed_info), evidence)
    actual = sha384(canonicalize(root, without=signature)).digest()
    if not hmac.compare_digest(actual, digest):
        raise refused(evidence, "digest", wanted=digest, found=actual, advice=f"It was altered. {_FETCH}")
    return rim, certificates


open_signed = Cache(_verify_signature, 32)


def _read_rim(data: bytes, root: Element) -> Rim:
    """Read a tag. Its last element must be its only signature, so that only signed data is read."""
    if root.name != (_SWID, "SoftwareIdentity"):
        raise root.refusal("name", "SoftwareIdentity", root.name[1])
    _, meta, payload, signature = root.only(*((_SWID, n) for n in ("Entity", "Meta", "Payload")), (_DSIG, "Signature"))
    for kind in ("corpus", "patch", "supplemental"):
        if root.attributes.get(("", kind), "false") != "false":
            raise root.refusal(f"attribute {kind}", "false", root.attribute(kind))
    inner = set(map(id, signature.walk()))
    if any(element.name[0] == _DSIG for element in root.walk() if id(element) not in inner):
        raise root.refusal("content", "one signature", "elements of another")
    if meta.attribute("PayloadType") != "direct":
        raise meta.refusal("attribute PayloadType", "direct", meta.attribute("PayloadType"))
    payload.require_no_text()
    return Rim(
        data=data,
        tag_id=root.attribute("tagId"),
        product=meta.attribute("product"),
        edition=meta.attribute("edition"),
        version=meta.attribute("colloquialVersion"),
        measurements=_read_measurements(payload),
    )


def _read_measurements(payload: Element) -> tuple[RimMeasurement, ...]:
    measurements: dict[int, RimMeasurement] = {}
    for element in payload.elements:
        if element.name != (_SWID, "Resource") or element.attribute("type") != "Measurement":
            raise element.refusal("type", "a measurement", "a reference value of another kind")
        element.only()
        active = element.attribute("active")
        if active not in {"True", "False"}:
            raise element.refusal("attribute active", "True or False", active)
        if element.attribute("size") != str(DIGEST_SIZE):
            raise element.refusal("attribute size", DIGEST_SIZE, element.attribute("size"))
        count = _read_number(element, "alternatives")
        values = [element.attribute(f"Hash{number}", _HASHES) for number in range(count)]
        if not count or sum(namespace == _HASHES for namespace, _ in element.attributes) != count:
            raise element.refusal("attribute alternatives", "the number of values, from 1", count)
        if wrong := [value for value in values if not _DIGEST.fullmatch(value)]:
            raise element.refusal("value", "a digest of SHA-384 in hexadecimal", wrong[0])
        index, digests = _read_number(element, "index"), tuple(map(bytes.fromhex, values))
        if index in measurements:
            raise element.refusal("attribute index", "each once", f"{index} twice")
        measurements[index] = RimMeasurement(index, element.attribute("name"), active == "True", digests)
    return tuple(measurements[index] for index in sorted(measurements))


def _read_number(element: Element, name: str) -> int:
    text = element.attribute(name)
    if not _NUMBER.fullmatch(text) or int(text) >= _MOST_INDEXES:
        raise element.refusal(f"attribute {name}", f"a number below {_MOST_INDEXES}", text)
    return int(text)


def _read_certificates(key_info: Element, evidence: str) -> tuple[x509.Certificate, ...]:
    """Read the certificates of the signer: the leaf first, the root last."""
    key_info.expect_attributes()
    (data,) = key_info.only((_DSIG, "X509Data"))
    data.expect_attributes()
    elements = data.only(*[(_DSIG, "X509Certificate")] * min(len(data.elements) or 1, _LONGEST_CHAIN))
    for element in elements:
        element.expect_attributes()
    name = f"certificate chain of the {evidence}"
    return tuple(load_certificate(_read_base64(element), evidence=name) for element in elements)


def _read_signed_info(signed_info: Element) -> bytes:
    """Require the supported profile, with one reference to the whole document, and return the digest."""
    signed_info.expect_attributes()
    names = _dsig("CanonicalizationMethod", "SignatureMethod", "Reference")
    canonicalization, method, reference = signed_info.only(*names)
    canonicalization.expect_attributes(Algorithm=_C14N)
    method.expect_attributes(Algorithm=_ECDSA)
    reference.expect_attributes(URI="")
    transforms, digest_method, digest = reference.only(*_dsig("Transforms", "DigestMethod", "DigestValue"))
    transforms.expect_attributes()
    enveloped, form = transforms.only(*_dsig("Transform", "Transform"))
    enveloped.expect_attributes(Algorithm=_ENVELOPED)
    form.expect_attributes(Algorithm=_C14N)
    digest_method.expect_attributes(Algorithm=_SHA384)
    for element in (canonicalization, method, enveloped, form, digest_method):
        element.only()
    value = _read_base64(digest)
    if len(value) != DIGEST_SIZE:
        raise digest.refusal("content", f"{DIGEST_SIZE} bytes", len(value))
    return value


def _dsig(*names: str) -> list[tuple[str, str]]:
    return [(_DSIG, name) for name in names]


def _read_base64(element: Element) -> bytes:
    """Read bytes in canonical base64, ignoring newlines."""
    text = element.text().replace("\n", "")
    try:
        value = b64decode(text, validate=True)
    except ValueError as error:
        raise element.refusal("content", "base64", str(error)) from None
    if b64encode(value).decode() != text:
        raise element.refusal("content", "base64", "unused bits that are set")
    return value
