"""Verify quotes of Intel TDX: the signatures from Intel's root down to the report, and the state of the platform."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from fastrack._util.public import attest_public
from fastrack.attest._cpu.tdx_collateral import (
    Document,
    TcbLevel,
    TcbStatus,
    TdxCollateral,
    find_module_level,
    find_platform_level,
    find_qe_level,
    verify_document,
    verify_signer,
)
from fastrack.attest._cpu.tdx_pck import PckIdentity, read_pck_identity
from fastrack.attest._cpu.tdx_quote import EVIDENCE, TdReport, TdxQuote, parse_tdx_quote
from fastrack.attest._errors import refused
from fastrack.attest._formats.roots import INTEL_ROOTS, Roots
from fastrack.attest._formats.signatures import P256
from fastrack.attest._formats.x509 import (
    VerifiedChain,
    VerifiedCrl,
    load_chain,
    load_crl,
    require_unrevoked,
    subject_name,
    verify_chain,
    verify_crl,
)

_PCK = "Intel SGX PCK Certificate"
_PCK_ISSUERS = frozenset({"Intel SGX PCK Platform CA", "Intel SGX PCK Processor CA"})
_AGAIN = "The quote was altered, or its parts are of different quotes; ask for it again."


@attest_public
@dataclass(frozen=True, slots=True)
class TdxTcb:
    """The state of the trusted computing base of a platform with TDX, as verified collateral has it.

    ``TEE_TCB_SVN`` of the report decides, which are the versions when the TD was started. Whether the present ones
    (``TEE_TCB_SVN2``) are newer, so that starting the TD again would help, is not derived.

    Attributes
    ----------
    platform : TcbLevel
        The level of CPU, microcode and firmware.
    module : TcbLevel or None
        The level of the TDX module; None for modules of version 0, which the platform's level includes.
    quoting_enclave : TcbLevel
        The level of the quoting enclave.
    evaluation_number : int
        The lower one of the two documents' ``tcbEvaluationDataNumber``. It grows with every recovery of the TCB.

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
        """The status of all parts together, by the rules of Intel's quote verification library."""
        found = self.platform.status
        for part in (self.module, self.quoting_enclave):
            found = _combine(found, part.status) if part else found
        return found

    @property
    def advisory_ids(self) -> tuple[str, ...]:
        """The advisories that apply to any part, in order."""
        parts = [part for part in (self.platform, self.module, self.quoting_enclave) if part]
        return tuple(sorted({advisory for part in parts for advisory in part.advisory_ids}))


@attest_public
@dataclass(frozen=True, slots=True)
class VerifiedTdxQuote:
    """A quote that a TDX platform signed, whose certificates lead to a pinned root and were not revoked.

    The state of the platform (`tcb`) and the report are proved, and not judged: an outdated platform and a TD that is
    open to its debugger have valid quotes too. A `Policy` judges them.

    Attributes
    ----------
    report : TdReport
        Measurements and attributes of the TD.
    tcb : TdxTcb
        The state of the platform.
    platform : PckIdentity
        The identity of the platform.
    verified_at : datetime.datetime
        The time at which everything was valid.
    collateral_issued_at : datetime.datetime
        The time at which the oldest document of the collateral was issued. The list of the root does not count: it is
        issued once a year.
    valid_until : datetime.datetime
        The first time at which a document of the collateral, or a certificate, is no longer valid.

    Examples
    --------
    >>> from dataclasses import fields
    >>> from fastrack import attest
    >>> [field.name for field in fields(attest.VerifiedTdxQuote)]
    ['report', 'tcb', 'platform', 'verified_at', 'collateral_issued_at', 'valid_until']
    """

    report: TdReport
    tcb: TdxTcb
    platform: PckIdentity
    verified_at: datetime
    collateral_issued_at: datetime
    valid_until: datetime

    @property
    def report_data(self) -> bytes:
        """64 bytes that the TD chose."""
        return self.report.report_data


@attest_public
def verify_tdx_quote(
    quote: TdxQuote | bytes, collateral: TdxCollateral, *, now: datetime, roots: Roots = INTEL_ROOTS
) -> VerifiedTdxQuote:
    """Verify a quote of Intel TDX with its collateral, offline.

    The attestation key signed the quote; the quoting enclave's report names that key; the PCK of the platform signed
    that report; the PCK's certificate leads to the root, and no revocation list has it or its issuer. Intel signed the
    TCB info and the QE identity, which are valid at `now`, are about this platform, and know its state.

    Parameters
    ----------
    quote : TdxQuote or bytes
        The quote. A parsed one is parsed again.
    collateral : TdxCollateral
        TCB info, QE identity and revocation lists for this platform.
    now : datetime.datetime
        The time, with a time zone.
    roots : collection of str
        SHA-256 fingerprints of the roots that are trusted; Intel's by default.

    Returns
    -------
    VerifiedTdxQuote
        The report and the state of the platform.

    Raises
    ------
    AttestationError
        If anything does not hold.
    FormatError
        If a structure is malformed.
    ValueError
        If `now` has no time zone.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> import fastrack
    >>> from fastrack import attest
    >>> collateral = attest.TdxCollateral(*[b""] * 9)
    >>> try:
    ...     attest.verify_tdx_quote(b"no quote", collateral, now=datetime(2026, 6, 1, tzinfo=UTC))
    ... except fastrack.FormatError as error:
    ...     print(error)
    reading the TDX quote failed: expected 4 or 5 as its version at offset 0, got 28526. It is damaged, cut short, ...
    """
    parsed = parse_tdx_quote(quote.data if isinstance(quote, TdxQuote) else quote)
    chain = verify_signatures(parsed, now=now, roots=roots)
    tcb_info, qe_identity = _verify_documents(collateral, roots=roots, now=now)
    lists = _check_revocation(collateral, chain, [tcb_info, qe_identity], roots=roots, now=now)
    pck = read_pck_identity(chain.leaf)
    tcb = TdxTcb(
        platform=find_platform_level(tcb_info.content, pck, parsed.report),
        module=find_module_level(tcb_info.content, parsed.report),
        quoting_enclave=find_qe_level(qe_identity.content, parsed.qe_report),
        evaluation_number=min(tcb_info.evaluation_number, qe_identity.evaluation_number),
    )
    documents = (tcb_info, qe_identity)
    issued = [*(document.issued_at for document in documents), lists[1].issued_at]
    ends = [document.next_update for document in documents]
    ends += [crl.valid_until for crl in lists]
    ends += [document.chain.valid_until for document in documents]
    return VerifiedTdxQuote(
        report=parsed.report,
        tcb=tcb,
        platform=pck,
        verified_at=now,
        collateral_issued_at=min(issued),
        valid_until=min(*ends, chain.valid_until),
    )


def verify_signatures(quote: TdxQuote, *, now: datetime, roots: Roots) -> VerifiedChain:
    """Verify all signatures from the root down to the report, without collateral, and return the PCK chain."""
    chain = verify_chain(load_chain(quote.pck_chain, evidence="PCK chain"), roots=roots, now=now, evidence="PCK chain")
    names = [subject_name(certificate) for certificate in chain.certificates]
    if len(names) != 3 or names[0] != _PCK or names[1] not in _PCK_ISSUERS:
        wanted = f"{_PCK!r}, issued by one of {', '.join(map(repr, sorted(_PCK_ISSUERS)))}, below the root"
        advice = "The certificate is not that of a platform; ask for the quote again."
        raise refused("PCK chain", "subjects", wanted=wanted, found=", ".join(names), advice=advice)
    key = chain.leaf.public_key()
    P256.verify(key, quote.qe_signature, quote.qe_report.data, EVIDENCE, "signature of the QE report")
    named, found = sha256(quote.attestation_key + quote.qe_auth_data).digest() + bytes(32), quote.qe_report.report_data
    if found != named:
        raise refused(EVIDENCE, "report data of the QE report", wanted=named, found=found, advice=_AGAIN)
    key = P256.load_point(quote.attestation_key, evidence=EVIDENCE, field="attestation key")
    P256.verify(key, quote.signature, quote.signed, EVIDENCE)
    return chain


def _verify_documents(collateral: TdxCollateral, *, roots: Roots, now: datetime) -> tuple[Document, Document]:
    tcb_signer = verify_signer(collateral.tcb_info_issuer_chain, roots=roots, now=now, evidence="TCB info")
    if collateral.qe_identity_issuer_chain == collateral.tcb_info_issuer_chain:
        qe_signer = tcb_signer
    else:
        qe_signer = verify_signer(collateral.qe_identity_issuer_chain, roots=roots, now=now, evidence="QE identity")
    text, signature = collateral.tcb_info, collateral.tcb_info_signature
    tcb_info = verify_document(text, signature, tcb_signer, now=now, evidence="TCB info")
    text, signature = collateral.qe_identity, collateral.qe_identity_signature
    return tcb_info, verify_document(text, signature, qe_signer, now=now, evidence="QE identity")


def _check_revocation(
    collateral: TdxCollateral, pck: VerifiedChain, documents: list[Document], *, roots: Roots, now: datetime
) -> list[VerifiedCrl]:
    """Verify both revocation lists, and require that no certificate is on them."""
    for document in documents:
        if document.chain.root != pck.root:
            raise refused("collateral", "root", wanted="that of the PCK chain", found="another", advice=_AGAIN)
    root_crl = load_crl(collateral.root_ca_crl, evidence="root revocation list")
    root_list = verify_crl(root_crl, pck.root, now=now, evidence="root revocation list")
    for certificate in (pck.issuer, *(document.chain.leaf for document in documents)):
        require_unrevoked(certificate, root_list, evidence="root revocation list")
    authorities = load_chain(collateral.pck_crl_issuer_chain, evidence="issuer chain of the PCK revocation list")
    if authorities != pck.certificates[1:]:  # another certificate of the same key will do
        verify_chain((pck.leaf, *authorities), roots=roots, now=now, evidence="issuer chain of the PCK revocation list")
    pck_crl = load_crl(collateral.pck_crl, evidence="PCK revocation list")
    pck_list = verify_crl(pck_crl, pck.issuer, now=now, evidence="PCK revocation list")
    require_unrevoked(pck.leaf, pck_list, evidence="PCK revocation list")
    return [root_list, pck_list]


def _combine(platform: TcbStatus, part: TcbStatus) -> TcbStatus:
    """Combine the status of the platform with that of the TDX module or the quoting enclave."""
    if TcbStatus.REVOKED in {platform, part}:
        return TcbStatus.REVOKED
    if part is not TcbStatus.OUT_OF_DATE:
        return platform
    needs_configuration = {
        TcbStatus.CONFIGURATION_NEEDED,
        TcbStatus.CONFIGURATION_AND_SW_HARDENING_NEEDED,
        TcbStatus.OUT_OF_DATE_CONFIGURATION_NEEDED,
    }
    return TcbStatus.OUT_OF_DATE_CONFIGURATION_NEEDED if platform in needs_configuration else TcbStatus.OUT_OF_DATE
