"""Evidence of this machine, from stand-ins of the kernel and of NVML."""

# ruff: noqa: N802
import os
import threading
from types import SimpleNamespace

import pytest
from helpers.foundry import nvidia, tdx
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots

import fastrack
from fastrack import DeviceError, attest
from fastrack.attest._collect import read_tsm_report


class Kernel:
    """A folder like that of configfs-tsm: a report appears when it is read, after its input was written."""

    def __init__(self, root, machine, *, provider="tdx_guest", generation=None):
        self.root, self.machine = root, machine
        self.entry = root / "exchange"
        self.entry.mkdir(parents=True)
        (self.entry / "provider").write_text(f"{provider}\n")
        if generation is not None:
            (self.entry / "generation").write_text(f"{generation[0]}\n")
        self.generation = generation
        os.mkfifo(self.entry / "outblob")
        self.thread = threading.Thread(target=self.answer, daemon=True)
        self.thread.start()

    def answer(self):
        with (self.entry / "outblob").open("wb") as file:  # until it is opened for reading
            evidence = self.machine.prove((self.entry / "inblob").read_bytes())
            if self.generation is not None:
                (self.entry / "generation").write_text(f"{self.generation[1]}\n")
            file.write(evidence.quote if isinstance(evidence, attest.TdxEvidence) else evidence.report)


class Error(Exception):
    value = 3

    def __str__(self):
        return "Not Supported"


class Nvml:
    """A module like pynvml."""

    NVMLError = Error
    NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED = 12, 9

    def __init__(self, machine, *, missing=None, unsupported=False):
        self.machine, self.missing, self.unsupported = machine, missing, unsupported
        self.inits = 0

    def nvmlInit(self):
        if self.missing:
            error = Error()
            error.value = self.missing
            raise error
        self.inits += 1

    def nvmlShutdown(self):
        self.inits -= 1

    def nvmlDeviceGetCount(self):
        return len(self.machine.devices)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.machine.devices[index]

    def nvmlDeviceGetConfComputeGpuAttestationReport(self, handle, nonce):
        if self.unsupported:
            raise Error
        assert len(nonce) == 32
        report = nvidia.report(handle, nonce=bytes(nonce))
        padded = list(report.ljust(0x2000, b"\0"))
        return SimpleNamespace(attestationReport=padded, attestationReportSize=len(report))

    def nvmlDeviceGetConfComputeGpuCertificate(self, handle):
        chain = handle.pem + b"\0"
        return SimpleNamespace(attestationCertChain=list(chain), attestationCertChainSize=len(chain))


@pytest.fixture
def folder(tmp_path):
    """Return a folder of collateral for both kinds of machines, and for their GPUs."""
    folder = tmp_path / "collateral"
    (folder / "rim").mkdir(parents=True)
    (folder / "ocsp").mkdir()
    return folder


def fill(folder, machine):
    if machine.cpu == "tdx":
        (folder / "tdx.json").write_text(tdx.as_json(tdx.collateral()))
    else:
        (folder / "vcek.der").write_bytes(machine.chip.leaf)
        (folder / "cert_chain.pem").write_bytes(machine.chip.issuers)
        (folder / "crl.der").write_bytes(machine.crl)
    others = (nvidia.rim(version="1.2.3"), nvidia.switch_rim(), nvidia.rim(product="GB100"))
    for number, data in enumerate((nvidia.rim(), *others, nvidia.vbios_rim())):
        (folder / "rim" / f"{number}.xml").write_bytes(data)
    chains = [device.chain[1:] for device in machine.devices] + [nvidia.rim_signer().chain]
    for number, data in enumerate({data for chain in chains for data in nvidia.statuses(chain)}):
        (folder / "ocsp" / f"{number}.der").write_bytes(data)


@pytest.mark.parametrize("generation", [None, (4, 5)])
@pytest.mark.parametrize(("cpu", "gpus"), [("tdx", 2), ("snp", 1), ("tdx", 0)])
def test_a_machine_is_collected_and_verified(tmp_path, folder, cpu, gpus, generation):
    machine = Machine(cpu, gpus)
    fill(folder, machine)
    provider = "tdx_guest" if cpu == "tdx" else "sev_guest"
    kernel = Kernel(tmp_path / "tsm", machine, provider=provider, generation=generation)
    nvml = Nvml(machine)

    def collect(binding):
        return attest.collect_evidence(binding, root=kernel.root, collateral=folder, nvml=nvml)

    challenge = attest.Challenge.generate(now=NOW)
    pending = attest.make_offer(challenge, collect)
    found = attest.Policy.from_toml(policy(gpus))
    verified = attest.verify_offer(pending.to_bytes(), challenge, found, now=NOW, roots=roots())
    assert len(verified.devices) == gpus
    assert all(len(device.rims) == 2 for device in verified.devices)
    assert nvml.inits == 0


def test_the_machine_may_have_no_collateral(tmp_path):
    machine = Machine("tdx", 1)
    binding = attest.OfferBinding(attest.Challenge.generate(now=NOW), fastrack.grants.Identity.generate().recipient)
    kernel = Kernel(tmp_path / "tsm", machine)
    evidence = attest.collect_evidence(binding, root=kernel.root, nvml=Nvml(machine))
    assert evidence.cpu.collateral is None
    assert (evidence.devices[0].manifests, evidence.devices[0].ocsp) == ((), None)
    kernel = Kernel(tmp_path / "snp", Machine("snp", 0), provider="sev_guest")
    with pytest.raises(DeviceError, match=r"vcek\.der"):
        attest.collect_evidence(binding, root=kernel.root, gpus=False)


def test_what_is_missing_is_told(tmp_path):
    machine = Machine("tdx", 1)
    with pytest.raises(DeviceError, match=r"confidential virtual machine, with Linux 6\.7"):
        read_tsm_report(bytes(64), root=tmp_path / "none")
    with pytest.raises(DeviceError, match=r"got No such file or directory\. Run this as root"):
        read_tsm_report(bytes(64), root=tmp_path)
    kernel = Kernel(tmp_path / "other", machine, provider="arm_cca_guest")
    with pytest.raises(DeviceError, match="got arm_cca_guest"):
        read_tsm_report(bytes(64), root=kernel.root)
    kernel = Kernel(tmp_path / "busy", machine, generation=(4, 6))
    with pytest.raises(DeviceError, match="expected one request at a time, got 2"):
        read_tsm_report(bytes(64), root=kernel.root)
    binding = attest.OfferBinding(attest.Challenge.generate(now=NOW), fastrack.grants.Identity.generate().recipient)

    def collect(nvml, **options):
        return attest.collect_evidence(binding, root=tmp_path / "none", nvml=nvml, **options)

    with pytest.raises(DeviceError, match="evidence of the CPU"):  # as GPUs were not asked for
        collect(Nvml(machine, missing=12))
    for nvml in (Nvml(machine, missing=12), Nvml(machine, missing=9), Nvml(machine, missing=4)):
        with pytest.raises(DeviceError, match="Install the driver"):
            collect(nvml, gpus=True)
    with pytest.raises(DeviceError, match="Install the driver"):
        collect(Nvml(machine, missing=4))
    with pytest.raises(DeviceError, match=r"got none\. Attach a GPU"):
        collect(Nvml(Machine("tdx", 0)), gpus=True)
    nvml = Nvml(machine, unsupported=True)
    with pytest.raises(DeviceError, match=r"Not Supported\. It needs confidential mode"):
        collect(nvml)
    assert nvml.inits == 0


def test_malformed_collateral_is_refused(tmp_path, folder):
    machine = Machine("tdx", 1)
    binding = attest.OfferBinding(attest.Challenge.generate(now=NOW), fastrack.grants.Identity.generate().recipient)
    for name, text in (("ocsp/a.der", b"no"), ("rim/a.xml", b"<x/>"), ("rim/b.xml", b" " * (2 << 20))):
        (folder / name).write_bytes(text)
        with pytest.raises(fastrack.FormatError):
            attest.collect_evidence(binding, root=tmp_path / "none", collateral=folder, nvml=Nvml(machine))
        (folder / name).unlink()
