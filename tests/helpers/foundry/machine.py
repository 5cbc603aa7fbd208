"""Complete machines: a CPU with TDX or SEV-SNP and GPUs, which answer a challenge as real ones do."""

from __future__ import annotations

import json
from functools import cache

from fastrack import attest
from helpers.foundry import nvidia, snp, tdx

SMALL_MEASUREMENTS = nvidia.MEASUREMENTS[:2]


def policy(gpus):
    """Return a policy in TOML for the machines of this module."""
    text = f"version = 1\n[cpu.tdx]\nmrtd = ['{'22' * 48}']\nrtmr1 = ['{'61' * 48}']\nrtmr2 = ['{'62' * 48}']\n"
    text += f"[cpu.snp]\nmeasurement = ['{'22' * 48}']\nmin_tcb = {{ snp = 8, microcode = 115 }}\n"
    text += "revocation = 'cached'\n"
    return text + (f"[gpu]\ncount = {gpus}\nmin_driver = '550'\n" if gpus else "")


@cache
def roots():
    """Return the roots of all made-up vendors."""
    return attest.TrustedRoots(
        intel=tdx.intel().roots,
        amd=snp.amd("Milan").roots,
        nvidia=frozenset({nvidia.device_root().fingerprint}),
        nvidia_rim=nvidia.rim_signer().roots,
    )


class Machine:
    """A machine whose certificates and collateral are made once, and whose reports are signed for each challenge.

    Parameters
    ----------
    cpu : {"tdx", "snp"}
        The kind of its CPU.
    gpus : int
        The number of its GPUs.
    is_small : bool
        With true, reports and manifests have only two measurements.
    """

    def __init__(self, cpu="tdx", gpus=1, *, is_small=False, own_manifests=False):
        self.cpu = cpu
        if cpu == "tdx":
            self.platform = tdx.platform()
            self.collateral = attest.TdxCollateral(**tdx.collateral())
        else:
            self.chip = snp.chip()
            self.crl = snp.amd("Milan").ark.crl()
        first = nvidia.hopper()
        self.devices = [first, *(nvidia.sibling(first, number) for number in range(1, gpus))][:gpus]
        self.ocsp = [tuple(nvidia.statuses(device.chain[1:])) for device in self.devices]
        self.measurements = SMALL_MEASUREMENTS if is_small else nvidia.MEASUREMENTS
        rim_ocsp = tuple(nvidia.statuses(nvidia.rim_signer().chain))
        shared = make_manifests(self.measurements, rim_ocsp)
        self.manifests = [
            make_manifests(self.measurements, rim_ocsp, tag_id=f"{index:x}") if own_manifests else shared
            for index in range(gpus)
        ]

    def __call__(self, binding):
        return self.collect(binding)

    def collect(self, binding):
        """Answer as `collect_evidence` does."""
        devices = tuple(
            attest.DeviceEvidence(
                report=nvidia.report(device, nonce=binding.device_nonce(index), measurements=self.measurements),
                chain=device.pem,
                manifests=self.manifests[index],
                ocsp=self.ocsp[index],
            )
            for index, device in enumerate(self.devices)
        )
        return attest.MachineEvidence(self.prove(binding.report_data(devices)), devices)

    def prove(self, report_data):
        """Make the evidence of the CPU."""
        if self.cpu == "tdx":
            quote = tdx.quote(self.platform, body=tdx.td_report(report_data=report_data))
            return attest.TdxEvidence(quote, self.collateral)
        report = snp.report(self.chip, report_data=report_data)
        return attest.SnpEvidence(report, self.chip.leaf, self.chip.issuers, self.crl)


def make_manifests(measurements, ocsp, **options):
    """Make the manifests of driver and VBIOS."""
    if len(measurements) > 2:
        driver, vbios = nvidia.rim(**options), nvidia.vbios_rim(**options)
    else:
        driver = nvidia.rim([nvidia.resource(0, measurements[:1])], **options)
        vbios = nvidia.rim([nvidia.resource(1, measurements[1:])], version=nvidia.VBIOS_TEXT, **options)
    return tuple(attest.ManifestEvidence(data, ocsp) for data in (driver, vbios))


@cache
def machine(cpu="tdx", gpus=1):
    return Machine(cpu, gpus)


@cache
def small():
    """Return a machine whose offers have few bytes, and are made and verified fast."""
    return Machine("tdx", 1, is_small=True)


def spots(document):
    """List the places of all strings in a document, as paths of members and indexes."""
    found = []

    def walk(value, path):
        if isinstance(value, dict):
            for name in value:
                walk(value[name], (*path, name))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                walk(item, (*path, index))
        elif isinstance(value, str):
            found.append(path)

    walk(document, ())
    return found


def change(data, path, replace):
    """Return a document of which the value at a path is another one."""
    document = json.loads(data)
    inner = document
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = replace(inner[path[-1]])
    return canonical(document)


def canonical(document):
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
