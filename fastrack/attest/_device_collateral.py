"""Read a folder of collateral of GPUs and switches: ``rim/`` with manifests, ``ocsp/`` with responses in DER."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cryptography import x509
from cryptography.x509 import ocsp as pyca_ocsp

from fastrack.attest._cpu.kind import own_file, read_collateral
from fastrack.attest._cpu.tdx_collateral import TdxCollateral
from fastrack.attest._formats.x509 import load_certificate, load_chain, load_crl, subject_name
from fastrack.attest._gpus.evidence import ReportFields
from fastrack.attest._gpus.report import OpaqueField, parse_gpu_report
from fastrack.attest._gpus.rim import open_signed
from fastrack.attest._offer import DeviceEvidence, ManifestEvidence
from fastrack.errors import FormatError


class DeviceCollateral:
    """The manifests and OCSP responses of a folder. What chooses them is not verified: they are."""

    def __init__(self, folder: Path | None) -> None:
        files = [] if folder is None else _list(folder / "ocsp")
        self._responses = []
        for path, data in files:
            with own_file(path):
                self._responses.append((_serial_numbers(data), data))
        self._manifests = []
        for path, data in [] if folder is None else _list(folder / "rim"):
            with own_file(path):
                rim, certificates = open_signed(data, evidence=f"manifest {path.name}")
            self._manifests.append((rim, ManifestEvidence(data, self._find_responses(certificates))))

    def complete(self, device: DeviceEvidence) -> DeviceEvidence:
        """Take manifests for a device and responses for its certificates in place of those that came with it.

        What the folder lacks stays as the machine sent it.
        """
        certificates = load_chain(device.chain, evidence="certificate chain of a GPU")
        name = subject_name(certificates[1 % len(certificates)])
        is_switch = name.startswith("LS")
        fields = ReportFields(parse_gpu_report(device.report), is_switch=is_switch)
        chip = fields.text_or_none(OpaqueField.CHIP) or name.split(" ")[0].replace("_", "")
        versions = [fields.vbios_version().upper()]
        if not is_switch:
            versions.insert(0, fields.text(OpaqueField.DRIVER_VERSION).upper())
        found = [
            manifest
            for version in versions
            for rim, manifest in self._manifests
            if (rim.product, rim.version.upper()) == (chip, version)
        ]
        ocsp = self._find_responses(certificates, device.ocsp)
        return replace(device, manifests=tuple(found) or device.manifests, ocsp=ocsp)

    def _find_responses(
        self, certificates: Sequence[x509.Certificate], sent: tuple[bytes, ...] | None = None
    ) -> tuple[bytes, ...] | None:
        """Return the responses about certificates: for each the folder's, or else those that were sent."""
        serials = {certificate.serial_number for certificate in certificates}
        kept = [(numbers & serials, data) for numbers, data in self._responses if serials & numbers]
        covered = {number for numbers, _ in kept for number in numbers}
        others = [data for data in sent or () if not _serial_numbers(data) <= covered]
        found = (*(data for _, data in kept), *others)
        return found or None


def check_folder(folder: Path) -> None:
    """Read each file of collateral, of CPUs as well, to find a damaged one before an offer needs it."""
    DeviceCollateral(folder)
    readers = {".json": TdxCollateral.from_json, ".pem": _read_chain, ".der": _read_certificate}
    for path, data in _list(folder):
        read = _read_list if path.name.startswith("crl") else readers.get(path.suffix)
        if read is not None:
            with own_file(path):
                read(data)


def _read_chain(data: bytes) -> object:
    return load_chain(data, evidence="certificates")


def _read_certificate(data: bytes) -> object:
    return load_certificate(data, evidence="certificate")


def _read_list(data: bytes) -> object:
    return load_crl(data, evidence="revocation list")


def _list(folder: Path) -> list[tuple[Path, bytes]]:
    if not folder.is_dir():
        return []
    paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return [(path, data) for path in paths if (data := read_collateral(path)) is not None]


def _serial_numbers(data: bytes) -> set[int]:
    try:
        return {single.serial_number for single in pyca_ocsp.load_der_ocsp_response(data).responses}
    except ValueError as error:
        raise FormatError(f"reading an OCSP response failed: expected one in DER, got {error}.") from None
