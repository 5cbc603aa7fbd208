"""Judge CPUs: the sections ``[cpu.tdx]`` and ``[cpu.snp]`` of a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from fastrack._util.public import attest_public
from fastrack.attest._errors import refused
from fastrack.attest._policy_common import (
    NOT_MEANT,
    Revocation,
    read_days,
    read_enum,
    read_revocation,
    read_revocation_age,
    require,
    require_age,
    require_at_least,
    require_clear,
    require_current,
    require_revocation,
)
from fastrack.attest._snp import VerifiedSnpReport
from fastrack.attest._snp_report import SnpProduct
from fastrack.attest._tdx import VerifiedTdxQuote
from fastrack.attest._tdx_collateral import TcbStatus
from fastrack.attest._toml import Table

_ANY = "any"
_TDX, _SNP = "TDX quote", "SNP report"
_TD_REGISTERS = dict.fromkeys(("mrtd", "mrseam", "mrconfigid", "mrowner", "mrownerconfig", "mrservicetd"), 48)
_TD_REGISTERS |= dict.fromkeys((f"rtmr{number}" for number in range(4)), 48)
_SNP_VALUES = dict.fromkeys(("measurement", "id_key_digest", "author_key_digest"), 48)
_SNP_VALUES |= {"host_data": 32, "family_id": 16, "image_id": 16}
_LEVELS = ("bootloader", "tee", "snp", "microcode", "fmc")


@attest_public
@dataclass(frozen=True, slots=True)
class TdxPolicy:
    r"""The section ``[cpu.tdx]`` of a policy.

    Attributes
    ----------
    measurements : mapping of str to frozenset of bytes
        The allowed values by register: "mrtd", "rtmr0" and so on. Registers that are not in it may have any value.
    tcb_status : frozenset of TcbStatus
        The states of a platform that are accepted.
    refused_advisories : frozenset of str
        Advisories that must not apply.
    min_evaluation_number : int
        The lowest ``tcbEvaluationDataNumber`` of collateral.
    platforms : frozenset of bytes
        The PPIDs of the machines that are accepted; all if empty.
    max_collateral_age : datetime.timedelta or None
        The longest time since the collateral was issued.
    allow_debug, allow_migration : bool
        Whether TDs are accepted that the host may read, or move to another machine.

    Examples
    --------
    >>> from fastrack import attest
    >>> policy = attest.Policy.from_toml("version = 1\n[cpu.tdx]\nmrtd = 'any'")
    >>> policy.tdx == attest.TdxPolicy(measurements={})
    True
    """

    measurements: Mapping[str, frozenset[bytes]]
    tcb_status: frozenset[TcbStatus] = frozenset({TcbStatus.UP_TO_DATE})
    refused_advisories: frozenset[str] = frozenset()
    min_evaluation_number: int = 0
    platforms: frozenset[bytes] = frozenset()
    max_collateral_age: timedelta | None = None
    allow_debug: bool = False
    allow_migration: bool = False


@attest_public
@dataclass(frozen=True, slots=True)
class SnpPolicy:
    r"""The section ``[cpu.snp]`` of a policy.

    Attributes
    ----------
    measurements : mapping of str to frozenset of bytes
        The allowed values by field: "measurement", "host_data" and so on. Fields that are not in it may have any value.
    products : frozenset of SnpProduct
        The products that are accepted; all if empty.
    min_tcb : mapping of str to int
        The lowest patch level of each part: "bootloader", "tee", "snp", "microcode", "fmc".
    chip_ids : frozenset of bytes
        The chips that are accepted, 64 bytes each; all if empty.
    max_vmpl : int
        The lowest privilege that the software may have that asked for the report.
    revocation : Revocation
        How much is asked about the revocation of AMD's authorities.
    max_revocation_age : datetime.timedelta
        The longest time since the revocation list was issued, if one is required.
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

    measurements: Mapping[str, frozenset[bytes]]
    products: frozenset[SnpProduct] = frozenset()
    min_tcb: Mapping[str, int] = field(default_factory=dict)
    chip_ids: frozenset[bytes] = frozenset()
    max_vmpl: int = 0
    revocation: Revocation = Revocation.CACHED
    max_revocation_age: timedelta = timedelta(days=1)
    allow_debug: bool = False
    allow_migration: bool = False
    allow_smt: bool = True
    require_alias_check: bool = False


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
    for name, allowed in policy.measurements.items():
        require(_TDX, name.upper(), found[name], allowed, f"cpu.tdx.{name}")
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
        require(_SNP, name.upper(), getattr(report, name), allowed, f"cpu.snp.{name}")
    if policy.products:
        require(_SNP, "product", verified.product, policy.products, "cpu.snp.products")
    if policy.chip_ids:
        require(_SNP, "CHIP_ID", report.chip_id, policy.chip_ids, "cpu.snp.chip_ids")
    require(_SNP, "VMPL", report.vmpl, range(policy.max_vmpl + 1), "cpu.snp.max_vmpl")
    for name, lowest in policy.min_tcb.items():
        level = getattr(report.reported_tcb, name)
        if level is not None:  # only Turin has an FMC
            require_at_least(_SNP, f"{name} patch level", level, lowest, f"cpu.snp.min_tcb.{name}")
    if policy.require_alias_check and not report.is_alias_checked:
        wanted = "a platform that checked its memory for aliases (cpu.snp.require_alias_check)"
        raise refused(_SNP, "PLATFORM_INFO", wanted=wanted, found=f"{report.platform_info:#x}", advice=NOT_MEANT)
    checked_at, longest = verified.revocation_checked_at, policy.max_revocation_age
    require_revocation(_SNP, policy.revocation, checked_at, longest, now, "cpu.snp.revocation")


def read_tdx(table: Table) -> TdxPolicy:
    """Read the section ``[cpu.tdx]``."""
    policy = TdxPolicy(
        measurements=_read_measurements(table, _TD_REGISTERS, "mrtd"),
        tcb_status=read_enum(table, "tcb_status", TcbStatus) or frozenset({TcbStatus.UP_TO_DATE}),
        refused_advisories=frozenset(table.texts("refused_advisories")),
        min_evaluation_number=table.integer("min_evaluation_number") or 0,
        platforms=table.digests("platforms", 16),
        max_collateral_age=read_days(table, "max_collateral_age_days"),
        allow_debug=table.boolean("allow_debug", default=False),
        allow_migration=table.boolean("allow_migration", default=False),
    )
    table.done()
    return policy


def read_snp(table: Table) -> SnpPolicy:
    """Read the section ``[cpu.snp]``."""
    policy = SnpPolicy(
        measurements=_read_measurements(table, _SNP_VALUES, "measurement"),
        products=read_enum(table, "products", SnpProduct),
        min_tcb=_read_levels(table),
        chip_ids=table.digests("chip_ids", 64),
        max_vmpl=table.integer("max_vmpl") or 0,
        revocation=read_revocation(table),
        max_revocation_age=read_revocation_age(table),
        allow_debug=table.boolean("allow_debug", default=False),
        allow_migration=table.boolean("allow_migration", default=False),
        allow_smt=table.boolean("allow_smt", default=True),
        require_alias_check=table.boolean("require_alias_check", default=False),
    )
    table.done()
    return policy


def _read_measurements(table: Table, sizes: Mapping[str, int], needed: str) -> dict[str, frozenset[bytes]]:
    """Read the allowed values of each field. That of the initial memory is only left open by ``"any"``."""
    if not table.has(needed):
        wanted = f'a list of the allowed values, or "{_ANY}"'
        raise table.refusal(needed, wanted, "none, which would give the key to any software")
    return {name: values for name, size in sizes.items() if (values := table.digests_or(name, size, _ANY))}


def _read_levels(table: Table) -> dict[str, int]:
    levels = table.table("min_tcb")
    if levels is None:
        return {}
    found = {name: level for name in _LEVELS if (level := levels.integer(name)) is not None}
    levels.done()
    return found
