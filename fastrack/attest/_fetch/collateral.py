"""Fetch the collateral that an offer names into the folder that `collect_evidence` and `verify_offer` read.

Addresses and forms: Intel PCS API version 4; AMD 57230, chapter 4 (KDS); NVIDIA's RIM service, version 1; RFC 6960,
appendix A (OCSP). Each document is verified as evidence is before it is kept, and kept byte for byte.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import cast
from urllib.parse import quote as percent_encode
from urllib.parse import unquote

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA1
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp

from fastrack._documents.exchange import Reader
from fastrack._documents.fields import TEXT, TIME, hexadecimal
from fastrack._net.connections import Answer
from fastrack._util.atomic import new_file
from fastrack._util.gate import most_bytes
from fastrack._util.public import public
from fastrack._util.rights import make_own
from fastrack.attest._cpu.kind import LARGEST, read_collateral
from fastrack.attest._cpu.snp import verify_snp_report
from fastrack.attest._cpu.snp_kind import SnpEvidence, snp_files
from fastrack.attest._cpu.snp_report import SnpProduct, SnpReport, parse_snp_report
from fastrack.attest._cpu.tdx import verify_lists, verify_signatures, verify_tdx_quote
from fastrack.attest._cpu.tdx_collateral import TdxCollateral, verify_documents
from fastrack.attest._cpu.tdx_kind import TdxEvidence, tdx_file
from fastrack.attest._cpu.tdx_pck import read_pck_identity
from fastrack.attest._cpu.tdx_quote import parse_tdx_quote
from fastrack.attest._errors import malformed, refused, require_time_zone
from fastrack.attest._fetch.client import AbsentError, Client
from fastrack.attest._formats.ocsp import verify_ocsp_response, verify_status
from fastrack.attest._formats.x509 import (
    PSS_SHA384,
    VerifiedCrl,
    fingerprint,
    load_chain,
    load_crl,
    require_unrevoked,
    subject_name,
    verify_chain,
    verify_crl,
)
from fastrack.attest._gpus.evidence import VerifiedGpuReport, verify_gpu_report
from fastrack.attest._gpus.report import parse_gpu_report
from fastrack.attest._gpus.rim import open_signed, verify_rim
from fastrack.attest._offer import DeviceEvidence, MachineEvidence
from fastrack.attest._verify_offer import VENDOR_ROOTS, TrustedRoots
from fastrack.errors import AttestationError, FormatError

_FRESH = 0.5  # the part of its lifetime after which a document is asked for again
_RIM_ID = re.compile(r"[A-Z0-9_.]{1,128}", re.IGNORECASE)


@public
@dataclass(frozen=True, slots=True)
class CollateralServices:
    """The addresses of the services, each without a path; those of a mirror in place of the vendors'.

    Attributes
    ----------
    intel, intel_roots : str
        Intel's PCS, or a PCCS, and the server of its root's revocation list.
    amd : str
        AMD's KDS.
    nvidia_rim, nvidia_ocsp : str
        NVIDIA's services of reference manifests and of OCSP.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.CollateralServices(intel="https://pccs.example:8081").amd
    'https://kdsintf.amd.com'
    """

    intel: str = "https://api.trustedservices.intel.com"
    intel_roots: str = "https://certificates.trustedservices.intel.com"
    amd: str = "https://kdsintf.amd.com"
    nvidia_rim: str = "https://rim.attestation.nvidia.com"
    nvidia_ocsp: str = "https://ocsp.ndis.nvidia.com"


@public
@dataclass(frozen=True, slots=True)
class FetchedDocument:
    """A document of collateral in a folder, which holds.

    Attributes
    ----------
    name : str
        Its path in the folder.
    about : str
        What it is about, such as "FMSPC b0c06f000000".
    valid_until : datetime.datetime
        The time at which another must be fetched.
    is_new : bool
        True if it was fetched; False if the one of an earlier run still holds.
    kept_because : str or None
        The reason why that was kept though a newer one was asked for: none was to be had, or it did not hold.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import attest
    >>> attest.FetchedDocument("tdx.json", "FMSPC b0c06f000000", datetime(2026, 12, 1, tzinfo=UTC), True).is_new
    True
    """

    name: str
    about: str
    valid_until: datetime
    is_new: bool
    kept_because: str | None = None


@dataclass(frozen=True, slots=True)
class _Dates:
    """The ages of the parts of a genuine document, which only grow in newer ones, and the end of the document.

    `since` is when it was issued; None if no newer one is to be had unless it is asked for.
    """

    parts: tuple[datetime | int, ...]
    since: datetime | None
    until: datetime


_Verify = Callable[[bytes, datetime | None], _Dates]  # at that time, or when the document was issued
_Judge = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class _Fetching:
    """The settings of a run, which all its documents share."""

    folder: Path
    services: CollateralServices
    client: Client
    roots: TrustedRoots
    now: datetime
    bundle: Path | None
    refresh: bool

    def carried(self, name: str) -> bytes:
        """Return a file of the bundle."""
        data = read_collateral(cast(Path, self.bundle) / name)
        if data is None:
            advice = "Fetch for this offer on a machine with a network, and bring that folder."
            raise FileNotFoundError(
                errno.ENOENT, f"expected {name} in the bundle, got none. {advice}", str(self.bundle)
            )
        return data

    def kept(self, name: str, verify: _Verify) -> tuple[bytes, _Dates, bool] | None:
        """Return a file that is genuine, its dates, and whether it is in force; None if there is none."""
        with suppress(AttestationError, ValueError):
            data = read_collateral(self.folder / name)
            if data is None:
                return None
            with suppress(AttestationError, FormatError):
                return data, verify(data, self.now), True
            return data, verify(data, None), False
        return None

    def is_fresh(self, dates: _Dates) -> bool:
        """Return whether a document need not be asked for again: nothing newer is to be had, or it is new enough."""
        if self.refresh:
            return False
        return dates.since is None or self.now <= dates.since + (dates.until - dates.since) * _FRESH

    def lock(self, stack: ExitStack) -> None:
        """Have other runs wait until the stack ends, if there are locks and root did not make the file."""
        make_own(self.folder.absolute(), 0o755)
        with suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            stack.callback(os.close, lock := os.open(self.folder / ".lock", flags, 0o600))
            fcntl.flock(lock, fcntl.LOCK_EX)

    def document(
        self, name: str, about: str, verify: _Verify, fetch: Callable[[], bytes], judge: _Judge | None = None
    ) -> FetchedDocument:
        """Keep the file that is fresh, or fetch another, verify it, and write it.

        `verify` raises unless a document is genuine, in force at a time, and the one that was asked for; `judge` raises
        if that says that the machine is not to be trusted, which is kept, so that verifiers know it too. One that is no
        longer fresh is kept where no newer one can be had. An older one takes no newer one's place, though that
        has ended: what was revoked since would be good again.
        """
        data, dates, is_in_force = self.kept(name, verify) or (b"", None, False)
        is_new, why = False, None
        with ExitStack() as stack:
            if dates is None or not is_in_force or not self.is_fresh(dates):
                try:
                    newer = fetch() if self.bundle is None else self.carried(name)
                    found = verify(newer, self.now)
                    self.lock(stack)  # another run may have put a newer one there, or be about to
                    data, dates, is_in_force = self.kept(name, verify) or (data, dates, is_in_force)
                    if dates is not None:
                        _require_newer(about, found, dates)
                except (OSError, AttestationError, FormatError) as error:
                    if dates is None or not is_in_force:
                        raise
                    why = str(error)
                else:
                    is_new = newer != data
                    data, dates = newer, found
            if is_new:
                path = self.folder / name
                make_own(path.parent.absolute(), 0o755)  # which no group may write to, or verifiers refuse it
                stack.enter_context(new_file(path, mode=0o644, overwrite=True)).write(data)
        if judge is not None:
            judge(data)
        return FetchedDocument(name, about, dates.until, is_new, why)


def _require_newer(about: str, found: _Dates, kept: _Dates) -> None:
    if any(new < old for new, old in zip(found.parts, kept.parts, strict=True)):  # type: ignore[operator]
        advice = "The service or bundle is behind; ask another one. The newer document stays."
        raise refused(
            about, "age", wanted="a document no older than the one there", found="an older one", advice=advice
        )


@public
def fetch_collateral(
    evidence: MachineEvidence,
    folder: str | Path,
    *,
    services: CollateralServices | None = None,
    roots: TrustedRoots = VENDOR_ROOTS,
    product: str | None = None,
    ca: str | None = None,
    bundle: str | Path | None = None,
    refresh: bool = False,
    now: datetime | None = None,
) -> Iterator[FetchedDocument]:
    """Fetch the collateral that evidence names into a folder, and yield each document when it is there.

    What an earlier run has fetched and still holds is not asked for again. Each document is verified before it is kept,
    and is never replaced by an older one. One that revokes the machine is kept, and then told as an error.

    Parameters
    ----------
    evidence : MachineEvidence
        The evidence of an offer, ``Offer.from_bytes(...).evidence``: its signatures must hold. That of SEV-SNP is
        verified when its certificate has been fetched.
    folder : path-like
        The folder, which is made. `collect_evidence` and `fastrack attest` read it.
    services : CollateralServices, optional
        The addresses, of mirrors for example.
    roots : TrustedRoots
        The vendors' roots.
    product : str, optional
        "Milan" or "Genoa", for reports of SEV-SNP of version 2, which do not tell.
    ca : path-like, optional
        A file of certificates, in PEM, that those of the services must lead to. By default those of the system.
    bundle : path-like, optional
        A folder that was filled for the same offer elsewhere: documents are taken from it, and no service is asked.
    refresh : bool
        Whether all documents are asked for, though they are fresh. By default each that is replaced by newer ones, such
        as a revocation list, is asked for again after half of its lifetime, and kept to its end if that fails.
    now : datetime.datetime, optional
        The time. By default that of the clock.

    Yields
    ------
    FetchedDocument
        A document that holds.

    Raises
    ------
    AttestationError, FormatError
        If the evidence or an answer does not hold.
    OSError
        If a service does not answer, or has no such document; the message says what to do.

    Examples
    --------
    >>> from fastrack import attest
    >>> documents = attest.fetch_collateral(attest.MachineEvidence(attest.TdxEvidence(b"no quote")), "collateral")
    >>> next(documents)
    Traceback (most recent call last):
        ...
    fastrack.FormatError: reading the TDX quote failed: ...
    """
    now = datetime.now(UTC) if now is None else now
    require_time_zone(now)
    run = _Fetching(
        Path(folder),
        services or CollateralServices(),
        Client(ca=ca),
        roots,
        now,
        None if bundle is None else Path(bundle),
        refresh,
    )
    if isinstance(evidence.cpu, TdxEvidence):
        yield _fetch_tdx(run, evidence.cpu.quote)
    elif isinstance(evidence.cpu, SnpEvidence):
        yield from _fetch_snp(run, parse_snp_report(evidence.cpu.report), product)
    yield from _fetch_devices(run, evidence.devices)


# Intel's PCS.


def _fetch_tdx(run: _Fetching, quote: bytes) -> FetchedDocument:
    parsed = parse_tdx_quote(quote)
    chain = verify_signatures(parsed, now=run.now, roots=run.roots.intel)
    fmspc = read_pck_identity(chain.leaf).fmspc.hex()
    authority = "platform" if "Platform" in subject_name(chain.issuer) else "processor"

    def verify(data: bytes, now: datetime | None) -> _Dates:
        collateral = TdxCollateral.from_json(data)
        now = now or _issued_at(collateral)
        documents = verify_documents(collateral, roots=run.roots.intel, now=now)
        lists = verify_lists(collateral, chain, documents, roots=run.roots.intel, now=now)
        found = documents[0].content.read("fmspc", hexadecimal(6)).hex()
        if found != fmspc:
            advice = "The service answered for another platform; ask another one."
            raise refused("TCB info", "fmspc", wanted=fmspc, found=found, advice=advice)
        dates = [*(part.issued_at for part in documents), *(part.issued_at for part in lists)]
        ends = [*(part.valid_until for part in documents), *(part.valid_until for part in lists)]
        until = min(*ends, *(document.chain.valid_until for document in documents))
        numbers = [*(part.evaluation_number for part in documents), *map(_crl_number, lists)]
        return _Dates((*dates, *numbers), min(dates), until)

    def judge(data: bytes) -> None:
        verify_tdx_quote(parsed, TdxCollateral.from_json(data), now=run.now, roots=run.roots.intel)

    def fetch() -> bytes:
        base, ask = run.services.intel, run.client.ask
        tcb = ask(f"{base}/tdx/certification/v4/tcb?fmspc={fmspc}", limit=LARGEST)
        enclave = ask(f"{base}/tdx/certification/v4/qe/identity", limit=LARGEST)
        crl = ask(f"{base}/sgx/certification/v4/pckcrl?ca={authority}&encoding=der", limit=LARGEST)
        root_crl = ask(f"{run.services.intel_roots}/IntelSGXRootCA.der", limit=LARGEST)
        info, info_signature = _split_signed(tcb.body, b"tcbInfo", "TCB info")
        identity, identity_signature = _split_signed(enclave.body, b"enclaveIdentity", "QE identity")
        parts = {  # in the form that `TdxCollateral.from_json` reads
            "tcb_info": info,
            "tcb_info_signature": info_signature,
            "tcb_info_issuer_chain": _read_chain(tcb, "TCB info", "tcb-info-issuer-chain", "sgx-tcb-info-issuer-chain"),
            "qe_identity": identity,
            "qe_identity_signature": identity_signature,
            "qe_identity_issuer_chain": _read_chain(enclave, "QE identity", "sgx-enclave-identity-issuer-chain"),
            "root_ca_crl": root_crl.body.hex(),
            "pck_crl": crl.body.hex(),
            "pck_crl_issuer_chain": _read_chain(crl, "PCK revocation list", "sgx-pck-crl-issuer-chain"),
        }
        return json.dumps(parts, indent=1).encode() + b"\n"

    return run.document(tdx_file(chain.certificates), f"FMSPC {fmspc}", verify, fetch, judge)


def _crl_number(verified: VerifiedCrl) -> int:
    """Return the number of a revocation list, which only grows (RFC 5280, 5.2.3); -1 if it has none."""
    return next((one.value.crl_number for one in verified.crl.extensions if isinstance(one.value, x509.CRLNumber)), -1)


def _issued_at(collateral: TdxCollateral) -> datetime:
    """Return the time when the newest part was issued: all were in force then, or no service would have sent them."""
    texts = {"TCB info": collateral.tcb_info, "QE identity": collateral.qe_identity}
    lists = (load_crl(each, evidence="revocation list") for each in (collateral.root_ca_crl, collateral.pck_crl))
    dates = (Reader.parse(text, name).read("issueDate", TIME) for name, text in texts.items())
    return max(*dates, *(each.last_update_utc for each in lists))


def _split_signed(body: bytes, member: bytes, document: str) -> tuple[str, str]:
    """Return the signed text of an answer, as it was sent, and the signature in hexadecimal."""
    begin, middle = b'{"' + member + b'":', b',"signature":"'
    text, found, rest = body.strip().rpartition(middle)
    signature = rest.removesuffix(b'"}')
    if not text.startswith(begin) or not found or not re.fullmatch(rb"[0-9a-fA-F]{128}", signature):
        raise malformed(document, "text", None, wanted=f"{member.decode()} and its signature", found="another form")
    try:
        return text.removeprefix(begin).decode(), signature.decode().lower()
    except ValueError:
        raise malformed("TDX collateral", "text", None, wanted="text in UTF-8", found="other bytes") from None


def _read_chain(answer: Answer, document: str, *headers: str) -> str:
    """Return a signer's certificates, from the first header that is there: version 3 of TCB info has a new one."""
    for name in headers:
        if (value := answer.headers.get(name)) is not None:
            try:  # not unquote_plus: a plus sign of base64 may stand for itself
                return unquote(value, errors="strict")
            except ValueError:
                raise malformed(document, "issuer chain", None, wanted="text in UTF-8", found="other bytes") from None
    raise malformed(document, "issuer chain", None, wanted=f"the header {headers[0]}", found="none")


# AMD's KDS.


def _fetch_snp(run: _Fetching, report: SnpReport, product: str | None) -> Iterator[FetchedDocument]:
    name = report.product or (SnpProduct(product) if product else None)
    if name is None:
        advice = "Name it: product= or --product, Milan or Genoa."
        raise refused("SNP report", "product", wanted="one that the report names", found="none", advice=advice)
    kind = report.signing_key.lower()
    base = f"{run.services.amd}/{kind}/v1/{name}"
    tcb = report.reported_tcb
    chip = report.chip_id[: 8 if name is SnpProduct.TURIN else 64].hex()
    levels = {"fmcSPL": tcb.fmc, "blSPL": tcb.bootloader, "teeSPL": tcb.tee, "snpSPL": tcb.snp}
    levels["ucodeSPL"] = tcb.microcode
    query = "&".join(f"{key}={value:02d}" for key, value in levels.items() if value is not None)
    names = snp_files(report, name)

    subjects = [f"SEV-{name}" if kind == "vcek" else f"SEV-VLEK-{name}", f"ARK-{name}"]

    def verify_issuers(data: bytes, now: datetime | None) -> _Dates:
        chain = verify_chain(
            load_chain(data, evidence="AMD chain"),
            roots=run.roots.amd,
            now=now or run.now,
            evidence="AMD chain",
            algorithms=PSS_SHA384,
            is_cut=True,
        )
        found = [subject_name(certificate) for certificate in chain.certificates]
        if found != subjects:
            advice = "The service answered with another chain; ask another one."
            raise refused("AMD chain", "subjects", wanted=", ".join(subjects), found=", ".join(found), advice=advice)
        return _Dates((), None, chain.valid_until)

    def ask(path: str) -> bytes:
        return run.client.ask(f"{base}/{path}", limit=LARGEST).body

    yield run.document(names["issuers"], f"issuers of {name}", verify_issuers, lambda: ask("cert_chain"))
    issuers = (run.folder / names["issuers"]).read_bytes()
    authority, root = load_chain(issuers, evidence="AMD chain")
    revoked = "AMD revocation list"

    def verify_leaf(data: bytes, now: datetime | None) -> _Dates:
        verified = verify_snp_report(report, data, issuers, now=now or run.now, roots=run.roots.amd)
        return _Dates((), None, verified.valid_until)

    def verify_list(data: bytes, now: datetime | None) -> _Dates:
        loaded = load_crl(data, evidence=revoked)
        verified = verify_crl(loaded, root, now=now or loaded.last_update_utc, evidence=revoked)
        return _Dates((verified.issued_at, _crl_number(verified)), verified.issued_at, verified.valid_until)

    def judge_list(data: bytes) -> None:
        verified = verify_crl(load_crl(data, evidence=revoked), root, now=run.now, evidence=revoked)
        require_unrevoked(authority, verified, evidence=revoked)

    if kind == "vcek" and any(report.chip_id):  # else the service has none: the host hands it to the guest
        yield run.document(names["leaf"], f"chip {chip[:16]}...", verify_leaf, lambda: ask(f"{chip}?{query}"))
    yield run.document(names["crl"], f"revocation list of {name}", verify_list, lambda: ask("crl"), judge_list)


# NVIDIA's services.


def _fetch_devices(run: _Fetching, devices: Sequence[DeviceEvidence]) -> Iterator[FetchedDocument]:
    chains: list[Sequence[x509.Certificate]] = []
    wanted: dict[str, VerifiedGpuReport] = {}
    for number, device in enumerate(devices):
        evidence = f"GPU {number} report"
        nonce = parse_gpu_report(device.report).nonce  # whatever it is: freshness is asked by who gives a key
        report = verify_gpu_report(
            device.report, device.chain, nonce=nonce, now=run.now, roots=run.roots.nvidia, evidence=evidence
        )
        chains.append(load_chain(device.chain, evidence=evidence)[1:])  # of the leaf the service knows nothing
        wanted |= dict.fromkeys(report.rim_ids, report)
    absent = None
    for rim_id, report in wanted.items():
        try:
            document = _fetch_rim(run, rim_id, report.chip)
        except AbsentError as error:  # a policy that knows the measurements by itself needs the rest
            absent = absent or error
            continue
        chains.append(open_signed((run.folder / document.name).read_bytes(), evidence=f"manifest {rim_id}")[1])
        yield document
    pairs = {certificate: issuer for chain in chains for certificate, issuer in pairwise(chain)}  # once for all chains
    for certificate, issuer in pairs.items():  # of all but the roots
        yield _fetch_response(run, certificate, issuer)
    if absent is not None:
        raise absent


def _fetch_rim(run: _Fetching, rim_id: str, chip: str) -> FetchedDocument:
    if not _RIM_ID.fullmatch(rim_id):
        raise malformed("GPU report", "versions", None, wanted="letters, digits, points and lines", found=rim_id)

    def verify(data: bytes, now: datetime | None) -> _Dates:
        verified = verify_rim(data, now=now or run.now, roots=run.roots.nvidia_rim, evidence=f"manifest {rim_id}")
        advice = "The service answered with another manifest; ask another one."
        if verified.rim.product != chip:
            raise refused(f"manifest {rim_id}", "product", wanted=chip, found=verified.rim.product, advice=advice)
        version = rim_id.rpartition("_")[2]
        if version.upper() not in {verified.rim.version.upper(), verified.rim.version.upper().replace(".", "")}:
            raise refused(f"manifest {rim_id}", "version", wanted=version, found=verified.rim.version, advice=advice)
        return _Dates((), None, verified.valid_until)

    def fetch() -> bytes:
        answer = run.client.ask(
            f"{run.services.nvidia_rim}/v1/rim/{percent_encode(rim_id)}", limit=most_bytes("answer about a manifest")
        )
        node = Reader.parse(answer.body, f"answer about {rim_id}", "answer about a manifest")
        node.expect("id", rim_id)
        node.expect("rim_format", "TCG")
        try:
            data = b64decode(node.read("rim", TEXT), validate=True)
        except ValueError:
            raise node.member("rim").refusal("base64", "another text") from None
        digest = node.read("sha256", hexadecimal(32))
        if sha256(data).digest() != digest:
            raise node.member("sha256").refusal("the digest of the manifest", digest.hex())
        return data

    return run.document(f"rim/{rim_id}.xml", rim_id, verify, fetch)


def _fetch_response(run: _Fetching, certificate: x509.Certificate, issuer: x509.Certificate) -> FetchedDocument:
    def verify(data: bytes, now: datetime | None) -> _Dates:
        now = now or ocsp.load_der_ocsp_response(data).this_update_utc
        verified, _ = verify_status(data, certificate, issuer, now=now)
        return _Dates((verified.this_update,), verified.this_update, verified.valid_until)

    def judge(data: bytes) -> None:
        verify_ocsp_response(data, certificate, issuer, now=run.now)

    def fetch() -> bytes:
        request = ocsp.OCSPRequestBuilder().add_certificate(certificate, issuer, SHA1()).build()  # noqa: S303 - a name
        body, limit = request.public_bytes(Encoding.DER), most_bytes("OCSP response")
        return run.client.ask(run.services.nvidia_ocsp, limit=limit, body=body, kind="application/ocsp-request").body

    name = f"ocsp/{fingerprint(issuer)[:16]}-{certificate.serial_number:x}.der"
    return run.document(name, f"status of {subject_name(certificate)}", verify, fetch, judge)
