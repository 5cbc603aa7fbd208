"""Quotes of TDX, versions 4 and 5, with platform certificates and collateral, by a made-up Intel."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from hashlib import sha256

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from helpers.foundry import authority
from helpers.foundry.authority import NOW, Authority, bundle, key_usage

VENDOR = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
FMSPC, PCE_ID, PPID = bytes.fromhex("b0c06f000000"), bytes(2), bytes(range(16))
COMPONENTS = (3, 3, 2, 2, 4, 1, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0)
PCE_SVN = 11
QE_SIGNER = sha256(b"the signer of the quoting enclave").digest()
MODULE_SIGNER = bytes(range(48))
TEE_TCB_SVN = bytes([5, 3, 2, *bytes(13)])  # SVN 5 of module version 3
DAY = timedelta(days=1)


@dataclass
class Intel:
    """All authorities of the made-up Intel."""

    root: Authority
    platform_ca: Authority
    signing: Authority

    @property
    def roots(self):
        return frozenset({self.root.fingerprint})


@cache
def intel():
    """Make Intel's authorities, once."""
    root = Authority("Intel SGX Root CA", path_length=1)
    return Intel(
        root=root,
        platform_ca=Authority("Intel SGX PCK Platform CA", root, path_length=0),
        signing=Authority(
            "Intel SGX TCB Signing", root, ca=False, usage=key_usage("digital_signature", "content_commitment")
        ),
    )


def new_key():
    """Make a key as `authority.new_key` does at that time."""
    return authority.new_key()


@dataclass
class Platform:
    """A machine: a PCK certificate with its key, and an attestation key."""

    pck: Authority
    chain: bytes
    attestation_key: ec.EllipticCurvePrivateKey = field(default_factory=new_key)


def platform(
    *,
    of=None,
    issuer=None,
    name="Intel SGX PCK Certificate",
    fmspc=FMSPC,
    components=COMPONENTS,
    pce_svn=PCE_SVN,
    extension=None,
    **options,
):
    """Make a machine. `extension` replaces Intel's extension; None of it as bytes leaves it out."""
    of = of or intel()
    issuer = issuer or of.platform_ca
    value = sgx_extension(fmspc=fmspc, components=components, pce_svn=pce_svn) if extension is None else extension
    extensions = [("1.2.840.113741.1.13.1", value)] if value else []
    pck = Authority(name, issuer, ca=False, extensions=extensions, **options)
    return Platform(pck, bundle(pck, issuer, of.root))


def sgx_extension(*, fmspc=FMSPC, components=COMPONENTS, pce_svn=PCE_SVN, pce_id=PCE_ID, leave_out=(), twice=()):
    """Write Intel's extension of PCK certificates. Members are numbers after the extension's own identifier."""
    base = (1, 2, 840, 113741, 1, 13, 1)
    tcb = {(2, number): integer(svn) for number, svn in enumerate(components, start=1)}
    tcb |= {(2, 17): integer(pce_svn), (2, 18): octets(bytes(components))}
    members = {
        (1,): octets(PPID),
        (2,): members_of(base, tcb, leave_out, twice),
        (3,): octets(pce_id),
        (4,): octets(fmspc),
        (5,): b"\x0a\x01\x01",
        (7,): members_of(base, {(7, 1): b"\x01\x01\xff"}, (), ()),
    }
    return members_of(base, members, leave_out, twice)


def members_of(base, members, leave_out, twice):
    parts = [
        element(0x30, oid(*base, *number) + value) * (2 if number in twice else 1)
        for number, value in members.items()
        if number not in leave_out
    ]
    return element(0x30, b"".join(parts))


def element(tag, content):
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def integer(number):
    return element(0x02, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def octets(content):
    return element(0x04, content)


def oid(first, second, *arcs):
    content = bytes([40 * first + second])
    for arc in arcs:
        digits = [arc & 0x7F]
        while arc := arc >> 7:
            digits.append(0x80 | arc & 0x7F)
        content += bytes(reversed(digits))
    return element(0x06, content)


# Quotes.


def td_report(*, body_type=2, tee_tcb_svn=TEE_TCB_SVN, signer=MODULE_SIGNER, attributes=1 << 28, **fields):
    """Write the body of a quote, of 584 (type 2) or 648 bytes (type 3)."""
    body = [
        tee_tcb_svn,
        fields.get("mrseam", b"\x11" * 48),
        signer,
        fields.get("seam_attributes", bytes(8)),
        attributes.to_bytes(8, "little"),
        fields.get("xfam", 0x61AE7).to_bytes(8, "little"),
        fields.get("mrtd", b"\x22" * 48),
        fields.get("mrconfigid", b"\x33" * 48),
        b"\x44" * 48,
        b"\x55" * 48,
        *fields.get("rtmrs", [bytes([0x60 + number]) * 48 for number in range(4)]),
        fields.get("report_data", bytes(range(64))),
    ]
    if body_type == 3:
        body += [fields.get("tee_tcb_svn2", tee_tcb_svn), fields.get("mrservicetd", bytes(48))]
    return b"".join(body)


def qe_report(report_data, *, signer=QE_SIGNER, product=2, svn=6, miscselect=bytes(4), attributes=None):
    attributes = bytes.fromhex("1500000000000000e700000000000000") if attributes is None else attributes
    return b"".join(
        [
            bytes(range(16)),
            miscselect,
            bytes(28),
            attributes,
            b"\x77" * 32,
            bytes(32),
            signer,
            bytes(96),
            product.to_bytes(2, "little"),
            svn.to_bytes(2, "little"),
            bytes(60),
            report_data,
        ]
    )


def quote(
    machine,
    *,
    version=4,
    body=None,
    body_type=2,
    qe=None,
    bound_key=None,
    auth_data=bytes(range(32)),
    chain=None,
    header=None,
    inner_type=5,
    outer_type=6,
    surplus=b"",
    after=b"",
    qe_key=None,
):
    """Write and sign a quote. `bound_key` replaces what the QE's report is about; `qe_key` signs that report."""
    body = td_report(body_type=body_type) if body is None else body
    head = header or number(version) + number(2) + number(0x81, 4) + bytes(4) + VENDOR + bytes(range(20))
    signed = head + (number(body_type) + number(len(body), 4) if version == 5 else b"") + body
    key = public_point(machine.attestation_key)
    report = qe_report(sha256((bound_key or key) + auth_data).digest() + bytes(32), **(qe or {}))
    inner = number(inner_type) + sized(machine.chain if chain is None else chain)
    outer = report + raw_signature(qe_key or machine.pck.key, report) + number(len(auth_data)) + auth_data + inner
    signatures = (
        raw_signature(machine.attestation_key, signed) + key + number(outer_type) + sized(outer + surplus) + after
    )
    return signed + sized(signatures)


def number(value, size=2):
    return value.to_bytes(size, "little")


def sized(content):
    return number(len(content), 4) + content


def public_point(key):
    return key.public_key().public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)[1:]


def raw_signature(key, data, *, size=32, algorithm=None, byteorder="big"):
    """Sign, and write r and s side by side."""
    r, s = decode_dss_signature(key.sign(data, ec.ECDSA(algorithm or hashes.SHA256(), deterministic_signing=True)))
    return r.to_bytes(size, byteorder) + s.to_bytes(size, byteorder)


# Collateral.


def tcb_level(components=COMPONENTS, pce_svn=PCE_SVN, tdx=(5, 0, 2), status="UpToDate", advisories=None):
    tdx = [*tdx, *[0] * (16 - len(tdx))]
    level = {
        "tcb": {
            "sgxtcbcomponents": [{"svn": svn, "category": "BIOS"} for svn in components],
            "pcesvn": pce_svn,
            "tdxtcbcomponents": [{"svn": svn} for svn in tdx],
        },
        "tcbDate": "2026-03-13T00:00:00Z",
        "tcbStatus": status,
    }
    return level | ({"advisoryIDs": advisories} if advisories else {})


def svn_level(svn, status="UpToDate", advisories=None):
    level = {"tcb": {"isvsvn": svn}, "tcbDate": "2026-03-13T00:00:00Z", "tcbStatus": status}
    return level | ({"advisoryIDs": advisories} if advisories else {})


def module(name="TDX_03", levels=None, signer=MODULE_SIGNER, attributes="00" * 8, mask="FF" * 8):
    identity = {"mrsigner": signer.hex().upper(), "attributes": attributes, "attributesMask": mask}
    return identity if name is None else {"id": name, **identity, "tcbLevels": levels or [svn_level(3)]}


def stamp(time):
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def tcb_info(*, levels=None, modules=None, base_module=None, start=NOW - DAY, end=NOW + 29 * DAY, **members):
    """Make a TCB info; `members` replace or add members, and None leaves one out."""
    info = {
        "id": "TDX",
        "version": 3,
        "issueDate": stamp(start),
        "nextUpdate": stamp(end),
        "fmspc": FMSPC.hex().upper(),
        "pceId": PCE_ID.hex(),
        "tcbType": 0,
        "tcbEvaluationDataNumber": 17,
        "tdxModule": base_module or module(None),
        "tdxModuleIdentities": modules or [module()],
        "tcbLevels": levels or [tcb_level()],
    } | members
    return write({name: value for name, value in info.items() if value is not None})


def qe_identity(*, levels=None, start=NOW - DAY, end=NOW + 29 * DAY, **members):
    identity = {
        "id": "TD_QE",
        "version": 2,
        "issueDate": stamp(start),
        "nextUpdate": stamp(end),
        "tcbEvaluationDataNumber": 17,
        "miscselect": "00000000",
        "miscselectMask": "FFFFFFFF",
        "attributes": "11000000000000000000000000000000",
        "attributesMask": "FBFFFFFFFFFFFFFF0000000000000000",
        "mrsigner": QE_SIGNER.hex().upper(),
        "isvprodid": 2,
        "tcbLevels": levels or [svn_level(4)],
    } | members
    return write({name: value for name, value in identity.items() if value is not None})


def write(document):
    return json.dumps(document, separators=(",", ":")).encode()


def collateral(*, of=None, info=None, identity=None, signer=None, qe_signer=None, **parts):
    """Sign collateral: a dict of the parts that `TdxCollateral` has. `parts` replace them afterwards."""
    of = of or intel()
    signer, qe_signer = signer or of.signing, qe_signer or of.signing
    info = tcb_info() if info is None else info
    identity = qe_identity() if identity is None else identity
    return {
        "tcb_info": info,
        "tcb_info_signature": raw_signature(signer.key, info),
        "tcb_info_issuer_chain": bundle(signer, of.root),
        "qe_identity": identity,
        "qe_identity_signature": raw_signature(qe_signer.key, identity),
        "qe_identity_issuer_chain": bundle(qe_signer, of.root),
        "root_ca_crl": of.root.crl(),
        "pck_crl": of.platform_ca.crl(),
        "pck_crl_issuer_chain": bundle(of.platform_ca, of.root),
    } | parts


def as_json(parts):
    """Write collateral as one JSON file."""
    binary = ("tcb_info_signature", "qe_identity_signature", "root_ca_crl", "pck_crl")
    return json.dumps({name: part.hex() if name in binary else part.decode() for name, part in parts.items()})
