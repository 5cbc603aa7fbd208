"""The kind of evidence of Intel TDX: its part of an offer, its section ``[cpu.tdx]`` of a policy, its collateral."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from cryptography.x509 import Certificate

from fastrack._documents.exchange import PART_LIMIT
from fastrack._documents.fields import BOOLEAN, Fields, binary, integer, or_none, record
from fastrack._documents.toml import TEXTS, Table, digests, words_of
from fastrack._util.gate import most_bytes
from fastrack._util.public import public
from fastrack.attest import _policy_common as rules
from fastrack.attest._cpu.event_log import EVENT_LOG_LIMIT, REGISTERS, EventLog, EventRule, text_digests
from fastrack.attest._cpu.kind import CpuKind, own_file, read_collateral
from fastrack.attest._cpu.tdx import VerifiedTdxQuote, verify_tdx_quote
from fastrack.attest._cpu.tdx_collateral import TDX_PARTS, TcbLevel, TcbStatus, TdxCollateral, TdxTcb
from fastrack.attest._cpu.tdx_pck import read_pck_identity
from fastrack.attest._cpu.tdx_quote import EVIDENCE, TdReport, parse_tdx_quote
from fastrack.attest._errors import refused
from fastrack.attest._formats.roots import INTEL_ROOTS, Roots
from fastrack.attest._formats.x509 import load_chain, subject_name
from fastrack.attest._policy_common import Line
from fastrack.errors import AttestationError, FormatError

_REGISTERS = {
    "mrtd": "firmware, with which the virtual machine starts",
    "rtmr0": "configuration of the firmware: differs with CPUs, memory and devices",
    "rtmr1": "boot loader, kernel, partition table",
    "rtmr2": "kernel command line, initrd",
    "rtmr3": "what software adds after the start",
    "mrseam": "TDX module, which Intel judges too; leave it out so that it can be updated",
    "mrconfigid": "configuration that the host named",
    "mrowner": "owner that the host named",
    "mrownerconfig": "configuration of that owner",
    "mrservicetd": "service TDs, such as one that moves the machine; zeros are none",
}
# What a policy must say, each as the line that leaves it open, which is also the line that a message proposes.
_LINES = {
    "mrtd": 'mrtd = "any"  # or a list: firmware',
    "rtmr1": 'rtmr1 = "any"  # or a list: boot loader and kernel',
    "rtmr2": 'rtmr2 = "any"  # or a list: kernel command line and initrd',
}
_EVENT_REGISTERS = tuple(f"rtmr{number}" for number in range(REGISTERS))
CCEL = "/sys/firmware/acpi/tables/data/CCEL"  # where Linux has the event log
_COLLATERAL_AGE = timedelta(days=30)  # the time for which Intel issues a TCB info
_EVALUATION_NUMBER = 17  # what Intel answered with in May 2025, and has followed by higher ones since
_DEBUG_BITS, _SEPT_VE_DISABLE, _MIGRATABLE = 0xFF, 1 << 28, 1 << 29  # of TDATTRIBUTES
_NEWER = {  # by the parts of the TCB: what is needed where one is out of date or revoked
    "platform": "a newer BIOS with its microcode on the host",
    "module": "a newer TDX module on the host",
    "quoting_enclave": "a newer quoting enclave on the host",
}
_FIELDS: Fields = {  # of an offer
    "event_log": binary(EVENT_LOG_LIMIT),
    "quote": binary(most_bytes("quote")),
    "collateral": or_none(record(TdxCollateral, dict.fromkeys(TDX_PARTS, binary(PART_LIMIT)))),
}
_XFAM_ONES, _XFAM_KNOWN = 0x3, 0x6DBE7  # x87 and SSE are always on; no TDX module offers bits outside of the second


@public
@dataclass(frozen=True, slots=True)
class TdxEvidence:
    """A quote of Intel TDX, with its collateral, if the owner has none, and the event log of the TD, if it has one.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.TdxEvidence(b"quote").collateral is None
    True
    """

    quote: bytes = field(repr=False)
    collateral: TdxCollateral | None = None
    event_log: bytes | None = field(default=None, repr=False)


@public
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
        SEPT_VE_DISABLE (bit 28) must be set and no other bit, except those that the next two allow; and XFAM must be
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
    events: Mapping[str, tuple[EventRule, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if unknown := set(self.events).difference(_EVENT_REGISTERS):
            raise ValueError(f"expected events= of {', '.join(_EVENT_REGISTERS)}, got {', '.join(sorted(unknown))}")
        rules.require_named(self.measurements, set(_LINES) - set(self.events))


def _read_events(table: Table) -> dict[str, tuple[EventRule, ...]]:
    """Read the tables ``[[cpu.tdx.events.rtmr1]]``, of which each describes one event."""
    if (registers := table.table("events")) is None:
        return {}
    found = {name: tuple(map(_read_rule, registers.tables(name))) for name in _EVENT_REGISTERS if registers.has(name)}
    registers.done()
    return found


def _read_rule(table: Table) -> EventRule:
    is_any, texts = table.read("any", BOOLEAN) or False, table.read("texts", TEXTS) or frozenset()
    allowed = (table.read("digests", digests(48)) or frozenset()).union(*map(text_digests, texts))
    table.done()
    if is_any == bool(allowed):
        raise table.refusal("digests", "digests, texts, or any = true", "none of them" if not is_any else "several")
    return EventRule(None if is_any else allowed)


def _collect(report: bytes, _: bytes) -> TdxEvidence:
    # Without a log that replays, a policy that names events refuses the offer and says why; others do not need it.
    try:
        log = read_collateral(Path(CCEL), EVENT_LOG_LIMIT)
        EventLog.parse(log or b"").require(parse_tdx_quote(report).report.rtmrs, (0, 1))
    except (PermissionError, AttestationError, FormatError):
        log = None
    return TdxEvidence(report, event_log=log)


def _complete(evidence: TdxEvidence, collateral: TdxCollateral | Path) -> TdxEvidence:
    if isinstance(collateral, TdxCollateral):
        return replace(evidence, collateral=collateral)
    certificates = load_chain(parse_tdx_quote(evidence.quote).pck_chain, evidence="PCK chain")
    for path in (collateral / tdx_file(certificates), collateral / "tdx.json"):  # the second is filled by hand
        if (text := read_collateral(path)) is not None:
            with own_file(path):
                return replace(evidence, collateral=TdxCollateral.from_json(text))
    return evidence


def tdx_file(pck_chain: Sequence[Certificate]) -> str:
    """Return the name of the file of collateral for a platform: of its FMSPC, with the list of its authority."""
    is_processor = "Processor" in subject_name(pck_chain[1 % len(pck_chain)])
    return f"tdx-{read_pck_identity(pck_chain[0]).fmspc.hex()}{'-processor' * is_processor}.json"


def _verify(evidence: TdxEvidence, now: datetime, roots: Roots) -> VerifiedTdxQuote:
    if evidence.collateral is None:
        advice = (
            "Fetch it (`fastrack attest fetch`), and pass it on the command line as --collateral or in a program as "
            "collateral=; or have the machine send it, whose `fastrack attest collect` has --collateral too."
        )
        raise refused("offer", "TDX collateral", wanted="that of the platform", found="none", advice=advice)
    verified = verify_tdx_quote(evidence.quote, evidence.collateral, now=now, roots=roots)
    if evidence.event_log is None:
        return verified
    # Software may add to the last two after the start, which the log of firmware does not have.
    log = EventLog.parse(evidence.event_log)
    log.require(verified.report.rtmrs, (0, 1))
    return replace(verified, event_log=log.proved_by(verified.report.rtmrs))


def _describe(verified: VerifiedTdxQuote) -> dict[str, object]:
    tcb = verified.tcb
    claims = rules.to_claims(_draft_report(verified.report, None))
    platform = {"fmspc": verified.platform.fmspc.hex(), "ppid": verified.platform.ppid.hex()}
    state = {"tcb_status": str(tcb.status), "tcb_parts": _tell_parts(tcb), "evaluation_number": tcb.evaluation_number}
    return {**claims, **state, "advisories": list(tcb.advisory_ids), **platform}


def _tell_parts(tcb: TdxTcb, but: Collection[TcbStatus] = ()) -> dict[str, str]:
    """Return the state of each part of the TCB but those in some states: its status, its date, and what it needs."""
    found = {}
    for name, newer in _NEWER.items():
        level: TcbLevel | None = getattr(tcb, name)
        if level is None or (status := level.status) in but:
            continue
        needed = [newer] * ("OutOfDate" in status or status is TcbStatus.REVOKED)
        needed += ["other settings of the BIOS"] * ("Configuration" in status)
        needed += ["software as its advisories say"] * ("SWHardening" in status)
        found[name] = f"{status}, {level.date:%Y-%m-%d}" + f", needs {' and '.join(needed)}" * bool(needed)
    return found


def _draft(verified: VerifiedTdxQuote) -> Iterator[Line]:
    tcb, log = verified.tcb, verified.event_log
    yield from _draft_report(verified.report, log)
    advisories = f"; these advisories apply: {', '.join(tcb.advisory_ids)}" if tcb.advisory_ids else ""
    weak = tcb.status is not TcbStatus.UP_TO_DATE
    behind = "".join(f"; {name}: {state}" for name, state in _tell_parts(tcb, {TcbStatus.UP_TO_DATE}).items())
    yield Line("tcb_status", {tcb.status}, f"TCB status of the platform{behind}{advisories}", weak)
    number = max(tcb.evaluation_number, _EVALUATION_NUMBER)
    yield Line("min_evaluation_number", number, "TCB evaluation data number; raise it as Intel does")
    yield Line("max_collateral_age_days", _COLLATERAL_AGE.days, "days since Intel issued it")
    yield Line("platforms", {verified.platform.ppid}, "only this machine (PPID); leave it out for others like it")


def _draft_claims(evidence: TdxEvidence) -> Iterator[Line]:
    quote = parse_tdx_quote(evidence.quote)
    platform = read_pck_identity(load_chain(quote.pck_chain, evidence="PCK chain")[0])
    yield from _draft_report(quote.report, None)
    levels = f"TCB {quote.report.tee_tcb_svn.hex()}, CPU {platform.cpu_svn.hex()}, PCE {platform.pce_svn}"
    yield Line("platforms", {platform.ppid}, f"only this machine (PPID), of FMSPC {platform.fmspc.hex()}: {levels}")


def _draft_report(report: TdReport, log: EventLog | None) -> Iterator[Line]:
    for name, covers in _REGISTERS.items():
        value, lines = _register(report, name), []
        if log is not None and name.startswith("rtmr"):
            lines = [f"\n#   {number}. {event}" for number, event in enumerate(log.of(int(name[-1])), 1)]
            if not lines and any(value):
                lines = ["; the event log does not give this register"]
        weak = name == "mrservicetd" and any(value)
        text = "A SERVICE TD IS BOUND TO THIS MACHINE: " * weak + covers + "".join(lines)
        yield Line(name, {value}, text, weak)
    weak = not _has_usual_attributes(report)
    covers = "UNUSUAL " * weak + "attributes of the virtual machine: debugger, migration"
    yield Line("td_attributes", {report.td_attributes.to_bytes(8, "little")}, covers, weak)
    weak = not _has_usual_features(report)
    covers = "UNUSUAL " * weak + "features of the CPU that it may use"
    yield Line("xfam", {report.xfam.to_bytes(8, "little")}, covers, weak)
    yield from rules.draft_openings(debug=report.is_debug, migration=report.is_migratable)


def _register(report: TdReport, name: str) -> bytes:
    if name.startswith("rtmr"):
        return report.rtmrs[int(name[-1])]
    return getattr(report, name) or bytes(48)  # older modules have no service TDs


def _read_policy(table: Table) -> TdxPolicy:
    """Read the section ``[cpu.tdx]``."""
    events = _read_events(table)
    rules.require_lines(table, {name: line for name, line in _LINES.items() if name not in events})
    return TdxPolicy(table.read_all(_MEASUREMENTS), events=events, **table.read_all(_POLICY))


_MEASUREMENTS = dict.fromkeys(_REGISTERS, rules.or_any(digests(48)))
_POLICY: Fields = {
    "tcb_status": words_of(TcbStatus),
    "refused_advisories": TEXTS,
    "min_evaluation_number": integer(0),
    "platforms": digests(16),
    "max_collateral_age_days": rules.AGE.of("max_collateral_age"),
    "td_attributes": digests(8),
    "xfam": digests(8),
    "allow_debug": BOOLEAN,
    "allow_migration": BOOLEAN,
}


def _check(policy: TdxPolicy, verified: VerifiedTdxQuote, judge: rules.Judge) -> None:
    """Require that a verified quote is one that a policy accepts."""
    report, tcb = verified.report, verified.tcb
    judge.require_current(verified.verified_at, verified.valid_until)
    judge.require_clear("debug bit", report.is_debug, policy.allow_debug, "allow_debug")
    judge.require_clear("migration bit", report.is_migratable, policy.allow_migration, "allow_migration")
    for name, allowed in ({"mrservicetd": frozenset({bytes(48)})} | dict(policy.measurements)).items():
        if allowed is not None:
            judge.require(name.upper(), _register(report, name), allowed, name)
    for name, events in policy.events.items():
        _check_events(name, events, verified, judge)
    _check_attributes(policy, report, judge)
    if tcb.status not in policy.tcb_status:
        parts = _tell_parts(tcb, {TcbStatus.UP_TO_DATE, *policy.tcb_status}) or _tell_parts(tcb)
        advice = f"By its parts: {'; '.join(map(': '.join, parts.items()))}. {rules.NOT_MEANT}"
        judge.refuse("TCB status", f"one of {', '.join(sorted(policy.tcb_status))}", tcb.status, "tcb_status", advice)
    if refused_ids := policy.refused_advisories.intersection(tcb.advisory_ids):
        wanted = "none of cpu.tdx.refused_advisories"
        judge.refuse("advisories", wanted, ", ".join(sorted(refused_ids)), None)
    lowest = policy.min_evaluation_number
    judge.require_at_least("evaluation number", tcb.evaluation_number, lowest, "min_evaluation_number")
    judge.require_listed("PPID", verified.platform.ppid, policy.platforms, "platforms")
    longest, key = policy.max_collateral_age, "max_collateral_age_days"
    judge.require_age("age of the collateral", verified.collateral_issued_at, longest, key)


def _check_events(name: str, wanted: tuple[EventRule, ...], verified: VerifiedTdxQuote, judge: rules.Judge) -> None:
    """Require that the events of a register are those that a policy names, in their order, and no others."""
    title, key, log, number = name.upper(), f"events.{name}", verified.event_log, int(name[-1])
    if log is None:
        advice = "Collect the offer as root, where the kernel has the table CCEL; or name the register itself."
        judge.refuse("event log", f"one, for the events of {title}", "none", key, advice)
        return
    try:
        log.require(verified.report.rtmrs, (number,))
    except AttestationError as error:
        judge.note(error)
        return
    events = log.of(number)
    if len(events) != len(wanted):
        judge.refuse(f"events of {title}", f"{len(wanted)} of them", len(events), key)
    for place, (event, rule) in enumerate(zip(events, wanted, strict=False), 1):
        if rule.digests is not None and event.digest not in rule.digests:
            shown = ", ".join(sorted(digest.hex() for digest in rule.digests))
            judge.refuse(f"event {place} of {title} ({event.name})", f"one of {shown}", event.digest, key)


def _check_attributes(policy: TdxPolicy, report: TdReport, judge: rules.Judge) -> None:
    """Require TDATTRIBUTES and XFAM that a policy lists, or else those of an ordinary TD."""
    attributes, xfam = (value.to_bytes(8, "little") for value in (report.td_attributes, report.xfam))
    if policy.td_attributes:
        judge.require("TDATTRIBUTES", attributes, policy.td_attributes, "td_attributes")
    elif not _has_usual_attributes(report):
        # Without SEPT_VE_DISABLE the host can take a page away and have the kernel accept an empty one in its place.
        wanted = "SEPT_VE_DISABLE (bit 28) and no unusual bit"
        judge.refuse("TDATTRIBUTES", wanted, attributes, "td_attributes")
    if policy.xfam:
        judge.require("XFAM", xfam, policy.xfam, "xfam")
    elif not _has_usual_features(report):
        wanted = f"the bits {_XFAM_ONES:#x} and none outside of {_XFAM_KNOWN:#x}"
        judge.refuse("XFAM", wanted, xfam, "xfam")


def _has_usual_attributes(report: TdReport) -> bool:
    """Return whether TDATTRIBUTES are those of an ordinary TD, apart from debugger and migration."""
    return report.td_attributes & ~(_DEBUG_BITS | _MIGRATABLE) == _SEPT_VE_DISABLE


def _has_usual_features(report: TdReport) -> bool:
    return report.xfam & _XFAM_ONES == _XFAM_ONES and not report.xfam & ~_XFAM_KNOWN


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
    fields=_FIELDS,
    optional=("event_log",),
    collect=_collect,
    report_data=lambda evidence: parse_tdx_quote(evidence.quote).report.report_data,
    bare=lambda evidence: replace(evidence, collateral=None),
    complete=_complete,
    verify=_verify,
    read_policy=_read_policy,
    check=_check,
    draft=_draft,
    draft_claims=_draft_claims,
    describe=_describe,
    flag="tdx_guest",
)
