"""Verify attestation reports of NVIDIA's GPUs and NVSwitches with the devices' certificates."""

import hmac
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum

from fastrack._util.public import public
from fastrack.attest._errors import malformed, refused
from fastrack.attest._formats.ocsp import check_revocation
from fastrack.attest._formats.roots import NVIDIA_ROOTS, Roots
from fastrack.attest._formats.signatures import P384
from fastrack.attest._formats.x509 import load_chain, subject_name, verify_chain
from fastrack.attest._gpus.identity import GpuArchitecture, read_identity, read_serial
from fastrack.attest._gpus.report import EVIDENCE, NONCE_SIZE, GpuReport, OpaqueField, parse_gpu_report

_LATEST_VERSION = 1  # of the opaque data
_VBIOS_SIZE = 8
_ID_SIZE = 8  # of a PCIe device id (PDI), the end of the chip id
_GPU_IDS = 64  # bytes of ids in a switch's list, before the numbers of ports
_ENABLED, _DISABLED = b"\xaa", b"\x55"
_SWITCH_BOARD = "5612_0002_890"  # project, SKU and chip SKU of all LS10 boards, which their reports lack
_AGAIN = "Ask the device for a report with the nonce of this challenge."


@public
class GpuMode(StrEnum):
    """The confidential mode that a GPU reports.

    ``SINGLE`` (SPT): one GPU in one virtual machine. ``MULTI`` (MPT): several GPUs, with encrypted NVLink.
    ``PROTECTED_PCIE`` (PPCIE): several GPUs of the Hopper generation, whose NVLinks and switches are trusted and plain.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.GpuMode("SPT") is attest.GpuMode.SINGLE
    True
    """

    SINGLE = "SPT"
    MULTI = "MPT"
    PROTECTED_PCIE = "PPCIE"


@public
@dataclass(frozen=True, slots=True)
class VerifiedGpuReport:
    """A report that a device of NVIDIA signed for a given nonce, whose certificates lead to a pinned root.

    The report is proved, not judged: an outdated or altered driver has valid reports too. Measurements mean nothing
    until `match_measurements` has compared them with NVIDIA's reference manifests. The report alone does not
    distinguish confidential mode from dev-tools mode: NVIDIA derives "debugging disabled" from matching measurements,
    and the driver (NVML) states it inside a virtual machine whose own evidence covers the driver.

    Attributes
    ----------
    evidence : str
        The name of this report for errors, such as "GPU 3 report".
    architecture : GpuArchitecture
        The generation, by certificate names.
    model, chip : str
        The name of the device in its certificate, such as "GH100 A01 GSP BROM", NVIDIA's claim ``hwmodel``; and the
        chip, such as "GH100", by the report or else the certificate: the product in reference manifests.
    chip_id : str
        The serial number in the name of the device's certificate, in hexadecimal. It never changes.
    ueid : int
        The serial number of the signing key's certificate, which changes with firmware; NVIDIA's claim ``ueid``.
    project, project_sku, chip_sku : str or None
        The board; None for switches.
    driver_version, vbios_version : str
        Versions of the driver, None for switches, and of the VBIOS, or of the BIOS of a switch.
    mode : GpuMode or None
        The confidential mode, by the feature flag or the status of protected PCIe; None for switches, and for firmware
        that reports neither.
    linked_to : frozenset of str
        The chip ids of the devices at the other ends of its NVLinks: of switches for a GPU, of GPUs for a switch.
    is_locked, is_pcie_protected, is_nvdec_enabled : bool or None
        Whether a switch is locked, so that its links do not change, None for GPUs; whether a GPU reports protected
        PCIe, None if unknown; and whether the first video decoder is on, without which its measurement has no
        reference value, None for switches.
    fwid, nonce : bytes
        The digest of the signing key's firmware, by the certificate, 48 bytes; and the nonce of the report's request.
    measurements : tuple of bytes
        SHA-384 digests by index, from 0 as in manifests.
    verified_at, revocation_checked_at, valid_until : datetime.datetime
        See `fastrack.attest`.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.VerifiedGpuReport.__match_args__[:6]
    ('evidence', 'architecture', 'model', 'chip', 'chip_id', 'ueid')
    """

    evidence: str
    architecture: GpuArchitecture
    model: str
    chip: str
    chip_id: str
    ueid: int
    project: str | None
    project_sku: str | None
    chip_sku: str | None
    driver_version: str | None
    vbios_version: str
    mode: GpuMode | None
    linked_to: frozenset[str]
    is_locked: bool | None
    is_pcie_protected: bool | None
    is_nvdec_enabled: bool | None
    fwid: bytes
    nonce: bytes
    measurements: tuple[bytes, ...]
    verified_at: datetime
    revocation_checked_at: datetime | None
    valid_until: datetime

    @property
    def is_switch(self) -> bool:
        """True for an NVSwitch."""
        return self.architecture is GpuArchitecture.NVSWITCH

    @property
    def rim_ids(self) -> tuple[str, ...]:
        """The ids of the reference manifests in NVIDIA's service: driver and VBIOS, or a switch's BIOS."""
        firmware = self.vbios_version.replace(".", "").upper()
        if self.is_switch:
            return (f"NV_SWITCH_BIOS_{_SWITCH_BOARD}_{firmware}",)
        kind = "DRIVER" if self.architecture is GpuArchitecture.HOPPER else "CC_DRIVER"
        board = f"{self.project}_{self.project_sku}_{self.chip_sku}"
        return f"NV_GPU_{kind}_{self.chip}_{self.driver_version}", f"NV_GPU_VBIOS_{board}_{firmware}"


@public
def verify_gpu_report(
    report: GpuReport | bytes,
    chain: bytes,
    *,
    nonce: bytes,
    now: datetime,
    roots: Roots = NVIDIA_ROOTS,
    ocsp: Collection[bytes] | None = None,
    evidence: str = EVIDENCE,
) -> VerifiedGpuReport:
    """Verify a report of a GPU or NVSwitch, offline.

    Checks that the key of the first certificate signed the report; that the five certificates lead through the device
    and its provisioning authority to the root, and are of one chip; that the nonce matches; and that the report and the
    certificate name the same firmware. `fastrack.attest` describes other parameters and errors; `ocsp` is for the
    certificates between leaf and root.

    Parameters
    ----------
    report : GpuReport or bytes
        The report. A parsed one is parsed again.
    chain : bytes
        The five certificates in PEM, from ``nvmlDeviceGetConfComputeGpuCertificate``.
    nonce : bytes
        The nonce of the request for the report, 32 bytes; else a `ValueError`.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import attest
    >>> attest.verify_gpu_report(b"no report", b"", nonce=bytes(32), now=datetime(2026, 6, 1, tzinfo=UTC))
    Traceback (most recent call last):
        ...
    fastrack.FormatError: reading the GPU report failed: expected 11 as its SPDM version of the request at offset 0, ...
    """
    if len(nonce) != NONCE_SIZE:
        raise ValueError(f"expected nonce= with {NONCE_SIZE} bytes, got {len(nonce)}")
    parsed = parse_gpu_report(report.data if isinstance(report, GpuReport) else report)
    name = f"certificate chain of the {evidence}"
    verified = verify_chain(load_chain(chain, evidence=name), roots=roots, now=now, evidence=name)
    identity = read_identity(verified, evidence=name)
    P384.verify(verified.leaf.public_key(), parsed.signature, parsed.signed, evidence)
    if not hmac.compare_digest(parsed.nonce, nonce):
        raise refused(evidence, "nonce", wanted=bytes(nonce), found=parsed.nonce, advice=_AGAIN)
    reported = parsed.field(OpaqueField.FWID)
    if reported is not None and reported != identity.fwid:
        advice = "The report is not of the firmware that the certificate was issued for; ask for both again."
        raise refused(evidence, "firmware id", wanted=identity.fwid, found=reported, advice=advice)
    is_switch = identity.architecture is GpuArchitecture.NVSWITCH
    fields = ReportFields(parsed, is_switch=is_switch)
    device_id = parsed.field(OpaqueField.DEVICE_ID)
    expected = identity.chip_id[-2 * _ID_SIZE :].lower()
    if is_switch and (device_id is None or device_id.hex() != expected):
        raise refused(evidence, "device id", wanted=expected, found=device_id or "none", advice=_AGAIN)
    identity = replace(identity, chip=fields.text_or_none(OpaqueField.CHIP) or identity.chip)
    checked_at, valid_until = check_revocation(verified, ocsp, evidence=evidence, first=1)
    return VerifiedGpuReport(
        evidence=evidence,
        **asdict(identity),
        project=fields.board(OpaqueField.PROJECT),
        project_sku=fields.board(OpaqueField.PROJECT_SKU),
        chip_sku=fields.board(OpaqueField.CHIP_SKU),
        driver_version=fields.board(OpaqueField.DRIVER_VERSION),
        vbios_version=fields.vbios_version(),
        mode=fields.mode(),
        linked_to=fields.linked_to(),
        is_locked=parsed.field(OpaqueField.LOCK) == b"\1\0" if is_switch else None,
        is_pcie_protected=fields.switched_on(OpaqueField.PROTECTED_PCIE),
        is_nvdec_enabled=fields.switched_on(OpaqueField.NVDEC_STATUS),
        nonce=parsed.nonce,
        measurements=parsed.measurements,
        verified_at=now,
        revocation_checked_at=checked_at,
        valid_until=valid_until,
    )


_BOARD = OpaqueField.PROJECT, OpaqueField.PROJECT_SKU, OpaqueField.CHIP_SKU


def read_claims(report: bytes, chain: bytes) -> dict[str, str]:
    """Read what a report and its certificates claim, of which nothing is verified: anyone can write it."""
    certificates = load_chain(chain, evidence="certificate chain of a GPU")
    device = certificates[1 % len(certificates)]
    name = subject_name(device)
    is_switch = name.startswith("LS")
    fields = ReportFields(parse_gpu_report(report), is_switch=is_switch)
    claims = {
        "chip": fields.text_or_none(OpaqueField.CHIP) or name.split(" ")[0].replace("_", ""),
        "chip_id": read_serial(device, "certificate chain of a GPU"),
        "driver": None if is_switch else fields.text(OpaqueField.DRIVER_VERSION),
        "vbios": fields.vbios_version(),
        "mode": fields.mode(),
        "board": None if is_switch else "_".join(fields.text(number) for number in _BOARD),
    }
    return {name: str(value) for name, value in claims.items() if value is not None}


class ReportFields:
    """The decoded opaque data of a report."""

    def __init__(self, report: GpuReport, *, is_switch: bool) -> None:
        self._fields = dict(report.opaque)
        self._is_switch = is_switch
        self._version = int.from_bytes(self._fields.get(OpaqueField.VERSION, b""), "little")
        if self._version > _LATEST_VERSION:
            raise malformed(EVIDENCE, "version of the opaque data", None, wanted="0 or 1", found=self._version)

    def _require(self, number: OpaqueField) -> bytes:
        if number not in self._fields:
            wanted = f"field {int(number)} of the opaque data"
            raise malformed(EVIDENCE, number.label, None, wanted=wanted, found="none")
        return self._fields[number]

    def text(self, number: OpaqueField) -> str:
        """Decode printable ASCII that may end in zero bytes."""
        value = self._require(number).rstrip(b"\0")
        if not value or not value.isascii() or not value.decode().isprintable():
            raise malformed(EVIDENCE, number.label, None, wanted="printable ASCII", found=self._fields[number])
        return value.decode()

    def text_or_none(self, number: OpaqueField) -> str | None:
        """Decode an optional field like `text`."""
        return self.text(number) if number in self._fields else None

    def board(self, number: OpaqueField) -> str | None:
        """Decode a field like `text`. It is optional for switches, but not for GPUs."""
        return self.text_or_none(number) if self._is_switch else self.text(number)

    def vbios_version(self) -> str:
        """Decode the version of the firmware: text for switches, five numbers in eight bytes for GPUs."""
        number = OpaqueField.VBIOS_VERSION
        if self._is_switch:
            return self.text(number)
        value = self._require(number)
        if len(value) != _VBIOS_SIZE or any(value[5:]):
            raise malformed(EVIDENCE, number.label, None, wanted="5 bytes and 3 of zero", found=value)
        return ".".join(f"{part:02X}" for part in (*value[3::-1], value[4]))

    def mode(self) -> GpuMode | None:
        """Decode the feature flag, present from version 1 on, and the status of protected PCIe."""
        if self._is_switch:
            return None
        is_protected = bool(self.switched_on(OpaqueField.PROTECTED_PCIE))
        if self._version == 0:  # such as driver 570, which reports only the status
            return GpuMode.PROTECTED_PCIE if is_protected else None
        value = self._require(OpaqueField.FEATURE_FLAG)
        modes = list(GpuMode)
        flag = int.from_bytes(value, "little")
        if flag >= len(modes) or (modes[flag] is GpuMode.PROTECTED_PCIE) is not is_protected:
            wanted = "2 with protected PCIe on, else 0 or 1"
            raise malformed(EVIDENCE, "feature flag", None, wanted=wanted, found=flag)
        return modes[flag]

    def linked_to(self) -> frozenset[str]:
        """Decode the ids of the devices at the other ends of the NVLinks. Zeros mean a link is off."""
        number, kind, step = (
            (OpaqueField.LINKED_GPUS, "41", 1) if self._is_switch else (OpaqueField.DEVICE_ID, "50", -1)
        )
        value = self._fields.get(number, b"")
        ids = value[:_GPU_IDS] if self._is_switch else value
        if len(ids) % _ID_SIZE:
            raise malformed(EVIDENCE, number.label, None, wanted=f"ids of {_ID_SIZE} bytes", found=value)
        parts = (ids[start : start + _ID_SIZE][::step] for start in range(0, len(ids), _ID_SIZE))
        return frozenset(f"{kind}{part.hex().upper()}" for part in parts if any(part))

    def switched_on(self, number: OpaqueField) -> bool | None:
        """Decode a status: 0xAA for on, 0x55 for off."""
        value = self._fields.get(number)
        if value is None:
            return None
        if value not in {_ENABLED, _DISABLED}:
            raise malformed(EVIDENCE, number.label, None, wanted="aa or 55", found=value)
        return value == _ENABLED
