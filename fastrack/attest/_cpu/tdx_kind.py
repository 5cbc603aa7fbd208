"""The kind of evidence of Intel TDX: its part of an offer, its section ``[cpu.tdx]`` of a policy, its collateral."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from fastrack._util.public import attest_public
from fastrack.attest import _policy_common as rules
from fastrack.attest._cpu.kind import CpuKind, read_collateral
from fastrack.attest._cpu.tdx import VerifiedTdxQuote, verify_tdx_quote
from fastrack.attest._cpu.tdx_collateral import TcbStatus, TdxCollateral
from fastrack.attest._cpu.tdx_quote import EVIDENCE, TdReport, parse_tdx_quote
from fastrack.attest._errors import refused
from fastrack.attest._formats.roots import INTEL_ROOTS, Roots
from fastrack.attest._formats.toml import Table
from fastrack.attest._formats.wire import PART_LIMIT, Reader, write_bytes

_PARTS = tuple(part.name for part in fields(TdxCollateral))
_QUOTE_LIMIT = 64 << 10
_REGISTERS = dict.fromkeys(("mrtd", "mrseam", "mrconfigid", "mrowner", "mrownerconfig", "mrservicetd"), 48)
_REGISTERS |= dict.fromkeys((f"rtmr{number}" for number in range(4)), 48)
# What a policy must say, each as the line that leaves it open, which is also the line that a message proposes.
_LINES = {
    "mrtd": 'mrtd = "any"  # or a list: firmware',
    "rtmr1": 'rtmr1 = "any"  # or a list: boot loader and kernel',
    "rtmr2": 'rtmr2 = "any"  # or a list: kernel command line and initrd',
}
_COLLATERAL_AGE = timedelta(days=30)  # the time for which Intel issues a TCB info
_EVALUATION_NUMBER = 17  # what Intel answered with in May 2025, and has followed by higher ones since
_DEBUG_BITS, _SEPT_VE_DISABLE, _MIGRATABLE = 0xFF, 1 << 28, 1 << 29  # of TDATTRIBUTES
_XFAM_ONES, _XFAM_KNOWN = 0x3, 0x6DBE7  # x87 and SSE are always on; no TDX module offers bits outside of the second


@attest_public
@dataclass(frozen=True, slots=True)
class TdxEvidence:
    """A quote of Intel TDX, with its collateral; None if the owner has that.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.TdxEvidence(b"quote").collateral is None
    True
    """

    quote: bytes = field(repr=False)
    collateral: TdxCollateral | None = None


@attest_public
@dataclass(frozen=True, slots=True)
class TdxPolicy:
    r"""The section ``[cpu.tdx]`` of a policy.

    Attributes
    ----------
    measurements : mapping of str to frozenset of bytes or None
        The allowed values by register: "mrtd", "rtmr0" and so on; None for any. "mrtd", "rtmr1" and "rtmr2", which tell
        firmware, kernel, command line and initrd, must be in it. Of the others, "mrservicetd" must be zero if it is not
        in it, and the rest may have any value.
    tcb_status : frozenset of TcbStatus
        The states of a platform that are accepted.
    refused_advisories : frozenset of str
        Advisories that must not apply.
    min_evaluation_number : int
        The lowest ``tcbEvaluationDataNumber`` of collateral, by default 17.
    platforms : frozenset of bytes
        The PPIDs of the machines that are accepted; all if empty.
    max_collateral_age : datetime.timedelta or None
        The longest time since the collateral was issued, by default 30 days.
    td_attributes, xfam : frozenset of bytes
        The allowed values of TDATTRIBUTES and XFAM, 8 bytes each, as the quote has them. If empty, of TDATTRIBUTES
        SEPT_VE_DISABLE (bit 28) must be set and no other bit, but for those that the next two allow; and XFAM must be
        one that TDX modules offer.
    allow_debug, allow_migration : bool
        Whether TDs are accepted that the host may read, or move to another machine.

    Examples
    --------
    >>> from fastrack import attest
    >>> policy = attest.Policy.from_toml("version = 1\n[cpu.tdx]\nmrtd = 'any'\nrtmr1 = 'any'\nrtmr2 = 'any'")
    >>> policy.tdx == attest.TdxPolicy(measurements={"mrtd": None, "rtmr1": None, "rtmr2": None})
    True
    """

    measurements: Mapping[str, frozenset[bytes] | None] = field(hash=False)
    tcb_status: frozenset[TcbStatus] = frozenset({TcbStatus.UP_TO_DATE})
    refused_advisories: frozenset[str] = frozenset()
    min_evaluation_number: int = _EVALUATION_NUMBER
    platforms: frozenset[bytes] = frozenset()
    max_collateral_age: timedelta | None = _COLLATERAL_AGE
    td_attributes: frozenset[bytes] = frozenset()
    xfam: frozenset[bytes] = frozenset()
    allow_debug: bool = False
    allow_migration: bool = False

    def __post_init__(self) -> None:
        rules.require_named(self.measurements, _LINES)


def _write(evidence: TdxEvidence) -> dict[str, Any]:
    parts = evidence.collateral
    collateral = None if parts is None else {name: write_bytes(getattr(parts, name)) for name in _PARTS}
    return {"collateral": collateral, "quote": write_bytes(evidence.quote)}


def _read(cpu: Reader) -> TdxEvidence:
    def read(name: str) -> TdxCollateral:
        parts = cpu.child(name, _PARTS)
        return TdxCollateral(**{part: parts.binary(part, limit=PART_LIMIT) for part in _PARTS})

    collateral = cpu.or_none("collateral", read)
    return TdxEvidence(cpu.binary("quote", limit=_QUOTE_LIMIT), collateral)


def _collect(report: bytes, folder: Path | None) -> TdxEvidence:
    text = None if folder is None else read_collateral(folder / "tdx.json")
    return TdxEvidence(report, None if text is None else TdxCollateral.from_json(text))


def _verify(evidence: TdxEvidence, now: datetime, roots: Roots, collateral: TdxCollateral | None) -> VerifiedTdxQuote:
    collateral = collateral or evidence.collateral
    if collateral is None:
        advice = (
            "Fetch it, and pass it on the command line as --collateral or in a program as collateral=; or have the "
            "machine send it, whose `fastrack attest collect` has --collateral too."
        )
        raise refused("offer", "TDX collateral", wanted="that of the platform", found="none", advice=advice)
    return verify_tdx_quote(evidence.quote, collateral, now=now, roots=roots)


def _describe(verified: VerifiedTdxQuote) -> dict[str, object]:
    tcb, report = verified.tcb, verified.report
    registers = {f"rtmr{number}": register.hex() for number, register in enumerate(report.rtmrs)}
    claims = {"mrtd": report.mrtd.hex(), "tcb_status": str(tcb.status), **registers}
    return {**claims, "advisories": list(tcb.advisory_ids)}


def _read_policy(table: Table) -> TdxPolicy:
    """Read the section ``[cpu.tdx]``."""
    rules.require_lines(table, _LINES)
    number = table.integer("min_evaluation_number")
    return TdxPolicy(
        measurements=rules.read_measurements(table, _REGISTERS),
        tcb_status=rules.read_enum(table, "tcb_status", TcbStatus) or frozenset({TcbStatus.UP_TO_DATE}),
        refused_advisories=frozenset(table.texts("refused_advisories")),
        min_evaluation_number=_EVALUATION_NUMBER if number is None else number,
        platforms=table.digests("platforms", 16),
        max_collateral_age=rules.read_days(table, "max_collateral_age_days", _COLLATERAL_AGE),
        td_attributes=table.digests("td_attributes", 8),
        xfam=table.digests("xfam", 8),
        allow_debug=table.boolean("allow_debug", default=False),
        allow_migration=table.boolean("allow_migration", default=False),
    )


def _check(policy: TdxPolicy, verified: VerifiedTdxQuote, judge: rules.Judge) -> None:
    """Require that a verified quote is one that a policy accepts."""
    report, tcb = verified.report, verified.tcb
    judge.require_current(verified.verified_at, verified.valid_until)
    judge.require_clear("debug bit", report.is_debug, policy.allow_debug, "allow_debug")
    judge.require_clear("migration bit", report.is_migratable, policy.allow_migration, "allow_migration")
    found = {name: getattr(report, name) for name in _REGISTERS if not name.startswith("rtmr")}
    found |= {f"rtmr{number}": register for number, register in enumerate(report.rtmrs)}
    found["mrservicetd"] = report.mrservicetd or bytes(48)  # older modules have no service TDs
    for name, allowed in ({"mrservicetd": frozenset({bytes(48)})} | dict(policy.measurements)).items():
        if allowed is not None:
            judge.require(name.upper(), found[name], allowed, name)
    _check_attributes(policy, report, judge)
    judge.require("TCB status", tcb.status, policy.tcb_status, "tcb_status")
    if refused_ids := policy.refused_advisories.intersection(tcb.advisory_ids):
        wanted = "none of cpu.tdx.refused_advisories"
        raise judge.refusal("advisories", wanted, ", ".join(sorted(refused_ids)), None)
    lowest = policy.min_evaluation_number
    judge.require_at_least("evaluation number", tcb.evaluation_number, lowest, "min_evaluation_number")
    if policy.platforms:
        judge.require("PPID", verified.platform.ppid, policy.platforms, "platforms")
    longest, key = policy.max_collateral_age, "max_collateral_age_days"
    judge.require_age("age of the collateral", verified.collateral_issued_at, longest, key)


def _check_attributes(policy: TdxPolicy, report: TdReport, judge: rules.Judge) -> None:
    """Require TDATTRIBUTES and XFAM that a policy lists, or else those of an ordinary TD."""
    attributes, xfam = (value.to_bytes(8, "little") for value in (report.td_attributes, report.xfam))
    if policy.td_attributes:
        judge.require("TDATTRIBUTES", attributes, policy.td_attributes, "td_attributes")
    elif report.td_attributes & ~(_DEBUG_BITS | _MIGRATABLE) != _SEPT_VE_DISABLE:  # those two were checked before
        # Without SEPT_VE_DISABLE the host can take a page away and have the kernel accept an empty one in its place.
        wanted = "SEPT_VE_DISABLE (bit 28) and no unusual bit"
        raise judge.refusal("TDATTRIBUTES", wanted, attributes, "td_attributes")
    if policy.xfam:
        judge.require("XFAM", xfam, policy.xfam, "xfam")
    elif report.xfam & _XFAM_ONES != _XFAM_ONES or report.xfam & ~_XFAM_KNOWN:
        wanted = f"the bits {_XFAM_ONES:#x} and none outside of {_XFAM_KNOWN:#x}"
        raise judge.refusal("XFAM", wanted, xfam, "xfam")


TDX = CpuKind(
    name="tdx",
    title=EVIDENCE,
    document="TDX quote",
    platform="Intel TDX",
    provider="tdx_guest",
    vendor="intel",
    roots=INTEL_ROOTS,
    evidence=TdxEvidence,
    verified=VerifiedTdxQuote,
    members=("collateral", "quote"),
    write=_write,
    read=_read,
    collect=_collect,
    report_data=lambda evidence: parse_tdx_quote(evidence.quote).report.report_data,
    verify=_verify,
    read_policy=_read_policy,
    check=_check,
    describe=_describe,
    flag="tdx_guest",
)
