"""Read a folder of collateral of GPUs and switches: ``rim/`` with manifests, ``ocsp/`` with responses in DER."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.x509 import ocsp as pyca_ocsp

from fastrack._util.rights import require_own
from fastrack.attest._cpu.kind import own_file, read_collateral
from fastrack.attest._cpu.tdx_collateral import TdxCollateral
from fastrack.attest._formats.x509 import load_certificate, load_chain, load_crl
from fastrack.attest._gpus.evidence import read_claims
from fastrack.attest._gpus.rim import Rim, open_signed
from fastrack.attest._offer import DeviceEvidence, ManifestEvidence
from fastrack.errors import FormatError


@dataclass(frozen=True, slots=True)
class _Manifest:
    """A manifest of a folder, with its id, which is the name of its file."""

    rim_id: str
    rim: Rim
    certificates: Sequence[x509.Certificate]

    def is_of(self, chip: str, version: str) -> bool:
        return (self.rim.product, self.rim.version.upper()) == (chip, version.upper())


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
                rim, chain = open_signed(data, evidence=f"manifest {path.name}")
                self._manifests.append(_Manifest(path.stem.upper(), rim, chain))

    def complete(self, device: DeviceEvidence) -> DeviceEvidence:
        """Take manifests for a device and responses for certificates in place of those that came with it.

        What the folder lacks stays as the machine sent it.
        """
        certificates = load_chain(device.chain, evidence="certificate chain of a GPU")
        claims = read_claims(device.report, device.chain)
        sent = [response for manifest in device.manifests for response in manifest.ocsp or ()]
        firmware = claims["vbios"].replace(".", "")
        wanted = {claims["vbios"]: f"NV_GPU_VBIOS_{claims.get('board')}_{firmware}"}  # the id, as boards share versions
        if "driver" in claims:
            wanted = {claims["driver"]: "", **wanted}
        found, lacking = [], []
        for version, rim_id in wanted.items():
            named = [one for one in self._manifests if one.rim_id == rim_id.upper()]
            own = named or [one for one in self._manifests if one.is_of(claims["chip"], version)]
            found += [ManifestEvidence(one.rim.data, self._find_responses(one.certificates, sent)) for one in own]
            if not own:
                lacking.append(version.upper())
        for manifest in device.manifests if lacking else ():
            rim, chain = open_signed(manifest.data, evidence="manifest of a GPU")
            if rim.version.upper() in lacking:
                found.append(replace(manifest, ocsp=self._find_responses(chain, manifest.ocsp)))
        return replace(device, manifests=tuple(found), ocsp=self._find_responses(certificates, device.ocsp))

    def _find_responses(
        self, certificates: Sequence[x509.Certificate], sent: Sequence[bytes] | None
    ) -> tuple[bytes, ...] | None:
        """Return the responses about certificates: for each the folder's, or else those that were sent."""
        serials = {certificate.serial_number for certificate in certificates}
        kept = [(numbers & serials, data) for numbers, data in self._responses if serials & numbers]
        covered = {number for numbers, _ in kept for number in numbers}
        others = [data for data in sent or () if not _serial_numbers(data) <= covered]
        found = (*(data for _, data in kept), *others)
        return found or None


def require_own_folder(folder: Path) -> None:
    """Raise KeyPermissionError if another user may replace a document: an older one revokes less."""
    for path in (folder, *folder.rglob("*")):
        require_own(path)


def check_folder(folder: Path) -> None:
    """Read each file of collateral, of CPUs as well, to find a damaged one before an offer needs it."""
    require_own_folder(folder)
    DeviceCollateral(folder)
    read_list = partial(load_crl, evidence="revocation list")
    readers: dict[str, Callable[[bytes], object]] = {
        ".json": TdxCollateral.from_json,
        ".pem": partial(load_chain, evidence="certificates"),
        ".der": partial(load_certificate, evidence="certificate"),
    }
    for path, data in _list(folder):
        read = read_list if path.name.startswith(("crl", "vlek-crl")) else readers.get(path.suffix)
        if read is not None:
            with own_file(path):
                read(data)


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
