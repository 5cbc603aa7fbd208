"""Evidence of this machine, from stand-ins of the kernel and of NVML."""

# ruff: noqa: N802
import os
import threading
from types import SimpleNamespace
from uuid import UUID

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from helpers.foundry import nvidia, tdx
from helpers.foundry.authority import NOW
from helpers.foundry.event_logs import ccel
from helpers.foundry.machine import Machine, policy, roots

import fastrack
from fastrack import AttestationError, DeviceError, FormatError, attest
from fastrack.attest._collect import read_tsm_report
from fastrack.attest._cpu.snp_certificates import read_certificate_table


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

    def __init__(self, machine, *, missing=None, unsupported=(), damaged=(), nameless=False):
        self.machine, self.missing, self.unsupported = machine, missing, unsupported
        self.damaged, self.nameless = damaged, nameless
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

    def nvmlDeviceGetName(self, handle):
        if self.nameless:
            raise Error
        return f"NVIDIA H200 of slot {self.machine.devices.index(handle)}"

    def nvmlDeviceGetConfComputeGpuAttestationReport(self, handle, nonce):
        if self.machine.devices.index(handle) in self.unsupported:
            raise Error
        assert len(nonce) == 32
        report = nvidia.report(handle, nonce=bytes(nonce))
        padded = list(report.ljust(0x2000, b"\0"))
        return SimpleNamespace(attestationReport=padded, attestationReportSize=len(report))

    def nvmlDeviceGetConfComputeGpuCertificate(self, handle):
        chain = handle.pem + b"\0"
        if self.machine.devices.index(handle) in self.damaged:
            chain = chain[:100]
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
    evidence = attest.collect_evidence(binding, root=kernel.root, gpus=False)
    assert (evidence.cpu.leaf, evidence.cpu.issuers, evidence.cpu.crl) == (None, None, None)
    assert attest.Offer.from_bytes(attest.make_offer(binding.challenge, lambda _: evidence).to_bytes())


@pytest.mark.parametrize("cpu", ["tdx", "snp"])
def test_the_owner_may_have_all_collateral(tmp_path, folder, cpu):
    machine = Machine(cpu, 1)
    kernel = Kernel(tmp_path / "tsm", machine, provider="tdx_guest" if cpu == "tdx" else "sev_guest")
    challenge, judge = attest.Challenge.generate(now=NOW), attest.Policy.from_toml(policy(1))
    nvml = Nvml(machine)
    pending = attest.make_offer(
        challenge, lambda binding: attest.collect_evidence(binding, root=kernel.root, nvml=nvml)
    )
    options = {"now": NOW, "roots": roots()}
    with pytest.raises(AttestationError, match="attest fetch"):
        attest.verify_offer(pending.to_bytes(), challenge, judge, **options)
    fill(folder, machine)
    verified = attest.verify_offer(pending.to_bytes(), challenge, judge, collateral=folder, **options)
    assert len(verified.devices[0].rims) == 2


def certificate_table(parts):
    """Write a table of certificates as a host hands it out."""
    at, entries = 24 * (len(parts) + 1), b""
    for guid, data in parts:
        entries += UUID(guid).bytes_le + at.to_bytes(4, "little") + len(data).to_bytes(4, "little")
        at += len(data)
    return entries + bytes(24) + b"".join(data for _, data in parts)


VCEK, ASK, ARK, CRL = (
    "63da758d-e664-4564-adc5-f4b93be8accd",
    "4ab7b379-bbac-4fe4-a02f-05aef327c782",
    "c0b406a4-a803-4952-9743-3fb6014cd0ae",
    "92f81bc3-5811-4d3d-97ff-d19f88dc67ea",
)


def test_certificates_of_the_host_are_sent_with_a_report(tmp_path):
    machine = Machine("snp", 0)
    ask, ark = (one.public_bytes(Encoding.DER) for one in x509.load_pem_x509_certificates(machine.chip.issuers))
    unknown = ("00000000-0000-0000-0000-00000000beef", b"?")
    table = certificate_table([(VCEK, machine.chip.leaf), unknown, (ARK, ark), (ASK, ask), (CRL, machine.crl)])
    for number, data in enumerate((table, table + bytes(4000))):
        kernel = Kernel(tmp_path / str(number), machine, provider="sev_guest")
        (kernel.entry / "auxblob").write_bytes(data)
        challenge = attest.Challenge.generate(now=NOW)
        pending = attest.make_offer(
            challenge, lambda it, kernel=kernel: attest.collect_evidence(it, root=kernel.root, gpus=False)
        )
        verified = attest.verify_offer(
            pending.to_bytes(), challenge, attest.Policy.from_toml(policy(0)), now=NOW, roots=roots()
        )
        assert verified.cpu.revocation_checked_at is not None


def test_tables_of_certificates_are_read_within_their_bounds():
    assert read_certificate_table(b"") == read_certificate_table(bytes(24)) == {}
    good = certificate_table([(VCEK, b"leaf")])
    assert read_certificate_table(good) == {"leaf": b"leaf"}
    for place, value in ((16, len(good)), (16, 2**32 - 1), (20, 0), (20, 5), (20, 2**32 - 1)):
        with pytest.raises(FormatError, match="certificate table"):
            read_certificate_table(good[:place] + value.to_bytes(4, "little") + good[place + 4 :])
    with pytest.raises(FormatError, match="certificate table"):
        read_certificate_table(certificate_table([(ASK, b"?"), (ARK, b"?")]))


def test_the_event_log_of_a_td_is_sent_with_its_quote(tmp_path, monkeypatch):
    machine = Machine("tdx", 0)
    binding = attest.OfferBinding(attest.Challenge.generate(now=NOW), fastrack.grants.Identity.generate().recipient)
    table = tmp_path / "CCEL"
    monkeypatch.setattr("fastrack.attest._cpu.tdx_kind.CCEL", str(table))
    for name, content in (("without", None), ("empty", b""), ("damaged", b"log"), ("of another boot", ccel())):
        if content is not None:
            table.write_bytes(content)
        kernel = Kernel(tmp_path / name, machine)
        assert attest.collect_evidence(binding, root=kernel.root, gpus=False).cpu.event_log is None
    report = SimpleNamespace(rtmrs=attest.EventLog.parse(ccel()).rtmrs)
    monkeypatch.setattr("fastrack.attest._cpu.tdx_kind.parse_tdx_quote", lambda _: SimpleNamespace(report=report))
    kernel = Kernel(tmp_path / "with", machine)
    assert attest.collect_evidence(binding, root=kernel.root, gpus=False).cpu.event_log == ccel()


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
    nvml = Nvml(machine, unsupported=[0])
    with pytest.raises(DeviceError, match=r"Not Supported\. It needs confidential mode"):
        collect(nvml)
    assert nvml.inits == 0


def test_the_one_gpu_of_eight_that_gives_no_report_is_named(tmp_path):
    machine = Machine("tdx", 8)
    binding = attest.OfferBinding(attest.Challenge.generate(now=NOW), fastrack.grants.Identity.generate().recipient)
    slot = r"GPU 5 \(NVIDIA H200 of slot 5\)"
    for nvml, said in (
        (Nvml(machine, unsupported=[5]), rf"expected an attestation report of {slot}, got Not Supported\. It needs"),
        (
            Nvml(machine, damaged=[5]),
            rf"expected a report of {slot} with its certificates, got another.*Reset this GPU",
        ),
        (Nvml(machine, unsupported=[5], nameless=True), "expected an attestation report of GPU 5, got Not Supported"),
        (Nvml(machine, damaged=[5], nameless=True), "expected a report of GPU 5 with its certificates, got another"),
    ):
        with pytest.raises(DeviceError, match=said):
            attest.collect_evidence(binding, root=tmp_path / "none", nvml=nvml)
        assert nvml.inits == 0


def test_what_a_folder_lacks_on_the_machine_is_the_hosts(tmp_path, folder):
    machine = Machine("snp", 0)
    ask, ark = (one.public_bytes(Encoding.DER) for one in x509.load_pem_x509_certificates(machine.chip.issuers))
    table = certificate_table([(VCEK, machine.chip.leaf), (ARK, ark), (ASK, ask), (CRL, machine.crl)])
    kernel = Kernel(tmp_path / "tsm", machine, provider="sev_guest")
    (kernel.entry / "auxblob").write_bytes(table)
    binding = attest.OfferBinding(attest.Challenge.generate(now=NOW), fastrack.grants.Identity.generate().recipient)
    evidence = attest.collect_evidence(binding, root=kernel.root, collateral=folder, gpus=False)
    assert (evidence.cpu.leaf, evidence.cpu.crl) == (machine.chip.leaf, machine.crl)
    assert evidence.cpu.issuers


def test_malformed_collateral_is_refused(tmp_path, folder):
    machine = Machine("tdx", 1)
    binding = attest.OfferBinding(attest.Challenge.generate(now=NOW), fastrack.grants.Identity.generate().recipient)
    for name, text in (("ocsp/a.der", b"no"), ("rim/a.xml", b"<x/>"), ("rim/b.xml", b" " * (2 << 20))):
        (folder / name).write_bytes(text)
        with pytest.raises(fastrack.FormatError):
            attest.collect_evidence(binding, root=tmp_path / "none", collateral=folder, nvml=Nvml(machine))
        (folder / name).unlink()
