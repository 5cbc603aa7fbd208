"""Verify quotes of Intel TDX: the signatures from Intel's root down to the report, and the state of the platform."""

from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from fastrack._util.public import public
from fastrack.attest._cpu.event_log import EventLog
from fastrack.attest._cpu.tdx_collateral import Document, TdxCollateral, TdxTcb, find_tcb, verify_documents
from fastrack.attest._cpu.tdx_pck import PckIdentity, read_pck_identity
from fastrack.attest._cpu.tdx_quote import EVIDENCE, TdReport, TdxQuote, parse_tdx_quote
from fastrack.attest._errors import refused
from fastrack.attest._formats import x509
from fastrack.attest._formats.roots import INTEL_ROOTS, Roots
from fastrack.attest._formats.signatures import P256

_LISTS = ("root revocation list", "PCK revocation list")
_PCK = "Intel SGX PCK Certificate"
_PCK_ISSUERS = frozenset({"Intel SGX PCK Platform CA", "Intel SGX PCK Processor CA"})
_AGAIN = "The quote was altered, or its parts are of different quotes; ask for it again."


@public
@dataclass(frozen=True, slots=True)
class VerifiedTdxQuote:
    """A quote that a TDX platform signed, whose certificates lead to a pinned root and were not revoked.

    The state of the platform (`tcb`) and the report are proved, not judged: outdated platforms and debuggable TDs have
    valid quotes too. A `Policy` judges them. `collateral_issued_at` is the time of the oldest collateral document,
    except the root's revocation list, which is issued once a year. `fastrack.attest` describes the other times.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.VerifiedTdxQuote.__match_args__
    ('report', 'tcb', 'platform', 'verified_at', 'collateral_issued_at', 'valid_until', 'event_log')
    """

    report: TdReport
    tcb: TdxTcb
    platform: PckIdentity
    verified_at: datetime
    collateral_issued_at: datetime
    valid_until: datetime
    event_log: EventLog | None = None
    """The event log of the TD, if it sent one: its events made the registers of the report."""

    @property
    def report_data(self) -> bytes:
        """64 bytes that the TD chose."""
        return self.report.report_data


@public
def verify_tdx_quote(
    quote: TdxQuote | bytes, collateral: TdxCollateral, *, now: datetime, roots: Roots = INTEL_ROOTS
) -> VerifiedTdxQuote:
    """Verify a quote of Intel TDX with its collateral, offline.

    The attestation key signed the quote; the quoting enclave's report names the attestation key; the platform's PCK
    signed the enclave's report; the PCK's certificate leads to the root, and no revocation list has it or its issuer.
    Intel signed the TCB info and the QE identity; they are valid at `now`, and cover the state of the platform.
    `fastrack.attest` describes other parameters and errors.

    Parameters
    ----------
    quote : TdxQuote or bytes
        The quote. A parsed one is parsed again.
    collateral : TdxCollateral
        TCB info, QE identity and revocation lists for this platform.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import attest
    >>> collateral = attest.TdxCollateral(*[b""] * 9)
    >>> attest.verify_tdx_quote(b"no quote", collateral, now=datetime(2026, 6, 1, tzinfo=UTC))
    Traceback (most recent call last):
        ...
    fastrack.FormatError: reading the TDX quote failed: expected 4 or 5 as its version at offset 0, got 28526. It is ...
    """
    parsed = parse_tdx_quote(quote.data if isinstance(quote, TdxQuote) else quote)
    chain = verify_signatures(parsed, now=now, roots=roots)
    own = collateral.pck_certificate_chain
    if own is not None and x509.load_chain(own, evidence="PCK chain of the collateral") != chain.certificates:
        advice = "Fetch the collateral for this machine."
        raise refused("collateral", "PCK chain", wanted="that of the quote", found="another", advice=advice)
    documents = verify_documents(collateral, roots=roots, now=now)
    root_list, pck_list = verify_lists(collateral, chain, documents, roots=roots, now=now)
    for certificate in (chain.issuer, *(document.chain.leaf for document in documents)):
        x509.require_unrevoked(certificate, root_list, evidence=_LISTS[0])
    x509.require_unrevoked(chain.leaf, pck_list, evidence=_LISTS[1])
    pck = read_pck_identity(chain.leaf)
    ends = [end for document in documents for end in (document.valid_until, document.chain.valid_until)]
    return VerifiedTdxQuote(
        report=parsed.report,
        tcb=find_tcb(*documents, pck, parsed),
        platform=pck,
        verified_at=now,
        collateral_issued_at=min(pck_list.issued_at, *(document.issued_at for document in documents)),
        valid_until=min(*ends, root_list.valid_until, pck_list.valid_until, chain.valid_until),
    )


def verify_signatures(quote: TdxQuote, *, now: datetime, roots: Roots) -> x509.VerifiedChain:
    """Verify all signatures from the root to the report, without collateral, and return the PCK chain."""
    certificates = x509.load_chain(quote.pck_chain, evidence="PCK chain")
    chain = x509.verify_chain(certificates, roots=roots, now=now, evidence="PCK chain")
    names = [x509.subject_name(certificate) for certificate in certificates]
    if len(names) != 3 or names[0] != _PCK or names[1] not in _PCK_ISSUERS:
        wanted = f"{_PCK!r}, issued by one of {', '.join(map(repr, sorted(_PCK_ISSUERS)))}, below the root"
        advice = "The certificate is not that of a platform; ask for the quote again."
        raise refused("PCK chain", "subjects", wanted=wanted, found=", ".join(names), advice=advice)
    key = chain.leaf.public_key()
    P256.verify(key, quote.qe_signature, quote.qe_report.data, EVIDENCE, "signature of the QE report")
    named, data = sha256(quote.attestation_key + quote.qe_auth_data).digest() + bytes(32), quote.qe_report.report_data
    if data != named:
        raise refused(EVIDENCE, "report data of the QE report", wanted=named, found=data, advice=_AGAIN)
    key = P256.load_point(quote.attestation_key, evidence=EVIDENCE, field="attestation key")
    P256.verify(key, quote.signature, quote.signed, EVIDENCE)
    return chain


def verify_lists(
    collateral: TdxCollateral, pck: x509.VerifiedChain, documents: tuple[Document, ...], *, roots: Roots, now: datetime
) -> list[x509.VerifiedCrl]:
    """Verify the revocation lists of the root and the PCK's issuer, whatever is in them."""
    for document in documents:
        if document.chain.root != pck.root:
            raise refused("collateral", "root", wanted="that of the PCK chain", found="another", advice=_AGAIN)
    name = "issuer chain of the PCK revocation list"
    authorities = x509.load_chain(collateral.pck_crl_issuer_chain, evidence=name)
    if authorities != pck.certificates[1:]:  # another certificate of the same key is allowed
        x509.verify_chain((pck.leaf, *authorities), roots=roots, now=now, evidence=name)
    pairs = (collateral.root_ca_crl, pck.root), (collateral.pck_crl, pck.issuer)
    return [
        x509.verify_crl(x509.load_crl(data, evidence=evidence), issuer, now=now, evidence=evidence)
        for (data, issuer), evidence in zip(pairs, _LISTS, strict=True)
    ]
