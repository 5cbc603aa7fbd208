"""Draft a policy from evidence: every value that a policy can name, with the source of each and what it covers."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fastrack._util.public import attest_public
from fastrack.attest._cpu.snp_report import SnpReport, parse_snp_report
from fastrack.attest._cpu.tdx import VerifiedTdxQuote
from fastrack.attest._cpu.tdx_quote import TdReport, parse_tdx_quote
from fastrack.attest._gpus.evidence import GpuMode, VerifiedGpuReport
from fastrack.attest._gpus.rim_match import MatchedGpuReport
from fastrack.attest._kinds import VerifiedCpu, kind_of_verified
from fastrack.attest._offer import MachineEvidence

_TDX_COVERS = {
    "mrtd": "firmware, with which the virtual machine starts",
    "rtmr0": "configuration of the firmware: differs with CPUs, memory and devices",
    "rtmr1": "boot loader, kernel, partition table",
    "rtmr2": "kernel command line, initrd",
    "rtmr3": "what software adds after the start",
    "mrseam": "TDX module; Intel judges it too: leave this out, and it can be updated",
    "mrconfigid": "configuration that the host named",
    "mrowner": "owner that the host named",
    "mrownerconfig": "configuration of that owner",
    "mrservicetd": "service TDs, such as one that moves the machine",
}
_SNP_COVERS = {
    "measurement": "firmware; with measured direct boot also kernel, initrd, command line",
    "host_data": "what the host named",
    "family_id": "family that the guest's owner named",
    "image_id": "image that the guest's owner named",
    "id_key_digest": "key that signed the guest's identity",
    "author_key_digest": "key that signed that key",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A key of a policy, its value in TOML, and what it covers. A line that `is_open` lets more in: it is a comment."""

    key: str
    value: str
    covers: str
    is_open: bool = False

    def __str__(self) -> str:
        return f"# {self.covers}\n{'# ' * self.is_open}{self.key} = {self.value}"


@attest_public
def draft_policy(cpu: VerifiedCpu, devices: Sequence[MatchedGpuReport | VerifiedGpuReport] = ()) -> str:
    r"""Draft a policy, in TOML, that accepts a machine with this evidence, and no other.

    Each value has a comment about what it covers. Loosen what should vary: `"any"`, a longer list, or no such line.

    Parameters
    ----------
    cpu : VerifiedTdxQuote or VerifiedSnpReport
        What its CPU has proved.
    devices : sequence of MatchedGpuReport or VerifiedGpuReport
        What its GPUs and switches have proved.

    Examples
    --------
    >>> from fastrack import attest
    >>> try:
    ...     attest.draft_policy(b"a quote")
    ... except TypeError as error:
    ...     print(error)
    expected VerifiedTdxQuote or VerifiedSnpReport, got bytes; verify the evidence first
    """
    kind_of_verified(cpu)
    if isinstance(cpu, VerifiedTdxQuote):
        section, lines = "tdx", [*_draft_td(cpu.report), *_draft_tdx_platform(cpu)]
    else:
        section, lines = "snp", list(_draft_snp(cpu.report, str(cpu.product)))
        lines.append(_revocation(cpu.revocation_checked_at is not None))
    return _write(section, lines, list(_draft_gpus(devices)))


@attest_public
def draft_unverified_policy(evidence: MachineEvidence, kind: str) -> str:
    """Draft the part of a policy that an offer's CPU claims, and which nobody has verified: anyone can write it."""
    if kind == "tdx":
        lines = list(_draft_td(parse_tdx_quote(evidence.cpu.quote).report))  # type: ignore[union-attr]
    else:
        report = parse_snp_report(evidence.cpu.report)  # type: ignore[union-attr]
        lines = list(_draft_snp(report, str(report.product) if report.product else None))
    return "# NOT VERIFIED: these are claims that anyone can write.\n" + _write(kind, lines, [])


@attest_public
def compare_policies(old: str, new: str) -> tuple[str, ...]:
    r"""Return the keys of two policies that differ, each as a line: its name, the old value, the new value.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.compare_policies("[gpu]\ncount = 4", "[gpu]\ncount = 8")
    ('gpu.count: 4 -> 8',)
    """
    before, after = (dict(_flatten(tomllib.loads(text))) for text in (old, new))
    names = sorted({*before, *after})
    return tuple(
        f"{name}: {before.get(name, 'absent')} -> {after.get(name, 'absent')}"
        for name in names
        if before.get(name) != after.get(name)
    )


def _flatten(table: Mapping[str, object], path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{path}{name}.")
        elif isinstance(value, list):
            yield f"{path}{name}", ", ".join(sorted(map(str, value)))
        else:
            yield f"{path}{name}", str(value)


def _draft_td(report: TdReport) -> Iterator[Line]:
    registers = {f"rtmr{number}": register for number, register in enumerate(report.rtmrs)}
    for name, covers in _TDX_COVERS.items():
        value: bytes | None = registers.get(name) or getattr(report, name)
        yield Line(name, _list([(value or bytes(48)).hex()]), covers)  # older modules have no service TDs
    for name, number in (("td_attributes", report.td_attributes), ("xfam", report.xfam)):
        covers = "attributes: debugger, migration" if name == "td_attributes" else "features of the CPU that it may use"
        yield Line(name, _list([number.to_bytes(8, "little").hex()]), covers)
    if report.is_debug:
        yield Line("allow_debug", "true", "THE HOST CAN READ THIS MACHINE: a debugger is on", is_open=True)
    if report.is_migratable:
        yield Line("allow_migration", "true", "the host can move it to another machine", is_open=True)


def _draft_tdx_platform(verified: VerifiedTdxQuote) -> Iterator[Line]:
    tcb = verified.tcb
    advisories = f"; advisories {', '.join(tcb.advisory_ids)}" if tcb.advisory_ids else ""
    yield Line("tcb_status", _list([str(tcb.status)]), f"state of the platform, in Intel's words{advisories}")
    yield Line("min_evaluation_number", str(tcb.evaluation_number), "age of Intel's judgement; raise it as Intel does")
    yield Line("max_collateral_age_days", "30", "time since Intel issued it")
    covers = "this machine alone (PPID); leave it out for others like it"
    yield Line("platforms", _list([verified.platform.ppid.hex()]), covers)


def _draft_snp(report: SnpReport, product: str | None) -> Iterator[Line]:
    for name, covers in _SNP_COVERS.items():
        yield Line(name, _list([getattr(report, name).hex()]), covers)
    levels = [report.reported_tcb, report.committed_tcb, report.launch_tcb]
    floors = {
        name: min(getattr(level, name) for level in levels)
        for name in ("fmc", "bootloader", "tee", "snp", "microcode")
        if getattr(report.reported_tcb, name) is not None
    }
    table = ", ".join(f"{name} = {level}" for name, level in floors.items())
    yield Line("min_tcb", f"{{ {table} }}", "lowest patch levels: reported, committed and at launch")
    if product is not None:
        yield Line("products", _list([product]), "generation of the CPU")
    if any(report.chip_id):
        covers = "this machine alone; leave it out for others like it"
        yield Line("chip_ids", _list([report.chip_id.hex()]), covers)
    yield Line("max_vmpl", str(report.vmpl), "privilege of the software that asked; 0 is the highest")
    yield Line("allow_smt", str(report.allows_smt).lower(), "threads that share a core")
    covers = "check for aliases of memory (BadRAM)"
    yield Line("require_alias_check", str(report.is_alias_checked).lower(), covers)
    if report.is_debug:
        yield Line("allow_debug", "true", "THE HOST CAN READ THIS MACHINE: a debugger is on", is_open=True)
    if report.is_migratable:
        yield Line("allow_migration", "true", "the host can move it to another machine", is_open=True)


def _draft_gpus(devices: Sequence[MatchedGpuReport | VerifiedGpuReport]) -> Iterator[Line]:
    reports = [device.report if isinstance(device, MatchedGpuReport) else device for device in devices]
    gpus = [report for report in reports if not report.is_switch]
    if not gpus:
        return
    yield Line("count", str(len(gpus)), "number of GPUs")
    if len(gpus) < len(reports):
        yield Line("switch_count", str(len(reports) - len(gpus)), "number of NVSwitches")
    yield Line("architectures", _list({str(report.architecture) for report in reports}), "generations")
    yield Line("chips", _list({report.chip for report in reports}), "chips")
    covers = "these devices alone; leave it out for others like them"
    yield Line("chip_ids", _list({report.chip_id for report in reports}), covers)
    drivers = {report.driver_version for report in gpus if report.driver_version}
    manifests = sorted({name for report in reports for name in report.rim_ids})
    if drivers:
        lowest = min(drivers, key=_order_of_driver)
        yield Line("min_driver", _text(lowest), f"driver; its manifests are {', '.join(manifests)}")
    floors = {
        str(kind): min((one.vbios_version for one in reports if one.architecture is kind), key=_order_of_vbios)
        for kind in {report.architecture for report in reports}
    }
    table = ", ".join(f"{name} = {_text(version)}" for name, version in sorted(floors.items()))
    yield Line("min_vbios", f"{{ {table} }}", "firmware by generation")
    modes = {report.mode for report in gpus}
    if None not in modes:
        plain = "; NVLink is plain in it" if GpuMode.PROTECTED_PCIE in modes else ""
        yield Line("modes", _list({str(mode) for mode in modes}), f"confidential mode{plain}")
    matched = all(isinstance(device, MatchedGpuReport) for device in devices)
    covers = "comparison of all measurements with NVIDIA's manifests"
    yield Line("require_manifests", str(matched).lower(), covers, is_open=not matched)
    yield _revocation(all(report.revocation_checked_at is not None for report in reports))


def _revocation(checked: bool) -> Line:
    covers = "lists or responses in force, however old" if checked else "NOT CHECKED: none were with the evidence"
    return Line("revocation", _text("cached" if checked else "none"), covers, is_open=not checked)


def _write(section: str, lines: Iterable[Line], gpus: Sequence[Line]) -> str:
    parts = ["version = 1", f"\n[cpu.{section}]", *map(str, lines)]
    if gpus:
        parts += ["\n[gpu]", *map(str, gpus)]
    return "\n".join(parts) + "\n"


def _order_of_driver(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def _order_of_vbios(version: str) -> list[int]:
    return [int(part, 16) for part in version.split(".")]


def _text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _list(values: Iterable[str]) -> str:
    return f"[{', '.join(_text(value) for value in sorted(values))}]"
