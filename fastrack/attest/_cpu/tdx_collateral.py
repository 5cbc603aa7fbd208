"""Read and verify the collateral of TDX quotes: TCB info, QE identity and revocation lists.

Structure and rules: Intel, "Intel SGX and Intel TDX Registration and Provisioning Certification Service", API version 4
(TCB info version 3, enclave identity version 2).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from fastrack._documents.exchange import Reader
from fastrack._documents.fields import INTEGER, TEXT, TIME, hexadecimal, list_of, member_of
from fastrack._util.public import public
from fastrack.attest._cpu.tdx_pck import PckIdentity
from fastrack.attest._cpu.tdx_quote import QeReport, TdReport, TdxQuote
from fastrack.attest._errors import malformed, refused, require_in_force
from fastrack.attest._formats.roots import Roots
from fastrack.attest._formats.signatures import P256
from fastrack.attest._formats.x509 import VerifiedChain, load_chain, subject_name, verify_chain

_COMPONENTS = list_of(member_of("svn", INTEGER))
_ADVISORIES = list_of(TEXT)
_SIGNER = "Intel SGX TCB Signing"
_NEWER = "Fetch current collateral, and check the time that was passed as now=."
_OTHER = "Fetch the collateral for the FMSPC and PCEID of this machine's PCK certificate."
_UNKNOWN = "Fetch current collateral; if the platform is still unknown to it, do not trust the machine."


@public
class TcbStatus(StrEnum):
    """The state of a trusted computing base (TCB), in Intel's words.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.TcbStatus("UpToDate") is attest.TcbStatus.UP_TO_DATE
    True
    """

    UP_TO_DATE = "UpToDate"
    SW_HARDENING_NEEDED = "SWHardeningNeeded"
    CONFIGURATION_NEEDED = "ConfigurationNeeded"
    CONFIGURATION_AND_SW_HARDENING_NEEDED = "ConfigurationAndSWHardeningNeeded"
    OUT_OF_DATE = "OutOfDate"
    OUT_OF_DATE_CONFIGURATION_NEEDED = "OutOfDateConfigurationNeeded"
    REVOKED = "Revoked"


_PART_STATUS = (TcbStatus.UP_TO_DATE, TcbStatus.OUT_OF_DATE, TcbStatus.REVOKED)  # of the module and the enclave


@public
@dataclass(frozen=True, slots=True)
class TcbLevel:
    """The collateral's level for a part of the TCB, with Intel's judgement as its `status`.

    It has fixes for all weaknesses known at `date`. The security advisories `advisory_ids` apply to it.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import attest
    >>> level = attest.TcbLevel(attest.TcbStatus.OUT_OF_DATE, datetime(2024, 3, 13, tzinfo=UTC), ("INTEL-SA-00837",))
    >>> level.status.value
    'OutOfDate'
    """

    status: TcbStatus
    date: datetime
    advisory_ids: tuple[str, ...] = ()


@public
@dataclass(frozen=True, slots=True)
class TdxTcb:
    """The state of the trusted computing base of a TDX platform, by verified collateral.

    It is derived from ``TEE_TCB_SVN`` of the report, the versions at the TD's start. Newer present versions
    (``TEE_TCB_SVN2``), where a restart of the TD would help, are not considered.

    Attributes
    ----------
    platform : TcbLevel
        The level of CPU, microcode and firmware.
    module : TcbLevel or None
        The level of the TDX module; None for version 0, which the platform's level includes.
    quoting_enclave : TcbLevel
        The level of the quoting enclave.
    evaluation_number : int
        The lower ``tcbEvaluationDataNumber`` of the two documents. It grows with every TCB recovery.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import attest
    >>> date = datetime(2024, 3, 13, tzinfo=UTC)
    >>> good = attest.TcbLevel(attest.TcbStatus.UP_TO_DATE, date)
    >>> old = attest.TcbLevel(attest.TcbStatus.OUT_OF_DATE, date, ("INTEL-SA-00837",))
    >>> tcb = attest.TdxTcb(platform=good, module=old, quoting_enclave=good, evaluation_number=17)
    >>> tcb.status.value, tcb.advisory_ids
    ('OutOfDate', ('INTEL-SA-00837',))
    """

    platform: TcbLevel
    module: TcbLevel | None
    quoting_enclave: TcbLevel
    evaluation_number: int

    @property
    def status(self) -> TcbStatus:
        """The combined status of all parts, by the rules of Intel's quote verification library."""
        parts = {part.status for part in (self.module, self.quoting_enclave) if part}
        if TcbStatus.REVOKED in {self.platform.status, *parts}:
            return TcbStatus.REVOKED
        if TcbStatus.OUT_OF_DATE not in parts:
            return self.platform.status
        # If a part is out of date, only "needs configuration" of the platform's status still counts.
        needs_configuration = "Configuration" in self.platform.status
        return TcbStatus.OUT_OF_DATE_CONFIGURATION_NEEDED if needs_configuration else TcbStatus.OUT_OF_DATE

    @property
    def advisory_ids(self) -> tuple[str, ...]:
        """The advisories that apply to any part, in order."""
        parts = [part for part in (self.platform, self.module, self.quoting_enclave) if part]
        return tuple(sorted({advisory for part in parts for advisory in part.advisory_ids}))


@public
@dataclass(frozen=True, slots=True)
class TdxCollateral:
    """The signed documents for verifying a TDX quote. Nothing is verified yet.

    Attributes
    ----------
    tcb_info, qe_identity : bytes
        The signed member of Intel's answer, byte for byte.
    tcb_info_signature, qe_identity_signature : bytes
        Their signatures, 64 bytes each.
    tcb_info_issuer_chain, qe_identity_issuer_chain : bytes
        The certificates of the signers, in PEM.
    root_ca_crl, pck_crl : bytes
        Revocation lists of the root and of the PCK certificate's issuer, in DER, or as text in PEM or hexadecimal.
    pck_crl_issuer_chain : bytes
        The certificates of the issuer, in PEM.
    pck_certificate_chain : bytes or None
        The certificates of the platform, in PEM, which some tools keep here too. They must be those of the quote.
    """

    tcb_info: bytes = field(repr=False)
    tcb_info_signature: bytes = field(repr=False)
    tcb_info_issuer_chain: bytes = field(repr=False)
    qe_identity: bytes = field(repr=False)
    qe_identity_signature: bytes = field(repr=False)
    qe_identity_issuer_chain: bytes = field(repr=False)
    root_ca_crl: bytes = field(repr=False)
    pck_crl: bytes = field(repr=False)
    pck_crl_issuer_chain: bytes = field(repr=False)
    pck_certificate_chain: bytes | None = field(default=None, repr=False)

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """Read the usual single-file form: an object with a string for each part.

        Signatures and revocation lists are in hexadecimal, lists also in PEM; TCB info and QE identity hold the signed
        text; ``pck_certificate_chain`` may be absent. Raise `FormatError` if a member is missing, unknown or malformed.

        Examples
        --------
        >>> from fastrack import attest
        >>> attest.TdxCollateral.from_json("{}")
        Traceback (most recent call last):
            ...
        fastrack.FormatError: reading the TDX collateral failed: expected a member 'tcb_info' as its content, got ...
        """
        document = "TDX collateral"
        node = Reader.parse(text.encode(errors="surrogatepass") if isinstance(text, str) else text, document)
        parts: dict[str, Any] = {name: _read_part(node, name) for name in TDX_PARTS}
        if _PLATFORM_CHAIN in node.names and node.member(_PLATFORM_CHAIN).value is not None:
            parts[_PLATFORM_CHAIN] = _read_part(node, _PLATFORM_CHAIN)
        if unknown := node.names - {*TDX_PARTS, _PLATFORM_CHAIN}:
            raise malformed(document, "content", None, wanted="known members", found=", ".join(sorted(unknown)))
        return cls(**parts)


_PLATFORM_CHAIN = "pck_certificate_chain"
TDX_PARTS = tuple(part.name for part in fields(TdxCollateral) if part.name != _PLATFORM_CHAIN)
"""The names of the parts that every collateral has."""


def _read_part(node: Reader, name: str) -> bytes:
    if name.endswith("_signature"):
        return node.read(name, hexadecimal(64))
    if name.endswith("_crl") and not node.read(name, TEXT).startswith("-----"):
        return node.read(name, hexadecimal(None))
    return node.read(name, TEXT).encode(errors="surrogatepass")


@dataclass(frozen=True, slots=True)
class Document:
    """A verified, signed JSON document."""

    content: Reader
    chain: VerifiedChain
    issued_at: datetime
    valid_until: datetime
    evaluation_number: int


def verify_documents(collateral: TdxCollateral, *, roots: Roots, now: datetime) -> tuple[Document, Document]:
    """Verify signatures and dates of the TCB info and the QE identity, and their signers' certificates."""
    chains = {"TCB info": collateral.tcb_info_issuer_chain, "QE identity": collateral.qe_identity_issuer_chain}
    signers: dict[bytes, VerifiedChain] = {}
    for evidence, chain in chains.items():
        if chain not in signers:  # usually both documents have the same signer
            signers[chain] = _verify_signer(chain, roots=roots, now=now, evidence=evidence)

    def verify(text: bytes, signature: bytes, evidence: str) -> Document:
        signer = signers[chains[evidence]]
        P256.verify(signer.leaf.public_key(), signature, text, evidence)
        content = Reader.parse(text, evidence)
        issued_at, next_update = content.read("issueDate", TIME), content.read("nextUpdate", TIME)
        require_in_force(evidence, "validity", issued_at, next_update, now, _NEWER)
        return Document(content, signer, issued_at, next_update, content.read("tcbEvaluationDataNumber", INTEGER))

    tcb_info = verify(collateral.tcb_info, collateral.tcb_info_signature, "TCB info")
    return tcb_info, verify(collateral.qe_identity, collateral.qe_identity_signature, "QE identity")


def _verify_signer(chain: bytes, *, roots: Roots, now: datetime, evidence: str) -> VerifiedChain:
    certificates = load_chain(chain, evidence=f"{evidence} issuer chain")
    names = [subject_name(certificate) for certificate in certificates]
    if len(names) != 2 or names[0] != _SIGNER:
        signer, advice = f"{_SIGNER!r} directly below the root", "Fetch the collateral again."
        raise refused(evidence, "signer", wanted=signer, found=", ".join(names), advice=advice)
    return verify_chain(certificates, roots=roots, now=now, evidence=f"{evidence} issuer chain")


def find_tcb(tcb_info: Document, qe_identity: Document, pck: PckIdentity, quote: TdxQuote) -> TdxTcb:
    """Find the levels of the platform, TDX module and quoting enclave, which verified documents must cover."""
    return TdxTcb(
        platform=_find_platform_level(tcb_info.content, pck, quote.report),
        module=_find_module_level(tcb_info.content, quote.report),
        quoting_enclave=_find_qe_level(qe_identity.content, quote.qe_report),
        evaluation_number=min(tcb_info.evaluation_number, qe_identity.evaluation_number),
    )


def _find_platform_level(tcb_info: Reader, pck: PckIdentity, report: TdReport) -> TcbLevel:
    """Find the TCB level of a platform: the first with all its security versions reached."""
    tcb_info.expect("id", "TDX")
    tcb_info.expect("version", 3)
    tcb_info.expect("tcbType", 0)
    named = {"fmspc": pck.fmspc, "pceId": pck.pce_id}
    checks = ((name, value, tcb_info.read(name, hexadecimal(len(value)))) for name, value in named.items())
    _require_equal("TCB info", checks, _OTHER)
    # The first two components belong to the TDX module, which has its own levels from version 1 on.
    first = 2 if report.tee_tcb_svn[1] else 0
    for level in tcb_info.items("tcbLevels"):
        tcb = level.member("tcb")
        if (
            _reaches(pck.components, _read_components(tcb, "sgxtcbcomponents"))
            and pck.pce_svn >= tcb.read("pcesvn", INTEGER)
            and _reaches(report.tee_tcb_svn[first:], _read_components(tcb, "tdxtcbcomponents")[first:])
        ):
            return _read_level(level)
    raise refused("TDX quote", "TCB", wanted="a known level", found=report.tee_tcb_svn + pck.cpu_svn, advice=_UNKNOWN)


def _find_module_level(tcb_info: Reader, report: TdReport) -> TcbLevel | None:
    """Find the TCB level of the TDX module (none for version 0), and verify its signer and attributes."""
    svn, version = report.tee_tcb_svn[:2]
    if not version:
        _check_module(tcb_info.member("tdxModule"), report)
        return None
    name = f"TDX_{version:02X}"
    for identity in tcb_info.items("tdxModuleIdentities"):
        if identity.read("id", TEXT).upper() == name:
            _check_module(identity, report)
            return _find_svn_level(identity, svn, "TDX module", f"version {version}, SVN {svn}")
    raise refused("TDX quote", "TDX module", wanted="a module of the TCB info", found=name, advice=_UNKNOWN)


def _find_qe_level(identity: Reader, report: QeReport) -> TcbLevel:
    """Find the TCB level of a quoting enclave, which must be Intel's for TDX."""
    identity.expect("id", "TD_QE")
    identity.expect("version", 2)
    checks = (
        ("MRSIGNER", identity.read("mrsigner", hexadecimal(32)), report.mrsigner),
        ("ISVPRODID", identity.read("isvprodid", INTEGER), report.isv_prod_id),
        # In memory order, like the attributes. Intel does not document the order; all bytes are 0 in practice.
        ("MISCSELECT", *_masked(identity, "miscselect", report.miscselect)),
        ("ATTRIBUTES", *_masked(identity, "attributes", report.attributes)),
    )
    _require_equal("QE report", checks, "The quote was made by another enclave than Intel's; do not trust it.")
    return _find_svn_level(identity, report.isv_svn, "quoting enclave", f"SVN {report.isv_svn}")


def _check_module(identity: Reader, report: TdReport) -> None:
    checks = (
        ("MRSIGNERSEAM", identity.read("mrsigner", hexadecimal(48)), report.mrsignerseam),
        ("SEAMATTRIBUTES", *_masked(identity, "attributes", report.seam_attributes)),
    )
    _require_equal("TDX quote", checks, "The TDX module is not the one that Intel signed; do not trust the machine.")


def _require_equal(evidence: str, checks: Iterable[tuple[str, object, object]], advice: str) -> None:
    for name, expected, value in checks:
        if expected != value:
            raise refused(evidence, name, wanted=expected, found=value, advice=advice)


def _masked(identity: Reader, name: str, found: bytes) -> tuple[bytes, bytes]:
    """Return the expected value, and `found` with the mask applied."""
    mask = identity.read(f"{name}Mask", hexadecimal(len(found)))
    return identity.read(name, hexadecimal(len(found))), bytes(a & b for a, b in zip(found, mask, strict=True))


def _find_svn_level(identity: Reader, svn: int, what: str, found: str) -> TcbLevel:
    for level in identity.items("tcbLevels"):
        if svn >= level.member("tcb").read("isvsvn", INTEGER):
            found_level = _read_level(level)
            if found_level.status not in _PART_STATUS:  # Intel gives parts no other, and defines no rule for them
                wanted, found = ", ".join(_PART_STATUS), found_level.status
                raise refused("TDX quote", f"status of the {what}", wanted=wanted, found=found, advice=_UNKNOWN)
            return found_level
    raise refused("TDX quote", what, wanted="a known level", found=found, advice=_UNKNOWN)


def _read_level(level: Reader) -> TcbLevel:
    text = level.read("tcbStatus", TEXT)
    try:
        status = TcbStatus(text)
    except ValueError:
        raise malformed("TCB level", "tcbStatus", None, wanted=", ".join(TcbStatus), found=text) from None
    advisories = level.read("advisoryIDs", _ADVISORIES) if "advisoryIDs" in level.names else ()
    return TcbLevel(status, level.read("tcbDate", TIME), advisories)


def _read_components(tcb: Reader, name: str) -> tuple[int, ...]:
    components = tcb.read(name, _COMPONENTS)
    if len(components) != 16:
        raise malformed("TCB info", name, None, wanted="16 components", found=len(components))
    return components


def _reaches(found: Collection[int], wanted: Collection[int]) -> bool:
    return all(svn >= least for svn, least in zip(found, wanted, strict=True))
