"""Compare the measurements of a device with its reference manifests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fastrack._util.public import public
from fastrack.attest._errors import refused
from fastrack.attest._gpus.evidence import VerifiedGpuReport
from fastrack.attest._gpus.rim import RimMeasurement, VerifiedRim

_NVDEC_INDEX = 35  # the first video decoder's firmware, without a value if the decoder is off
_FETCH = "Fetch the manifests (`fastrack attest fetch`), or those that VerifiedGpuReport.rim_ids names."
_SHOWN = 8  # indexes shown in a message


@public
@dataclass(frozen=True, slots=True)
class MatchedGpuReport:
    """A verified report whose measurements match its manifests, wherever these have values.

    Driver and firmware are then NVIDIA's releases, by NVIDIA's rule with debugging disabled. `rims` are the manifests
    of driver and VBIOS, or of a switch's BIOS. `matched` has the compared indexes, and `skipped` the active indexes
    that were not compared: 35, if the report says that the first video decoder is off.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.MatchedGpuReport.__match_args__
    ('report', 'rims', 'matched', 'skipped')
    """

    report: VerifiedGpuReport
    rims: tuple[VerifiedRim, ...]
    matched: tuple[int, ...]
    skipped: tuple[int, ...]

    @property
    def uncovered(self) -> tuple[int, ...]:
        """The indexes of the report without values in any manifest."""
        covered = {*self.matched, *self.skipped}
        return tuple(index for index in range(len(self.report.measurements)) if index not in covered)


def report_of(device: object) -> VerifiedGpuReport:
    """Return the report of a verified device. Raise `TypeError` for other values."""
    report = device.report if isinstance(device, MatchedGpuReport) else device
    if not isinstance(report, VerifiedGpuReport):
        name = type(device).__name__
        raise TypeError(f"expected VerifiedGpuReport or MatchedGpuReport, got {name}; verify the evidence first")
    return report


@public
def match_measurements(report: VerifiedGpuReport, rims: Iterable[VerifiedRim]) -> MatchedGpuReport:
    """Require that every measurement has one of the manifests' values, if there are any.

    Parameters
    ----------
    report : VerifiedGpuReport
        The report of a GPU or switch.
    rims : iterable of VerifiedRim
        The manifests for it, and no others: for a GPU by the versions of its driver and its VBIOS, for a switch by the
        version of its BIOS; all with the name of its chip. Manifests do not name boards: only the measurements exclude
        the manifests of another board with the same VBIOS.

    Raises
    ------
    AttestationError
        If a manifest is absent, or is for another device or version; if two manifests have values for one index; or
        if a measurement differs from all its values.
    TypeError
        If the report or a manifest was not verified.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.match_measurements(b"report", [])
    Traceback (most recent call last):
        ...
    TypeError: expected VerifiedGpuReport, got bytes; verify it first, with verify_gpu_report
    """
    if not isinstance(report, VerifiedGpuReport):
        raise TypeError(
            f"expected VerifiedGpuReport, got {type(report).__name__}; verify it first, with verify_gpu_report"
        )
    versions = [report.vbios_version] if report.is_switch else [report.driver_version, report.vbios_version]
    return _match(report, tuple(rims), versions)


def match_firmware(report: VerifiedGpuReport, rims: Iterable[VerifiedRim]) -> VerifiedGpuReport:
    """Require what the manifest of a GPU's VBIOS says, where that of its driver is absent.

    The report is returned, and not as matched: a policy has to know all its measurements by itself.
    """
    matched = _match(report, tuple(rims), [report.vbios_version])
    return replace(report, valid_until=min(report.valid_until, *(rim.valid_until for rim in matched.rims)))


def _match(
    report: VerifiedGpuReport, rims: tuple[VerifiedRim, ...], versions: Sequence[str | None]
) -> MatchedGpuReport:
    """Compare a report with one manifest for each of these versions."""
    for rim in rims:
        if not isinstance(rim, VerifiedRim):
            raise TypeError(f"expected VerifiedRim, got {type(rim).__name__}; verify it first, with verify_rim")
    assigned = _assign(report, rims, versions)
    active = _merge(report, assigned)
    skipped = {_NVDEC_INDEX} & active.keys() if report.is_nvdec_enabled is False else set()
    compared = sorted(active.keys() - skipped)
    measured = dict(enumerate(report.measurements))
    different = [index for index in compared if measured.get(index) not in active[index].values]
    if different:
        names = ", ".join(f"{index} ({active[index].name})" for index in different[:_SHOWN])
        raise refused(
            report.evidence,
            "measurements",
            wanted=f"reference values at all of {len(compared)} indexes",
            found=f"{len(different)} others, at {names}{', ...' if len(different) > _SHOWN else ''}",
            advice="Fetch the newest revision of the manifests (`fastrack attest fetch --refresh`, or by "
            "VerifiedGpuReport.rim_ids). If it differs too, do "
            "not trust this device: it runs another driver or firmware, or one in a mode for debugging.",
        )
    return MatchedGpuReport(report, assigned, tuple(compared), tuple(sorted(skipped)))


def _assign(
    report: VerifiedGpuReport, rims: Sequence[VerifiedRim], versions: Sequence[str | None]
) -> tuple[VerifiedRim, ...]:
    """Find the manifest for each part of the firmware, and refuse others."""
    edition = "SWITCH" if report.is_switch else "GPU"
    passed = ", ".join(f"{rim.rim.edition} {rim.rim.product} {rim.rim.version}" for rim in rims) or "none"
    wanted = ", ".join(f"{edition} {report.chip} {version}" for version in versions)
    assigned = []
    for version in versions:
        named = (edition, report.chip, str(version).upper())
        found = [rim for rim in rims if (rim.rim.edition, rim.rim.product, rim.rim.version.upper()) == named]
        # Exactly one for each version: two of the driver in parts would leave the VBIOS compared with nothing.
        if len(found) != 1 or len(rims) != len(versions):
            raise refused(report.evidence, "reference manifests", wanted=wanted, found=passed, advice=_FETCH)
        assigned += found
    return tuple(assigned)


def _merge(report: VerifiedGpuReport, rims: Sequence[VerifiedRim]) -> dict[int, RimMeasurement]:
    """Collect the active measurements. Every manifest must have some, and no index twice."""
    active: dict[int, RimMeasurement] = {}
    for rim in rims:
        new = {measurement.index: measurement for measurement in rim.rim.active}
        if not new or active.keys() & new.keys():
            found = f"index {min(active.keys() & new.keys())} in two manifests" if new else "a manifest without values"
            wanted = "values in each manifest, and each index in one of them"
            raise refused(report.evidence, "reference manifests", wanted=wanted, found=found, advice=_FETCH)
        active |= new
    return active
