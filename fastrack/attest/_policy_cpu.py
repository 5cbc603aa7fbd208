"""Judge CPUs: the sections ``[cpu.tdx]`` and ``[cpu.snp]`` of a policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import product

from fastrack._util.public import attest_public
from fastrack.attest._cpu.snp import VerifiedSnpReport
from fastrack.attest._cpu.snp_report import SnpProduct
from fastrack.attest._cpu.tdx import VerifiedTdxQuote
from fastrack.attest._cpu.tdx_collateral import TcbStatus
from fastrack.attest._cpu.tdx_quote import TdReport
from fastrack.attest._errors import refused
from fastrack.attest._formats.toml import Table
from fastrack.attest._policy_common import (
    NOT_MEANT,
    Revocation,
    read_days,
    read_days_or,
    read_enum,
    read_revocation,
    require,
    require_age,
    require_at_least,
    require_clear,
    require_current,
    require_revocation,
)
from fastrack.errors import FormatError

_ANY = "any"
_TDX, _SNP = "TDX quote", "SNP report"
_TD_REGISTERS = dict.fromkeys(("mrtd", "mrseam", "mrconfigid", "mrowner", "mrownerconfig", "mrservicetd"), 48)
_TD_REGISTERS |= dict.fromkeys((f"rtmr{number}" for number in range(4)), 48)
_SNP_VALUES = dict.fromkeys(("measurement", "id_key_digest", "author_key_digest"), 48)
_SNP_VALUES |= {"host_data": 32, "family_id": 16, "image_id": 16}
_LEVELS = ("bootloader", "tee", "snp", "microcode", "fmc")
# What a policy must say, each as the line that leaves it open, which is also the line that a message proposes.
_TDX_LINES = {
    "mrtd": f'mrtd = "{_ANY}"  # or a list: firmware',
    "rtmr1": f'rtmr1 = "{_ANY}"  # or a list: boot loader and kernel',
    "rtmr2": f'rtmr2 = "{_ANY}"  # or a list: kernel command line and initrd',
}
_SNP_LINES = {
    "measurement": f'measurement = "{_ANY}"  # or a list: firmware, with digests of kernel, command line and initrd',
    "min_tcb": f'min_tcb = "{_ANY}"  # or floors, such as {{ bootloader = 7, snp = 14, microcode = 72 }}',
}
_COLLATERAL_AGE = timedelta(days=30)  # the time for which Intel issues a TCB info
_EVALUATION_NUMBER = 17  # what Intel answered with in May 2025, and has followed by higher ones since
_DEBUG_BITS, _SEPT_VE_DISABLE, _MIGRATABLE = 0xFF, 1 << 28, 1 << 29  # of TDATTRIBUTES
_XFAM_ONES, _XFAM_KNOWN = 0x3, 0x6DBE7  # x87 and SSE are always on; no TDX module offers bits outside of the second


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

    measurements: Mapping[str, frozenset[bytes] | None]
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
        _require_named(self.measurements, _TDX_LINES)


@attest_public
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
        launch; any if empty.
    products : frozenset of SnpProduct
        The products that are accepted; all if empty.
    chip_ids : frozenset of bytes
        The chips that are accepted, 64 bytes each; all if empty.
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

    Examples
    --------
    >>> from fastrack import attest
    >>> policy = attest.Policy.from_toml("version = 1\n[cpu.snp]\nmeasurement = 'any'\nmin_tcb = { microcode = 115 }")
    >>> policy.snp.min_tcb, policy.snp.allow_debug
    ({'microcode': 115}, False)
    """

    measurements: Mapping[str, frozenset[bytes] | None]
    min_tcb: Mapping[str, int]
    products: frozenset[SnpProduct] = frozenset()
    chip_ids: frozenset[bytes] = frozenset()
    max_vmpl: int = 0
    revocation: Revocation = Revocation.CACHED
    max_revocation_age: timedelta | None = None
    allow_debug: bool = False
    allow_migration: bool = False
    allow_smt: bool = True
    require_alias_check: bool = False

    def __post_init__(self) -> None:
        _require_named(self.measurements, {"measurement"})


def check_tdx(policy: TdxPolicy, verified: VerifiedTdxQuote, now: datetime) -> None:
    """Require that a verified quote is one that a policy accepts.

    Raises
    ------
    AttestationError
        If it is not.
    """
    report, tcb = verified.report, verified.tcb
    require_current(_TDX, verified.verified_at, verified.valid_until, now)
    require_clear(_TDX, "debug bit", report.is_debug, policy.allow_debug, "cpu.tdx.allow_debug")
    require_clear(_TDX, "migration bit", report.is_migratable, policy.allow_migration, "cpu.tdx.allow_migration")
    found = {name: getattr(report, name) for name in _TD_REGISTERS if not name.startswith("rtmr")}
    found |= {f"rtmr{number}": register for number, register in enumerate(report.rtmrs)}
    found["mrservicetd"] = report.mrservicetd or bytes(48)  # older modules have no service TDs
    for name, allowed in ({"mrservicetd": frozenset({bytes(48)})} | dict(policy.measurements)).items():
        if allowed is not None:
            require(_TDX, name.upper(), found[name], allowed, f"cpu.tdx.{name}")
    _check_attributes(policy, report)
    require(_TDX, "TCB status", tcb.status, policy.tcb_status, "cpu.tdx.tcb_status")
    if refused_ids := policy.refused_advisories.intersection(tcb.advisory_ids):
        wanted = "none of cpu.tdx.refused_advisories"
        raise refused(_TDX, "advisories", wanted=wanted, found=", ".join(sorted(refused_ids)), advice=NOT_MEANT)
    lowest, key = policy.min_evaluation_number, "cpu.tdx.min_evaluation_number"
    require_at_least(_TDX, "evaluation number", tcb.evaluation_number, lowest, key)
    if policy.platforms:
        require(_TDX, "PPID", verified.platform.ppid, policy.platforms, "cpu.tdx.platforms")
    longest, key = policy.max_collateral_age, "cpu.tdx.max_collateral_age_days"
    require_age(_TDX, "age of the collateral", verified.collateral_issued_at, longest, now, key)


def _check_attributes(policy: TdxPolicy, report: TdReport) -> None:
    """Require TDATTRIBUTES and XFAM that a policy lists, or else those of an ordinary TD."""
    attributes, xfam = (value.to_bytes(8, "little") for value in (report.td_attributes, report.xfam))
    if policy.td_attributes:
        require(_TDX, "TDATTRIBUTES", attributes, policy.td_attributes, "cpu.tdx.td_attributes")
    elif report.td_attributes & ~(_DEBUG_BITS | _MIGRATABLE) != _SEPT_VE_DISABLE:  # those two were checked before
        # Without SEPT_VE_DISABLE the host can take a page away and have the kernel accept an empty one in its place.
        wanted = "SEPT_VE_DISABLE (bit 28) and no unusual bit (cpu.tdx.td_attributes)"
        raise refused(_TDX, "TDATTRIBUTES", wanted=wanted, found=attributes, advice=NOT_MEANT)
    if policy.xfam:
        require(_TDX, "XFAM", xfam, policy.xfam, "cpu.tdx.xfam")
    elif report.xfam & _XFAM_ONES != _XFAM_ONES or report.xfam & ~_XFAM_KNOWN:
        wanted = f"the bits {_XFAM_ONES:#x} and none outside of {_XFAM_KNOWN:#x} (cpu.tdx.xfam)"
        raise refused(_TDX, "XFAM", wanted=wanted, found=xfam, advice=NOT_MEANT)


def check_snp(policy: SnpPolicy, verified: VerifiedSnpReport, now: datetime) -> None:
    """Require that a verified report is one that a policy accepts.

    Raises
    ------
    AttestationError
        If it is not.
    """
    report = verified.report
    require_current(_SNP, verified.verified_at, verified.valid_until, now)
    require_clear(_SNP, "debug bit", report.is_debug, policy.allow_debug, "cpu.snp.allow_debug")
    require_clear(_SNP, "migration bit", report.is_migratable, policy.allow_migration, "cpu.snp.allow_migration")
    require_clear(_SNP, "SMT bit", report.allows_smt, policy.allow_smt, "cpu.snp.allow_smt")
    for name, allowed in policy.measurements.items():
        if allowed is not None:
            require(_SNP, name.upper(), getattr(report, name), allowed, f"cpu.snp.{name}")
    if policy.products:
        require(_SNP, "product", verified.product, policy.products, "cpu.snp.products")
    if policy.chip_ids:
        require(_SNP, "CHIP_ID", report.chip_id, policy.chip_ids, "cpu.snp.chip_ids")
    require(_SNP, "VMPL", report.vmpl, range(policy.max_vmpl + 1), "cpu.snp.max_vmpl")
    # The host may report less than it runs, go back to what is committed, and have started the guest on less.
    levels = {"reported": report.reported_tcb, "committed": report.committed_tcb, "launch": report.launch_tcb}
    for (kind, tcb), (name, lowest) in product(levels.items(), policy.min_tcb.items()):
        level = getattr(tcb, name)
        if level is not None:  # only Turin has an FMC
            require_at_least(_SNP, f"{kind} {name} patch level", level, lowest, f"cpu.snp.min_tcb.{name}")
    if policy.require_alias_check and not report.is_alias_checked:
        wanted = "a platform that checked its memory for aliases (cpu.snp.require_alias_check)"
        raise refused(_SNP, "PLATFORM_INFO", wanted=wanted, found=f"{report.platform_info:#x}", advice=NOT_MEANT)
    checked_at, longest = verified.revocation_checked_at, policy.max_revocation_age
    require_revocation(_SNP, policy.revocation, checked_at, longest, now, "cpu.snp.revocation")


def read_tdx(table: Table) -> TdxPolicy:
    """Read the section ``[cpu.tdx]``."""
    _require_lines(table, _TDX_LINES)
    number = table.integer("min_evaluation_number")
    policy = TdxPolicy(
        measurements=_read_measurements(table, _TD_REGISTERS),
        tcb_status=read_enum(table, "tcb_status", TcbStatus) or frozenset({TcbStatus.UP_TO_DATE}),
        refused_advisories=frozenset(table.texts("refused_advisories")),
        min_evaluation_number=_EVALUATION_NUMBER if number is None else number,
        platforms=table.digests("platforms", 16),
        max_collateral_age=read_days_or(table, "max_collateral_age_days", _COLLATERAL_AGE),
        td_attributes=table.digests("td_attributes", 8),
        xfam=table.digests("xfam", 8),
        allow_debug=table.boolean("allow_debug", default=False),
        allow_migration=table.boolean("allow_migration", default=False),
    )
    table.done()
    return policy


def read_snp(table: Table) -> SnpPolicy:
    """Read the section ``[cpu.snp]``."""
    _require_lines(table, _SNP_LINES)
    policy = SnpPolicy(
        measurements=_read_measurements(table, _SNP_VALUES),
        min_tcb=_read_levels(table),
        products=read_enum(table, "products", SnpProduct),
        chip_ids=table.digests("chip_ids", 64),
        max_vmpl=table.integer("max_vmpl") or 0,
        revocation=read_revocation(table),
        max_revocation_age=read_days(table, "max_revocation_age_days"),
        allow_debug=table.boolean("allow_debug", default=False),
        allow_migration=table.boolean("allow_migration", default=False),
        allow_smt=table.boolean("allow_smt", default=True),
        require_alias_check=table.boolean("require_alias_check", default=False),
    )
    table.done()
    return policy


def _require_named(measurements: Mapping[str, object], names: Iterable[str]) -> None:
    """Require that what tells the software is named, as `from_toml` requires it of a file."""
    if absent := [name for name in names if name not in measurements]:
        raise ValueError(f"expected measurements= with {', '.join(absent)}, got none; pass None for any value")


def _require_lines(table: Table, lines: Mapping[str, str]) -> None:
    """Require that a section says which software is given the key, be it any."""
    if absent := [name for name in lines if not table.has(name)]:
        names, section = " and ".join(map(table.path, absent)), table.path("").removesuffix(".")
        raise FormatError(
            f"reading the policy failed: expected {names}, got none, which would give the key to any software or "
            f"platform. Add to [{section}] the lines {' and '.join(f'`{lines[name]}`' for name in absent)}."
        )


def _read_measurements(table: Table, sizes: Mapping[str, int]) -> dict[str, frozenset[bytes] | None]:
    """Read the allowed values of each field; None where the policy says ``"any"``."""
    return {name: table.digests_or(name, size, _ANY) or None for name, size in sizes.items() if table.has(name)}


def _read_levels(table: Table) -> dict[str, int]:
    if table.is_word("min_tcb", _ANY):
        return {}
    levels = table.table("min_tcb")
    found = {name: level for name in _LEVELS if levels and (level := levels.integer(name)) is not None}
    if levels:
        levels.done()
    if not found:
        raise table.refusal("min_tcb", f'floors of {", ".join(_LEVELS)}, or "{_ANY}"', "none of them")
    return found
