"""Collect evidence of the machine that this runs on: its CPU by Linux configfs-tsm, its GPUs by NVML."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from fastrack._util.public import public
from fastrack.attest._cpu.kind import LARGEST, cpu_error
from fastrack.attest._device_collateral import DeviceCollateral
from fastrack.attest._gpus.evidence import GpuMode, read_claims
from fastrack.attest._kinds import CPU_KINDS
from fastrack.attest._offer import DeviceEvidence, MachineEvidence, OfferBinding
from fastrack.attest._switches import collect_switches
from fastrack.errors import AttestationError, DeviceError, FormatError

TSM_ROOT = "/sys/kernel/config/tsm/report"


@public
def collect_evidence(
    binding: OfferBinding,
    *,
    root: str | os.PathLike[str] = TSM_ROOT,
    collateral: str | os.PathLike[str] | None = None,
    nvml: Any = None,
    gpus: bool | None = None,
    switches: bool | None = None,
) -> MachineEvidence:
    """Collect evidence of this machine, which is bound to a challenge and a public key.

    The GPUs are asked first, each with a nonce of its own, then the NVSwitches likewise, by NVIDIA's program nvattest,
    and then the CPU, whose evidence covers theirs.

    Parameters
    ----------
    binding : OfferBinding
        The values that the evidence must have.
    root : path-like
        The folder of configfs-tsm.
    collateral : path-like, optional
        A folder of collateral. It may have ``tdx.json``, as `TdxCollateral.from_json` reads it; of SEV-SNP the
        certificate ``vcek.der`` or ``vlek.der``, its issuers ``cert_chain.pem``, and the root's revocation list
        ``crl.der``; and the folders ``rim`` of NVIDIA's reference manifests and ``ocsp`` of OCSP responses for devices
        and manifests, in DER, of which the files that fit a device are sent.
    nvml : module, optional
        `pynvml`, or a module like it.
    gpus : bool, optional
        True if there must be GPUs in confidential mode, False if they are not asked. By default they are asked if the
        driver is there.
    switches : bool, optional
        True if there must be NVSwitches, False if they are not asked. By default they are asked if a GPU reports
        protected PCIe, where GPUs send each other data unencrypted through them.

    Raises
    ------
    DeviceError
        If the machine, its kernel, a driver, a GPU or a switch cannot give evidence, or nvattest is not installed; the
        message says what is missing.
    FormatError, OSError
        If a file of collateral is malformed, or cannot be read.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import attest
    >>> challenge = attest.Challenge.generate(now=datetime(2026, 6, 1, tzinfo=UTC))
    >>> attest.make_offer(challenge, lambda binding: attest.collect_evidence(binding, root="/none", gpus=False))
    Traceback (most recent call last):
        ...
    fastrack.DeviceError: collecting evidence of the CPU failed: expected the folder /none, got none. Run this in a ...
    """
    folder = None if collateral is None else Path(collateral)
    store = DeviceCollateral(folder)
    devices = () if gpus is False else _collect_gpus(binding, nvml, store, needed=gpus is True)
    if switches or (switches is None and any(map(_is_protected, devices))):
        found = collect_switches(lambda number: binding.device_nonce(len(devices) + number))
        devices += tuple(map(store.complete, found))
    report, name, certificates = read_tsm_report(binding.report_data(devices), root=root)
    kind = CPU_KINDS[name]
    evidence = kind.collect(report, certificates)
    return MachineEvidence(evidence if folder is None else kind.complete(evidence, folder), devices)


# The CPU.


def read_tsm_report(report_data: bytes, *, root: str | os.PathLike[str]) -> tuple[bytes, str, bytes]:
    """Ask the kernel for evidence of the CPU about 64 bytes, and return it with the name of its kind and its `auxblob`.

    The latter has certificates of the host, and is empty where it hands out none.

    Raise `DeviceError` if the kernel cannot give it, or another process used the same entry meanwhile.
    """
    with _open_entry(Path(root), "exchange") as entry:
        provider = (entry / "provider").read_text()
        before = _read_generation(entry)
        (entry / "inblob").write_bytes(report_data)
        with (entry / "outblob").open("rb") as file:
            report = file.read(LARGEST + 1)
        certificates = _read_auxblob(entry)
        after = _read_generation(entry)
    if before is not None and after != before + 1:
        raise cpu_error("one request at a time", f"{(after or 0) - before} of them", "Try again.")
    kind = _kind_of(provider)
    if not 0 < len(report) <= LARGEST:
        raise cpu_error("a report of up to 1 MiB", f"{len(report)} bytes", "Look into the kernel's log.")
    return report, kind, certificates


def read_tsm_provider(root: str | os.PathLike[str]) -> str:
    """Ask the kernel for the name of the kind of evidence that the CPU gives, and for no evidence."""
    with _open_entry(Path(root), "doctor") as entry:
        return _kind_of((entry / "provider").read_text())


@contextlib.contextmanager
def _open_entry(folder: Path, name: str) -> Iterator[Path]:
    """Make an entry for a request, and remove it. An OSError becomes a DeviceError."""
    if not folder.is_dir():
        modules = " or ".join(kind.provider for kind in CPU_KINDS.values())
        raise cpu_error(
            f"the folder {folder}",
            "none",
            "Run this in a confidential virtual machine, with Linux 6.7 or later, configfs mounted, and the module "
            f"{modules} loaded.",
        )
    entry = folder / name
    try:
        with contextlib.suppress(FileExistsError):  # of a process that was killed
            entry.mkdir()
        try:
            yield entry
        finally:
            with contextlib.suppress(OSError):
                entry.rmdir()
    except OSError as error:
        advice = "Run this as root, in a confidential virtual machine whose hypervisor can give quotes; then try again."
        raise cpu_error(f"a report at {entry}", error.strerror or type(error).__name__, advice) from error


def _kind_of(provider: str) -> str:
    providers = {kind.provider: name for name, kind in CPU_KINDS.items()}
    provider = provider.strip()
    if provider not in providers:
        wanted = f"one of the providers {', '.join(providers)}"
        raise cpu_error(wanted, f"{provider:.40}", "Other kinds of machines are not supported.")
    return providers[provider]


def _read_auxblob(entry: Path) -> bytes:
    try:
        with (entry / "auxblob").open("rb") as file:
            return file.read(LARGEST)
    except OSError:  # as of providers without one
        return b""


def _read_generation(entry: Path) -> int | None:
    """Return the number of writes to an entry; None if the kernel does not count them."""
    try:
        return int((entry / "generation").read_text())
    except FileNotFoundError:
        return None


# GPUs.


def _collect_gpus(
    binding: OfferBinding, nvml: Any, store: DeviceCollateral, *, needed: bool
) -> tuple[DeviceEvidence, ...]:
    nvml = nvml or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        absent = error.value in {nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED}
        if absent and not needed:
            return ()
        advice = "Install the driver and load its modules, or collect without GPUs."
        raise _gpu_error("NVIDIA's driver", str(error), advice) from None
    try:
        count = nvml.nvmlDeviceGetCount()
        if needed and not count:
            raise _gpu_error("one GPU or more", "none", "Attach a GPU in confidential mode to the virtual machine.")
        return tuple(_collect_gpu(binding, nvml, store, index) for index in range(count))
    except nvml.NVMLError as error:
        raise _gpu_error("the number of GPUs", str(error), "Look into the kernel's log.") from None
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _collect_gpu(binding: OfferBinding, nvml: Any, store: DeviceCollateral, index: int) -> DeviceEvidence:
    gpu = f"GPU {index}"  # which of eight it is, where one of them fails
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        with contextlib.suppress(nvml.NVMLError):
            gpu += f" ({nvml.nvmlDeviceGetName(handle)})"
        answer = nvml.nvmlDeviceGetConfComputeGpuAttestationReport(handle, binding.device_nonce(index))
        report = bytes(answer.attestationReport[: answer.attestationReportSize])
        certificates = nvml.nvmlDeviceGetConfComputeGpuCertificate(handle)
        chain = bytes(certificates.attestationCertChain[: certificates.attestationCertChainSize])
        chain = chain.rstrip(b"\0")  # NVML counts the end of the string
        return store.complete(DeviceEvidence(report, chain))
    except (nvml.NVMLError, AttributeError) as error:
        advice = "It needs confidential mode, a GPU of the generation Hopper or later, and a driver from 550 on."
        raise _gpu_error(f"an attestation report of {gpu}", str(error), advice) from None
    except (FormatError, AttestationError) as error:
        advice = "Reset this GPU, or collect without it."
        raise _gpu_error(f"a report of {gpu} with its certificates", f"another answer ({error})", advice) from None


def _is_protected(gpu: DeviceEvidence) -> bool:
    return read_claims(gpu.report, gpu.chain).get("mode") == GpuMode.PROTECTED_PCIE


def _gpu_error(wanted: str, found: str, advice: str) -> DeviceError:
    return DeviceError(f"collecting evidence of the GPUs failed: expected {wanted}, got {found}. {advice}")
