"""Verify attestation reports of AMD SEV-SNP with the certificates of AMD's key distribution service.

Certificates: AMD 57230, "Versioned Chip Endorsement Key (VCEK) Certificate and KDS Interface Specification", section 3.
"""

from dataclasses import dataclass
from datetime import datetime

from cryptography.x509 import Certificate

from fastrack._util.public import public
from fastrack.attest._cpu.snp_report import EVIDENCE, SIGNED_SIZE, SnpProduct, SnpReport, SnpTcb, parse_snp_report
from fastrack.attest._errors import malformed, refused
from fastrack.attest._formats import der, x509
from fastrack.attest._formats.binary import Cursor
from fastrack.attest._formats.roots import AMD_ROOTS, Roots
from fastrack.attest._formats.signatures import P384

_OID = "1.3.6.1.4.1.3704.1"
_LEVELS = {"bootloader": (1, "blSPL"), "tee": (2, "teeSPL"), "snp": (3, "snpSPL"), "microcode": (8, "ucodeSPL")}
_LEVELS_OF_TURIN = _LEVELS | {"fmc": (9, "fmcSPL")}
_CHIP_ID, _PROVIDER = f"{_OID}.4", f"{_OID}.5"
_CHIP_ID_SIZES = {SnpProduct.MILAN: 64, SnpProduct.GENOA: 64, SnpProduct.TURIN: 8}
_OTHER = "Fetch the certificate for the chip id and the reported TCB of this report."


@public
@dataclass(frozen=True, slots=True)
class VerifiedSnpReport:
    """A report that a SEV-SNP platform signed, whose certificates lead to a pinned root of AMD.

    The report is proved, not judged: outdated platforms and debuggable guests have valid reports too. A `Policy`
    judges them. `product` comes from the certificates; `provider` is the cloud provider of a VLEK, None for a VCEK.
    `chip_id` is the id of the chip, 64 bytes: that of the certificate of a VCEK, or as a report by a VLEK tells it, and
    None if its host masks it. `fastrack.attest` describes the times.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.VerifiedSnpReport.__match_args__
    ('report', 'product', 'provider', 'verified_at', 'revocation_checked_at', 'valid_until', 'chip_id')
    """

    report: SnpReport
    product: SnpProduct
    provider: str | None
    verified_at: datetime
    revocation_checked_at: datetime | None
    valid_until: datetime
    chip_id: bytes | None = None

    @property
    def report_data(self) -> bytes:
        """64 bytes that the guest chose."""
        return self.report.report_data


@public
def verify_snp_report(
    report: SnpReport | bytes,
    leaf: bytes,
    issuers: bytes,
    *,
    now: datetime,
    roots: Roots = AMD_ROOTS,
    crl: bytes | None = None,
) -> VerifiedSnpReport:
    """Verify a report of AMD SEV-SNP with its certificates, offline.

    Checks that the key of `leaf` signed the report, and that the certificate matches the report's chip (or provider)
    and patch levels and leads to the product's root. `fastrack.attest` describes other parameters and errors.

    Parameters
    ----------
    report : SnpReport or bytes
        The report. A parsed one is parsed again.
    leaf : bytes
        The certificate of the VCEK or VLEK, in DER or PEM.
    issuers : bytes
        The certificates of its issuer (ASK or ASVK) and of the root (ARK), in PEM, in the order of ``cert_chain``.
    crl : bytes, optional
        The root's revocation list, in DER. The result has its date; without it, revocation is not checked.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import attest
    >>> attest.verify_snp_report(b"none", b"", b"", now=datetime(2026, 6, 1, tzinfo=UTC))
    Traceback (most recent call last):
        ...
    fastrack.FormatError: reading the SNP report failed: expected 2 to 5 as its VERSION at offset 0, got 1701736302. ...
    """
    parsed = parse_snp_report(report.data if isinstance(report, SnpReport) else report)
    certificates = (load_leaf(leaf), *x509.load_chain(issuers, evidence="AMD chain"))
    chain = x509.verify_chain(certificates, roots=roots, now=now, evidence="AMD chain", algorithms=x509.PSS_SHA384)
    product = _require_names(chain, parsed)
    key, signed = chain.leaf.public_key(), parsed.data[:SIGNED_SIZE]
    P384.verify(key, parsed.signature, signed, EVIDENCE, byteorder="little")
    _require_tcb(chain.leaf, parsed, product)
    provider, chip_id = None, parsed.chip_id if any(parsed.chip_id) else None
    if parsed.signing_key == "VCEK":
        chip_id = _read_chip(chain.leaf, parsed, product)
    else:
        provider = read_provider(chain.leaf)
    issued_at, valid_until = None, chain.valid_until
    if crl is not None:
        name = "AMD revocation list"
        verified = x509.verify_crl(x509.load_crl(crl, evidence=name), chain.root, now=now, evidence=name)
        x509.require_unrevoked(chain.issuer, verified, evidence=name)
        issued_at, valid_until = verified.issued_at, min(chain.valid_until, verified.valid_until)
    return VerifiedSnpReport(parsed, product, provider, now, issued_at, valid_until, chip_id)


def load_leaf(leaf: bytes) -> Certificate:
    """Load the certificate of a VCEK or VLEK, in DER or PEM."""
    if not leaf.startswith(b"-----"):
        return x509.load_certificate(leaf, evidence="VCEK certificate")
    certificates = x509.load_chain(leaf, evidence="VCEK certificate")
    if len(certificates) != 1:
        raise malformed("VCEK certificate", "text", None, wanted="one certificate", found=len(certificates))
    return certificates[0]


def _require_names(chain: x509.VerifiedChain, report: SnpReport) -> SnpProduct:
    """Require AMD's certificate names, all for the report's product, and return the product."""
    names = [x509.subject_name(certificate) for certificate in chain.certificates]
    product = report.product or next((line for line in SnpProduct if names[-1] == f"ARK-{line}"), SnpProduct.MILAN)
    issuer = f"SEV-{product}" if report.signing_key == "VCEK" else f"SEV-VLEK-{product}"
    subjects = [f"SEV-{report.signing_key}", issuer, f"ARK-{product}"]
    if names != subjects:
        raise refused("AMD chain", "subjects", wanted=", ".join(subjects), found=", ".join(names), advice=_OTHER)
    return product


def _require_tcb(leaf: Certificate, report: SnpReport, product: SnpProduct) -> None:
    levels = {}
    for name, (number, field) in (_LEVELS_OF_TURIN if product is SnpProduct.TURIN else _LEVELS).items():
        cursor = Cursor(_read_extension(leaf, f"{_OID}.3.{number}", field), "VCEK certificate")
        levels[name] = der.read_integer(cursor, field)
        cursor.done()
    tcb = SnpTcb(**levels)
    if tcb != report.reported_tcb:
        raise refused("SNP report", "REPORTED_TCB", wanted=tcb, found=report.reported_tcb, advice=_OTHER)


def _read_chip(leaf: Certificate, report: SnpReport, product: SnpProduct) -> bytes:
    """Return the id of the chip whose key signed a report, which the report must have, unless its host masks it."""
    size = _CHIP_ID_SIZES[product]
    value = _read_extension(leaf, _CHIP_ID, "hwID")
    # AMD's document wants an OCTET STRING, but certificates have the bare bytes: accept both.
    if len(value) != size:
        value = der.open_value(value, "VCEK certificate", der.OCTET_STRING, "hwID").rest("hwID")
    if len(value) != size:
        raise malformed("VCEK certificate", "hwID", None, wanted=f"{size} bytes", found=f"{len(value)} bytes")
    chip_id = value.ljust(len(report.chip_id), b"\0")
    if any(report.chip_id) and report.chip_id != chip_id:
        raise refused("SNP report", "CHIP_ID", wanted=chip_id, found=report.chip_id, advice=_OTHER)
    return chip_id


def read_provider(leaf: Certificate) -> str:
    """Return the cloud provider that a VLEK's certificate names."""
    value = _read_extension(leaf, _PROVIDER, "cspID")
    content = der.open_value(value, "VCEK certificate", der.IA5_STRING, "cspID").rest("cspID")
    try:
        return content.decode("ascii")
    except ValueError:
        raise malformed("VLEK certificate", "cspID", None, wanted="text in ASCII", found=content) from None


def _read_extension(leaf: Certificate, oid: str, field: str) -> bytes:
    value = x509.extension_value(leaf, oid)
    if value is None:
        raise malformed("VCEK certificate", field, None, wanted=f"the extension {oid}", found="none")
    return value
