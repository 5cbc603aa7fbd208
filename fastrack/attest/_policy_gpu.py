"""Judge GPUs and NVSwitches: the section ``[gpu]`` of a policy."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from fastrack._documents.fields import (
    BOOLEAN,
    TEXT,
    Field,
    FieldError,
    Fields,
    hexadecimal,
    integer,
    mapping,
    one_of,
    record,
    text,
)
from fastrack._documents.toml import TEXTS, Table, filled, word_of, words_of
from fastrack._util.public import public
from fastrack.attest import _policy_common as rules
from fastrack.attest._errors import refused
from fastrack.attest._gpus.evidence import GpuMode, VerifiedGpuReport
from fastrack.attest._gpus.identity import GpuArchitecture
from fastrack.attest._gpus.report import DIGEST_SIZE
from fastrack.attest._gpus.rim_match import MatchedGpuReport, report_of
from fastrack.attest._policy_common import Judge, Line, Revocation

_DRIVER = re.compile(r"\d{1,9}(?:\.\d{1,9})*")
_VBIOS = re.compile(r"[0-9a-fA-F]{1,8}(?:\.[0-9a-fA-F]{1,8})*")
_MODES = (GpuMode.SINGLE, GpuMode.MULTI, None)  # in these, no device beside the GPU sees plain data
_PINNED_DAYS = 30  # that a draft proposes
_ALL_OF_ONE = "Collect the evidence of all GPUs and switches of one machine; do not give the key to this one."


@public
@dataclass(frozen=True, slots=True)
class PinnedMeasurements:
    r"""The measurements of approved GPUs whose driver has no manifest of NVIDIA's.

    `digests` are SHA-384 values by index, all of which a GPU must have; `until` is the time from which they count no
    more.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import attest
    >>> pinned = attest.PinnedMeasurements(datetime(2027, 1, 31, tzinfo=UTC), {7: b"\1" * 48})
    >>> pinned.digests.keys()
    dict_keys([7])
    """

    until: datetime
    digests: Mapping[int, bytes] = field(hash=False)

    def __post_init__(self) -> None:
        if not self.digests:  # any GPU has all of none
            raise ValueError("expected digests= of one index or more, got none")


@public
@dataclass(frozen=True, slots=True)
class GpuPolicy:
    r"""The section ``[gpu]`` of a policy.

    Attributes
    ----------
    count : int or None
        The number of GPUs, without switches; None for one or more, and for 8 in protected PCIe mode.
    switch_count : int
        The number of switches in protected PCIe mode.
    architectures : frozenset of GpuArchitecture
        The generations that are accepted: "hopper", "blackwell", "nvswitch"; all if empty.
    chips : frozenset of str
        The chips that are accepted, such as "GH100"; all if empty.
    chip_ids : frozenset of str
        The devices that are accepted, by the serial numbers in their certificates, in hexadecimal; all if empty.
    min_driver : str or None
        The lowest version of the driver.
    min_vbios : mapping of str to str
        The lowest version of the VBIOS for each generation.
    modes : frozenset of GpuMode
        The confidential modes that are accepted: "SPT", "MPT", "PPCIE"; a GPU must report one of them. If empty, "SPT",
        "MPT" and GPUs that report none. In protected PCIe mode ("PPCIE"), all GPUs must be in it, and GPUs and switches
        must name each other, and no others, as those that they are linked to.
    require_manifests : bool
        Whether the measurements must have been compared with NVIDIA's reference manifests. Without that, a GPU in
        dev-tools mode, which others can read, is not told from one in confidential mode.
    measurements : mapping of str to PinnedMeasurements
        The measurements of approved GPUs by chip, driver and VBIOS, such as "GH100 610.10.01 96.00.9F.00.01". They
        stand for NVIDIA's manifest of a driver where that is absent, and for nothing where it is there.
    revocation : Revocation
        How much is asked about the revocation of the certificates of devices and manifests.
    max_revocation_age : datetime.timedelta
        The longest time since the oldest OCSP response, if one is required.
    require : str or None
        On which GPUs a process may use the keys that are released: "confidential" for those in confidential mode,
        "proved" for those of the offer only. By default nothing is asked once a key is released.

    Examples
    --------
    >>> from fastrack import attest
    >>> policy = attest.Policy.from_toml("version = 1\n[gpu]\ncount = 8\nmin_driver = '550.90.07'")
    >>> policy.gpu.count, policy.gpu.min_driver, policy.gpu.require_manifests
    (8, '550.90.07', True)
    """

    count: int | None = None
    switch_count: int = 4
    architectures: frozenset[GpuArchitecture] = frozenset()
    chips: frozenset[str] = frozenset()
    chip_ids: frozenset[str] = frozenset()
    min_driver: str | None = None
    min_vbios: Mapping[str, str] = field(default_factory=dict, hash=False)
    modes: frozenset[GpuMode] = frozenset()
    require_manifests: bool = True
    revocation: Revocation = Revocation.CACHED
    max_revocation_age: timedelta = timedelta(days=1)
    require: str | None = None
    measurements: Mapping[str, PinnedMeasurements] = field(default_factory=dict, hash=False)


def read_gpu(table: Table) -> GpuPolicy:
    """Read the section ``[gpu]``."""
    policy = GpuPolicy(**table.read_all(_FIELDS), min_vbios=table.section("min_vbios", _FLOORS))
    table.done()
    return policy


def check_gpus(policy: GpuPolicy, devices: Sequence[VerifiedGpuReport | MatchedGpuReport], judge: Judge) -> None:
    """Require that verified devices are ones that a policy accepts, and that no device is there twice."""
    reports = [report_of(device) for device in devices]
    gpus = sum(not report.is_switch for report in reports)
    if gpus != (policy.count or max(gpus, 1)):
        judge.refuse("number of GPUs", str(policy.count or "one or more"), gpus, "count")
    _require_distinct(reports, judge)
    for device, report in zip(devices, reports, strict=True):
        _check_device(policy, report, judge.of(report.evidence))
        _check_manifests(policy, device, judge.of(report.evidence))
    if any(report.mode is GpuMode.PROTECTED_PCIE for report in reports):
        _require_topology(policy, reports, judge)


def _require_distinct(reports: Iterable[VerifiedGpuReport], judge: Judge) -> None:
    seen: dict[str, str] = {}
    for report in reports:
        if report.chip_id in seen:
            found = f"that of {seen[report.chip_id]}, {report.chip_id}"
            advice = "Ask each device for its own report; one was asked twice."
            judge.note(refused(report.evidence, "chip id", wanted="one of its own", found=found, advice=advice))
        seen[report.chip_id] = report.evidence


def _require_topology(policy: GpuPolicy, reports: Sequence[VerifiedGpuReport], judge: Judge) -> None:
    """Require that GPUs in protected PCIe mode, and the switches that they trust with plain data, are one machine."""
    ids: dict[bool, set[str]] = {False: set(), True: set()}
    for report in reports:
        ids[report.is_switch].add(report.chip_id)
        if not report.is_switch and report.mode is not GpuMode.PROTECTED_PCIE:
            wanted, mode = "PPCIE, as other GPUs have", report.mode or "none"
            judge.of(report.evidence).refuse("confidential mode", wanted, mode, None)
    counts = (
        ("GPUs", ids[False], policy.count or 8, "count"),
        ("switches", ids[True], policy.switch_count, "switch_count"),
    )
    for what, devices, count, key in counts:
        if len(devices) != count:
            judge.refuse(f"number of {what}", f"{count} in protected PCIe mode", len(devices), key)
    for report in reports:
        others = ids[not report.is_switch]
        # The switches' lists are compared with the GPUs' own certificates too: GPUs that stand elsewhere can name them.
        if report.linked_to != others:
            wanted, found = (", ".join(sorted(some)) or "none" for some in (others, report.linked_to))
            judge.note(refused(report.evidence, "links", wanted=wanted, found=found, advice=_ALL_OF_ONE))
        if report.is_switch and not report.is_locked:
            judge.of(report.evidence).refuse("lock", "a locked switch", "an open one", None)


def draft_gpus(devices: Sequence[VerifiedGpuReport | MatchedGpuReport]) -> Iterator[Line]:
    """Draft the section ``[gpu]`` that accepts only these devices."""
    reports = [report_of(device) for device in devices]
    gpus = [report for report in reports if not report.is_switch]
    if gpus:
        yield Line("count", len(gpus), "GPUs")
    if len(gpus) < len(reports):
        yield Line("switch_count", len(reports) - len(gpus), "NVSwitches")
    architectures = {report.architecture for report in reports}
    yield Line("architectures", architectures, "generations")
    yield Line("chips", {report.chip for report in reports}, "chips")
    covers = "only these devices; leave it out for others like them"
    yield Line("chip_ids", {report.chip_id for report in reports}, covers)
    names = ", ".join(sorted({name for report in reports for name in report.rim_ids}))
    drivers = {report.driver_version for report in gpus if report.driver_version}
    if unordered := sorted(version for version in drivers if not _DRIVER.fullmatch(version)):
        yield Line("min_driver", unordered[0], "driver, a version that no other can be compared with", is_open=True)
    elif drivers:
        lowest = min(drivers, key=lambda version: _numbers(version, _DRIVER))
        yield Line("min_driver", lowest, f"driver; the manifests of driver and firmware are {names}")
    floors = {
        str(kind): min(
            (report.vbios_version for report in reports if report.architecture is kind),
            key=lambda version: _numbers(version, _VBIOS),
        )
        for kind in sorted(architectures)
    }
    yield Line("min_vbios", floors, "firmware of each generation")
    modes = {report.mode for report in gpus}
    if None not in modes:
        plain = "; NVLINK IS PLAIN in it" if GpuMode.PROTECTED_PCIE in modes else ""
        yield Line("modes", modes, f"confidential mode{plain}")
    matched = all(isinstance(device, MatchedGpuReport) for device in devices)
    covers = "comparison of all measurements with NVIDIA's reference manifests"
    yield Line("require_manifests", matched, covers, not matched)
    yield from _draft_measurements(devices)
    rims = [rim for device in devices if isinstance(device, MatchedGpuReport) for rim in device.rims]
    dates = [*(report.revocation_checked_at for report in reports), *(rim.revocation_checked_at for rim in rims)]
    yield rules.draft_revocation(None if None in dates else dates[0])


def _check_device(policy: GpuPolicy, report: VerifiedGpuReport, judge: Judge) -> None:
    is_switch = report.is_switch
    judge.require_current(report.verified_at, report.valid_until)
    judge.require_listed("architecture", report.architecture, policy.architectures, "architectures")
    judge.require_listed("chip", report.chip, policy.chips, "chips")
    judge.require_listed("chip id", report.chip_id.upper(), policy.chip_ids, "chip_ids")
    if not is_switch:
        judge.require("confidential mode", report.mode, policy.modes or _MODES, "modes")
    if policy.min_driver and not is_switch:
        _require_version(judge, "driver version", report.driver_version, policy.min_driver, _DRIVER, "min_driver")
    if lowest := policy.min_vbios.get(report.architecture):
        key = f"min_vbios.{report.architecture}"
        _require_version(judge, "VBIOS version", report.vbios_version, lowest, _VBIOS, key)
    judge.require_revocation(policy.revocation, report.revocation_checked_at, policy.max_revocation_age)


def _check_manifests(policy: GpuPolicy, device: VerifiedGpuReport | MatchedGpuReport, judge: Judge) -> None:
    if (pinned := find_pinned(policy, device)) is not None:
        _check_pinned(pinned, report_of(device), judge)
        return
    if not isinstance(device, MatchedGpuReport):
        if policy.require_manifests:
            found = f"ones of {_name_firmware(report_of(device))!r} that were not"  # the name to pin them by
            wanted = "ones that were compared with reference manifests"
            advice = (
                "Fetch the manifests (`fastrack attest fetch`), and verify the offer with that folder (--collateral, "
                "collateral=); or pass match_measurements those that the report names."
            )
            judge.refuse("measurements", wanted, found, "require_manifests", advice)
        return
    judge = judge.of(f"reference manifest of the {judge.evidence}")
    for rim in device.rims:
        judge.require_current(rim.verified_at, rim.valid_until)
        judge.require_revocation(policy.revocation, rim.revocation_checked_at, policy.max_revocation_age)


def find_pinned(policy: GpuPolicy, device: VerifiedGpuReport | MatchedGpuReport) -> PinnedMeasurements | None:
    """Return the measurements that stand for a manifest; None if that was there, or the policy has none."""
    return None if isinstance(device, MatchedGpuReport) else policy.measurements.get(_name_firmware(device))


def _check_pinned(pinned: PinnedMeasurements, report: VerifiedGpuReport, judge: Judge) -> None:
    if judge.now >= pinned.until:
        advice = "Fetch NVIDIA's manifest (`fastrack attest fetch`); if there is none yet, draft the policy again."
        wanted, found = "ones that are pinned until a later time", f"ones until {pinned.until.isoformat()}"
        judge.refuse("measurements", wanted, found, "measurements", advice)
    measured = dict(enumerate(report.measurements))
    if different := [index for index, digest in pinned.digests.items() if measured.get(index) != digest]:
        wanted = f"the pinned values at all of {len(pinned.digests)} indexes"
        found = f"{len(different)} others, at {', '.join(map(str, sorted(different)[:8]))}"
        judge.refuse("measurements", wanted, found, "measurements")


def _name_firmware(report: VerifiedGpuReport) -> str:
    """Return the name by which a policy has measurements: chip, driver if there is one, and VBIOS."""
    return " ".join(filter(None, (report.chip, report.driver_version, report.vbios_version)))


def _draft_measurements(devices: Iterable[VerifiedGpuReport | MatchedGpuReport]) -> Iterator[Line]:
    """Draft the measurements of devices without manifests: those that all of the same firmware have in common."""
    groups: dict[str, list[VerifiedGpuReport]] = {}
    for device in devices:
        if not isinstance(device, MatchedGpuReport):
            groups.setdefault(_name_firmware(device), []).append(device)
    values = {}
    for name, reports in groups.items():
        common = set.intersection(*(set(enumerate(report.measurements)) for report in reports))
        until = reports[0].verified_at + timedelta(days=_PINNED_DAYS)
        values[name] = {"until": f"{until:%Y-%m-%d}", "digests": dict(sorted(common))}
    if values:
        covers = (
            "measurements of these devices, IF YOU APPROVED THEM BY OTHER MEANS: they stand for manifests that NVIDIA "
            "has not published, until that day"
        )
        yield Line("measurements", values, covers, is_open=True)


def _require_version(judge: Judge, name: str, found: str | None, lowest: str, form: re.Pattern[str], key: str) -> None:
    """Require a version of numbers with points between them, each of which counts more than those after it."""
    if found is None or not form.fullmatch(found) or _numbers(found, form) < _numbers(lowest, form):
        judge.refuse(name, f"at least {lowest}", found or "none", key)


def _numbers(version: str, form: re.Pattern[str]) -> tuple[int, ...]:
    return tuple(int(part, 16 if form is _VBIOS else 10) for part in version.split("."))


# Reading.


def _version(form: re.Pattern[str]) -> Field[str]:
    return text(form.pattern, "a version, such as 550.90.07 of a driver or 96.00.9F.00.01 of a VBIOS")


def _read_day(value: object) -> datetime:
    try:
        return datetime.strptime(TEXT.read(value), "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise FieldError("a day, such as 2027-01-31", "another text") from None


def _read_digests(value: object) -> Mapping[int, bytes]:
    found = mapping(text(r"0|[1-9][0-9]{0,2}", "the index of a measurement"), hexadecimal(DIGEST_SIZE)).read(value)
    if not found:
        raise FieldError("digests by the indexes of measurements", "none")
    return {int(index): digest for index, digest in found.items()}


_PINNED: Fields = {"until": Field(_read_day), "digests": Field(_read_digests)}
_COUNT = integer(1)
_SERIAL = text(r"[0-9A-Fa-f]{1,64}", "a serial number in hexadecimal")
_FIELDS: Fields = {
    "count": _COUNT,
    "switch_count": _COUNT,
    "architectures": words_of(GpuArchitecture),
    "chips": TEXTS,
    "chip_ids": filled(Field(lambda value: _SERIAL.read(value).upper()), "serial numbers in hexadecimal"),
    "min_driver": _version(_DRIVER),
    "modes": words_of(GpuMode),
    "require_manifests": BOOLEAN,
    "revocation": word_of(Revocation),
    "max_revocation_age_days": rules.AGE.of("max_revocation_age"),
    "require": one_of("confidential", "proved"),
    "measurements": mapping(TEXT, record(PinnedMeasurements, _PINNED)),
}
_FLOORS = {name.value: _version(_VBIOS) for name in GpuArchitecture}
