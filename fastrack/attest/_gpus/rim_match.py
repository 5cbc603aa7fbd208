"""Compare the measurements of a device with those of its reference manifests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastrack._util.public import attest_public
from fastrack.attest._errors import refused
from fastrack.attest._gpus.evidence import VerifiedGpuReport
from fastrack.attest._gpus.rim import RimMeasurement, VerifiedRim

_NVDEC_INDEX = 35  # of the first video decoder's firmware, which has no value where the decoder is off
_FETCH = "Fetch the manifests that VerifiedGpuReport.rim_ids names."
_SHOWN = 8  # indexes that a message names


@attest_public
@dataclass(frozen=True, slots=True)
class MatchedGpuReport:
    """A verified report, all of whose measurements for which its manifests have values have one of these values.

    Driver and firmware are then as NVIDIA has released them, by NVIDIA's rule with debugging disabled. `rims` are the
    manifests of driver and VBIOS, or of a switch's BIOS. `matched` has the indexes that were compared, and `skipped`
    the active ones that were not: 35, if the report says that the first video decoder is off.

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
        """The indexes of the report for which no manifest has values."""
        covered = {*self.matched, *self.skipped}
        return tuple(index for index in range(len(self.report.measurements)) if index not in covered)


def report_of(device: object) -> VerifiedGpuReport:
    """Return the report of a device that was verified. Raise `TypeError` if it was not."""
    report = device.report if isinstance(device, MatchedGpuReport) else device
    if not isinstance(report, VerifiedGpuReport):
        found = type(device).__name__
        raise TypeError(f"expected VerifiedGpuReport or MatchedGpuReport, got {found}; verify the evidence first")
    return report


@attest_public
def match_measurements(report: VerifiedGpuReport, rims: Iterable[VerifiedRim]) -> MatchedGpuReport:
    """Require that every measurement for which the manifests have values has one of these values.

    Parameters
    ----------
    report : VerifiedGpuReport
        The report of a GPU or switch.
    rims : iterable of VerifiedRim
        The manifests for it, and no others: for a GPU one with the version of its driver and one with that of its
        VBIOS, for a switch one with that of its BIOS; all with the name of its chip. Manifests do not name boards: that
        those of another board with the same VBIOS are not accepted for this one is left to the measurements.

    Raises
    ------
    AttestationError
        If a manifest is absent, of another device or version, or has a value where another one has; or if a measurement
        has none of its values.
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
    rims = tuple(rims)
    if not isinstance(report, VerifiedGpuReport):
        raise TypeError(
            f"expected VerifiedGpuReport, got {type(report).__name__}; verify it first, with verify_gpu_report"
        )
    for rim in rims:
        if not isinstance(rim, VerifiedRim):
            raise TypeError(f"expected VerifiedRim, got {type(rim).__name__}; verify it first, with verify_rim")
    found = _assign(report, rims)
    active = _merge(report, found)
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
            advice="Fetch the newest revision of the manifests, by VerifiedGpuReport.rim_ids. If it differs too, do "
            "not trust this device: it runs another driver or firmware, or one in a mode for debugging.",
        )
    return MatchedGpuReport(report, found, tuple(compared), tuple(sorted(skipped)))


def _assign(report: VerifiedGpuReport, rims: Sequence[VerifiedRim]) -> tuple[VerifiedRim, ...]:
    """Find the manifest for each part of the firmware, and require that there are no others."""
    edition = "SWITCH" if report.is_switch else "GPU"
    versions = [report.vbios_version] if report.is_switch else [report.driver_version, report.vbios_version]
    given = ", ".join(f"{rim.rim.edition} {rim.rim.product} {rim.rim.version}" for rim in rims) or "none"
    wanted = ", ".join(f"{edition} {report.chip} {version}" for version in versions)
    found = [
        rim
        for version in versions
        for rim in rims
        if (rim.rim.edition, rim.rim.product, rim.rim.version.upper()) == (edition, report.chip, str(version).upper())
    ]
    if len(found) != len(versions) or len(rims) != len(versions):
        raise refused(report.evidence, "reference manifests", wanted=wanted, found=given, advice=_FETCH)
    return tuple(found)


def _merge(report: VerifiedGpuReport, rims: Sequence[VerifiedRim]) -> dict[int, RimMeasurement]:
    """Collect the active measurements, of which each manifest must have some, and no two the same."""
    active: dict[int, RimMeasurement] = {}
    for rim in rims:
        own = {measurement.index: measurement for measurement in rim.rim.active}
        if not own or active.keys() & own.keys():
            found = f"index {min(active.keys() & own.keys())} in two manifests" if own else "a manifest without values"
            wanted = "values in each manifest, and each index in one of them"
            raise refused(report.evidence, "reference manifests", wanted=wanted, found=found, advice=_FETCH)
        active |= own
    return active
