"""The kind of evidence of AMD SEV-SNP: its part of an offer, its section ``[cpu.snp]`` of a policy, its collateral."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import product
from pathlib import Path

from fastrack._documents.exchange import CHAIN_LIMIT, PART_LIMIT, REPORT_LIMIT
from fastrack._documents.fields import BOOLEAN, Field, Fields, binary, integer, or_none, text
from fastrack._documents.toml import TEXTS, Table, digests, word_of, words_of
from fastrack._util.public import public
from fastrack.attest import _policy_common as rules
from fastrack.attest._cpu.kind import CpuKind, own_file, read_collateral
from fastrack.attest._cpu.snp import VerifiedSnpReport, load_leaf, read_provider, verify_snp_report
from fastrack.attest._cpu.snp_certificates import read_certificate_table
from fastrack.attest._cpu.snp_report import EVIDENCE, SIGNING_KEYS, SnpProduct, SnpReport, parse_snp_report
from fastrack.attest._cpu.tdx_collateral import TdxCollateral
from fastrack.attest._errors import refused
from fastrack.attest._formats.roots import AMD_ROOTS, Roots
from fastrack.attest._formats.x509 import common_name, load_chain, load_crl
from fastrack.attest._policy_common import Line, Revocation

_FIELDS: Fields = {  # of an offer
    "leaf": or_none(binary(CHAIN_LIMIT)),
    "issuers": or_none(binary(CHAIN_LIMIT)),
    "crl": or_none(binary(PART_LIMIT)),
    "report": binary(REPORT_LIMIT),
}
_VALUES = {  # fields, with their bytes, and what they cover
    "measurement": (48, "firmware; with measured direct boot also kernel, initrd and command line"),
    "host_data": (32, "data that the host named"),
    "family_id": (16, "family that the guest's owner named"),
    "image_id": (16, "image that the guest's owner named"),
    "id_key_digest": (48, "key that signed the guest's identity"),
    "author_key_digest": (48, "key that signed that key"),
}
_LEVELS = ("bootloader", "tee", "snp", "microcode", "fmc")
# What a policy must say, each as the line that leaves it open, which is also the line that a message proposes.
_LINES = {
    "measurement": 'measurement = "any"  # or a list: firmware, with digests of kernel, command line and initrd',
    "min_tcb": 'min_tcb = "any"  # or floors, such as { bootloader = 7, snp = 14, microcode = 72 }',
}


@public
@dataclass(frozen=True, slots=True)
class SnpEvidence:
    """A report of AMD SEV-SNP with its certificates, as far as the owner does not have them.

    `leaf` is the certificate of the VCEK or VLEK, in DER or PEM, and `issuers` has those of its issuer and of the root,
    in PEM. `crl` is the root's revocation list in DER.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.SnpEvidence(b"report").leaf is None
    True
    """

    report: bytes = field(repr=False)
    leaf: bytes | None = field(default=None, repr=False)
    issuers: bytes | None = field(default=None, repr=False)
    crl: bytes | None = field(default=None, repr=False)


@public
@dataclass(frozen=True, slots=True)
class SnpPolicy:
    r"""The section ``[cpu.snp]`` of a policy.

    Attributes
    ----------
    measurements : mapping of str to frozenset of bytes or None
        The allowed values by field: "measurement", "host_data" and so on; None for any. "measurement" must be in it;
        other fields that are not may have any value.
    min_tcb : mapping of str to int
        The lowest patch level of each part, "bootloader", "tee", "snp", "microcode", "fmc": present, committed and at
        launch; any if empty. A product without one of these levels is accepted only if `products` names it, and
        another floor holds for it.
    products : frozenset of SnpProduct
        The products that are accepted; all if empty.
    chip_ids : frozenset of bytes
        The chips that are accepted, 64 bytes each, by the certificate of a VCEK, or as a VLEK's report tells it; all
        if empty.
    max_vmpl : int
        The lowest privilege that the software may have that asked for the report.
    revocation : Revocation
        How much is asked about the revocation of AMD's authorities.
    max_revocation_age : datetime.timedelta or None
        The longest time since the revocation list was issued, if one is required; None for as long as it is in force,
        for AMD has issued lists for 47 to 375 days.
    allow_debug, allow_migration, allow_smt : bool
        Whether guests are accepted that the host may read, or move to another machine, or that run where threads share
        cores.
    require_alias_check : bool
        Whether the platform must have checked that no address of its memory is an alias of another.
    signing_key : {"VCEK", "VLEK"} or None
        The key that must have signed the report; either if None.
    providers : frozenset of str
        The cloud providers whose VLEK is accepted, by the names in its certificate; all, and any VCEK, if empty.

    Examples
    --------
    >>> from fastrack import attest
    >>> policy = attest.Policy.from_toml("version = 1\n[cpu.snp]\nmeasurement = 'any'\nmin_tcb = { microcode = 115 }")
    >>> policy.snp.min_tcb, policy.snp.allow_debug
    ({'microcode': 115}, False)
    """

    measurements: Mapping[str, frozenset[bytes] | None] = field(hash=False)
    min_tcb: Mapping[str, int] = field(hash=False)
    products: frozenset[SnpProduct] = frozenset()
    chip_ids: frozenset[bytes] = frozenset()
    max_vmpl: int = 0
    revocation: Revocation = Revocation.CACHED
    max_revocation_age: timedelta | None = None
    allow_debug: bool = False
    allow_migration: bool = False
    allow_smt: bool = True
    require_alias_check: bool = False
    signing_key: str | None = None
    providers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        rules.require_named(self.measurements, {"measurement"})


def _complete(evidence: SnpEvidence, collateral: TdxCollateral | Path) -> SnpEvidence:
    if not isinstance(collateral, Path):
        return evidence
    report = parse_snp_report(evidence.report)
    own = {"leaf": f"{report.signing_key.lower()}.der", "issuers": "cert_chain.pem", "crl": "crl.der"}
    for part, name in snp_files(report, report.product or _find_product(evidence, report, collateral)).items():
        for path in (collateral / name, collateral / own[part]):  # the second is filled by hand, for one machine
            if (data := read_collateral(path)) is not None:
                with own_file(path):
                    _LOADERS[part](data)
                evidence = replace(evidence, **{part: data})
                break
    return evidence


_LOADERS: dict[str, Callable[[bytes], object]] = {
    "leaf": load_leaf,
    "issuers": partial(load_chain, evidence="AMD chain"),
    "crl": partial(load_crl, evidence="AMD revocation list"),
}


def snp_files(report: SnpReport, product: SnpProduct) -> dict[str, str]:
    """Return the names of the files of collateral for a report. The leaf is of one chip and its levels."""
    levels = report.reported_tcb
    numbers = (levels.fmc, levels.bootloader, levels.tee, levels.snp, levels.microcode)
    tcb = "-".join(str(number) for number in numbers if number is not None)
    kind, vlek = report.signing_key.lower(), "" if report.signing_key == "VCEK" else "vlek-"
    leaf = f"{kind}-{report.chip_id[:8].hex()}-{tcb}.der"
    return {"leaf": leaf, "issuers": f"{vlek}cert_chain-{product}.pem", "crl": f"{vlek}crl-{product}.der"}


def _find_product(evidence: SnpEvidence, report: SnpReport, folder: Path) -> SnpProduct:
    """Return the product of a report of version 2, which does not tell: the one whose authority issued its leaf."""
    leaf = evidence.leaf or read_collateral(folder / snp_files(report, SnpProduct.MILAN)["leaf"])
    names = {f"SEV-{middle}{product}": product for product in SnpProduct for middle in ("", "VLEK-")}
    issuer = None if leaf is None else common_name(load_leaf(leaf).issuer)
    return names.get(issuer or "", SnpProduct.MILAN)


def _verify(evidence: SnpEvidence, now: datetime, roots: Roots) -> VerifiedSnpReport:
    if evidence.leaf is None or evidence.issuers is None:
        wanted = "that of the chip, and its issuers"
        advice = "Fetch them (`fastrack attest fetch`), and name the folder; a host has that of a VLEK or masked chip."
        raise refused("offer", "AMD certificate", wanted=wanted, found="none", advice=advice)
    return verify_snp_report(evidence.report, evidence.leaf, evidence.issuers, now=now, roots=roots, crl=evidence.crl)


def _draft(verified: VerifiedSnpReport) -> Iterator[Line]:
    yield Line("products", {verified.product}, "generation of the CPU")
    yield from _draft_verified(verified)
    yield rules.draft_revocation(verified.revocation_checked_at)


def _draft_verified(verified: VerifiedSnpReport) -> Iterator[Line]:
    return _draft_report(verified.report, verified.provider, verified.chip_id)


def _draft_claims(evidence: SnpEvidence) -> Iterator[Line]:
    report, provider = parse_snp_report(evidence.report), None
    if report.signing_key == "VLEK" and evidence.leaf is not None:
        provider = read_provider(load_leaf(evidence.leaf))
    return _draft_report(report, provider, report.chip_id if any(report.chip_id) else None)


def _draft_report(report: SnpReport, provider: str | None, chip_id: bytes | None) -> Iterator[Line]:
    yield Line("signing_key", report.signing_key, "key that signs the reports: VCEK, of a chip, or VLEK, of a provider")
    if provider is not None:
        yield Line("providers", {provider}, "cloud provider that the VLEK is of")
    for name, (_, covers) in _VALUES.items():
        yield Line(name, {getattr(report, name)}, covers)
    levels = (report.reported_tcb, report.committed_tcb, report.launch_tcb)
    floors = {
        name: min(getattr(level, name) for level in levels)
        for name in _LEVELS
        if getattr(report.reported_tcb, name) is not None  # only Turin has an FMC
    }
    yield Line("min_tcb", floors, "lowest patch levels: reported, committed and at launch")
    covers = "only this machine; leave it out for others like it"
    if chip_id is None:
        covers = "THE HOST MASKS THE CHIP ID: nothing tells this machine from others like it"
    elif not any(report.chip_id):
        covers = f"by the certificate, as the host masks the chip id in reports: {covers}"
    yield Line("chip_ids", {chip_id or "masked"}, covers, chip_id is None)
    yield Line("max_vmpl", report.vmpl, "privilege of the software that asked; 0 is the highest", report.vmpl > 0)
    yield Line("allow_smt", report.allows_smt, "threads that share a core")
    yield Line("require_alias_check", report.is_alias_checked, "check for aliases of memory (AMD-SB-3015)")
    yield from rules.draft_openings(debug=report.is_debug, migration=report.is_migratable)


def _read_policy(table: Table) -> SnpPolicy:
    """Read the section ``[cpu.snp]``."""
    rules.require_lines(table, _LINES)
    return SnpPolicy(table.read_all(_MEASUREMENTS), _read_levels(table), **table.read_all(_POLICY))


def _read_levels(table: Table) -> dict[str, int]:
    if table.read("min_tcb", _LEVELS_OR_ANY) == rules.ANY:
        return {}
    found = table.section("min_tcb", dict.fromkeys(_LEVELS, integer(0)))
    if not found:
        raise table.refusal("min_tcb", f'floors of {", ".join(_LEVELS)}, or "{rules.ANY}"', "none of them")
    return found


_LEVELS_OR_ANY = Field(lambda value: value)
_MEASUREMENTS = {name: rules.or_any(digests(size)) for name, (size, _) in _VALUES.items()}
_POLICY: Fields = {
    "products": words_of(SnpProduct),
    "chip_ids": digests(64),
    "max_vmpl": integer(0),
    "revocation": word_of(Revocation),
    "max_revocation_age_days": rules.AGE.of("max_revocation_age"),
    "allow_debug": BOOLEAN,
    "allow_migration": BOOLEAN,
    "allow_smt": BOOLEAN,
    "require_alias_check": BOOLEAN,
    "signing_key": text("|".join(SIGNING_KEYS), " or ".join(SIGNING_KEYS)),
    "providers": TEXTS,
}


def _check(policy: SnpPolicy, verified: VerifiedSnpReport, judge: rules.Judge) -> None:
    """Require that a verified report is one that a policy accepts."""
    report = verified.report
    judge.require_current(verified.verified_at, verified.valid_until)
    judge.require_clear("debug bit", report.is_debug, policy.allow_debug, "allow_debug")
    judge.require_clear("migration bit", report.is_migratable, policy.allow_migration, "allow_migration")
    judge.require_clear("SMT bit", report.allows_smt, policy.allow_smt, "allow_smt")
    for name, allowed in policy.measurements.items():
        if allowed is not None:
            judge.require(name.upper(), getattr(report, name), allowed, name)
    judge.require_listed("product", verified.product, policy.products, "products")
    judge.require_listed("SIGNING_KEY", report.signing_key, {policy.signing_key} - {None}, "signing_key")
    judge.require_listed("provider", verified.provider, policy.providers, "providers")
    judge.require_listed("CHIP_ID", verified.chip_id, policy.chip_ids, "chip_ids")
    judge.require("VMPL", report.vmpl, range(policy.max_vmpl + 1), "max_vmpl")
    # The host may report less than it runs, go back to what is committed, and have started the guest on less.
    levels = {"reported": report.reported_tcb, "committed": report.committed_tcb, "launch": report.launch_tcb}
    lacking = [name for name in policy.min_tcb if getattr(report.reported_tcb, name) is None]  # only Turin has an FMC
    if lacking and (verified.product not in policy.products or len(lacking) == len(policy.min_tcb)):
        wanted = "a product that has it, or one that cpu.snp.products names and another floor is for"
        judge.refuse(f"{lacking[0]} patch level", wanted, f"none of {verified.product}", f"min_tcb.{lacking[0]}")
    for (kind, tcb), (name, lowest) in product(levels.items(), policy.min_tcb.items()):
        if name not in lacking:
            judge.require_at_least(f"{kind} {name} patch level", getattr(tcb, name), lowest, f"min_tcb.{name}")
    if policy.require_alias_check and not report.is_alias_checked:
        wanted, found = "a platform that checked its memory for aliases", f"{report.platform_info:#x}"
        judge.refuse("PLATFORM_INFO", wanted, found, "require_alias_check")
    checked_at, longest = verified.revocation_checked_at, policy.max_revocation_age
    judge.require_revocation(policy.revocation, checked_at, longest)


SNP = CpuKind(
    name="snp",
    title=EVIDENCE,
    document="SEV-SNP report",
    platform="AMD SEV-SNP",
    provider="sev_guest",
    vendor="amd",
    roots=AMD_ROOTS,
    evidence=SnpEvidence,
    verified=VerifiedSnpReport,
    fields=_FIELDS,
    optional=(),
    collect=lambda report, table: SnpEvidence(report, **read_certificate_table(table)),
    report_data=lambda evidence: parse_snp_report(evidence.report).report_data,
    bare=lambda evidence: replace(evidence, issuers=None, crl=None),  # only there the leaf of a VLEK is to be had
    complete=_complete,
    verify=_verify,
    read_policy=_read_policy,
    check=_check,
    draft=_draft,
    draft_claims=_draft_claims,
    describe=lambda verified: {"product": str(verified.product), **rules.to_claims(_draft_verified(verified))},
    flag="sev_snp",
)
