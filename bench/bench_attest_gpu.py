"""Evidence of NVIDIA's devices, verified offline on one core. The tests' foundry makes and signs all of it.

"Cold" clears all that is kept between calls before each round. What is kept are links of chains, opened manifests and
OCSP responses, which devices of a kind have in common; the time is looked at in every call.
"""

import sys
from pathlib import Path

import pytest
from conftest import import_private

from fastrack import attest
from fastrack.attest._formats import ocsp as _ocsp
from fastrack.attest._formats import x509 as _x509

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from helpers.foundry import nvidia, tdx
from helpers.foundry.authority import NOW

GPUS = 8
KEPT = (
    import_private("fastrack.attest._formats.x509:_find_problem", "fastrack.attest._formats.links:_find_problem"),
    _ocsp._load,
    _ocsp._verify_responder,
    import_private("fastrack.attest._gpus.rim:open_signed", "fastrack.attest._gpus.rim:_open_signed"),
    _x509._load_cached,
    _x509._write_pem,
)


def forget():
    """Clear all that is kept between calls."""
    for kept in KEPT:
        kept.cache_clear()


@pytest.fixture(params=["cold", "warm"])
def run(request, benchmark):
    """Measure a call, with nothing kept from the one before, or with all of it."""

    def measure(action, **options):
        setup = {"setup": forget} if request.param == "cold" else {}
        return benchmark.pedantic(action, kwargs=options, rounds=100, warmup_rounds=5, **setup)

    def measure_with(action, *arguments, **options):
        return measure(lambda: action(*arguments, **options))

    return measure_with


@pytest.mark.benchmark(group="a GPU report")
@pytest.mark.parametrize("make", [nvidia.hopper, nvidia.blackwell], ids=lambda one: one.__name__)
def test_verify_gpu_report(run, make):
    device = make()
    report = nvidia.report(device)
    verified = run(attest.verify_gpu_report, report, device.pem, nonce=nvidia.NONCE, now=NOW, roots=device.roots)
    assert verified.driver_version == nvidia.DRIVER


@pytest.mark.benchmark(group="a GPU report")
def test_verify_gpu_report_with_ocsp(run):
    device = nvidia.hopper()
    options = {"nonce": nvidia.NONCE, "now": NOW, "roots": device.roots, "ocsp": nvidia.statuses(device.chain[1:])}
    assert run(attest.verify_gpu_report, nvidia.report(device), device.pem, **options).revocation_checked_at


@pytest.mark.benchmark(group="a GPU report")
def test_parse_gpu_report(benchmark):
    assert len(benchmark(attest.parse_gpu_report, nvidia.report(nvidia.hopper())).measurements) == 64


@pytest.mark.benchmark(group="a reference manifest")
def test_verify_rim(run):
    verified = run(attest.verify_rim, nvidia.rim(), now=NOW, roots=nvidia.rim_signer().roots)
    assert verified.rim.version == nvidia.DRIVER


@pytest.mark.benchmark(group="a reference manifest")
def test_parse_rim(benchmark):
    assert len(benchmark(attest.parse_rim, nvidia.rim()).measurements) == 64


@pytest.mark.benchmark(group="a reference manifest")
def test_match_measurements(benchmark):
    device, roots = nvidia.hopper(), nvidia.rim_signer().roots
    report = attest.verify_gpu_report(
        nvidia.report(device), device.pem, nonce=nvidia.NONCE, now=NOW, roots=device.roots
    )
    rims = [attest.verify_rim(data, now=NOW, roots=roots) for data in (nvidia.rim(), nvidia.vbios_rim())]
    assert benchmark(attest.match_measurements, report, rims).matched


@pytest.mark.benchmark(group="an OCSP response")
def test_verify_ocsp_response(run):
    about, issuer = nvidia.hopper().chain[2:4]
    response = nvidia.status(about, issuer, by=nvidia.responder(issuer))
    assert run(attest.verify_ocsp_response, response, about.certificate, issuer.certificate, now=NOW).age


class Offer:
    """The evidence of a machine: a TDX quote with collateral, GPUs, two manifests for each, OCSP responses for all."""

    def __init__(self, count, *, are_manifests_shared=True):
        self.quote = tdx.quote(tdx.platform())
        self.collateral = attest.TdxCollateral(**tdx.collateral())
        first = nvidia.hopper()
        self.devices = [nvidia.sibling(first, number) for number in range(count)]
        self.reports = [nvidia.report(device) for device in self.devices]
        shared = (nvidia.rim(), nvidia.vbios_rim())
        self.rims = [
            shared if are_manifests_shared else (nvidia.rim(tag_id=f"{n:x}"), nvidia.vbios_rim(tag_id=f"{n:x}"))
            for n in range(count)
        ]
        self.ocsp = [nvidia.statuses(device.chain[1:]) for device in self.devices]
        self.rim_ocsp = nvidia.statuses(nvidia.rim_signer().chain)

    def verify(self):
        attest.verify_tdx_quote(self.quote, self.collateral, now=NOW, roots=tdx.intel().roots)
        found = []
        devices = zip(self.devices, self.reports, self.rims, self.ocsp, strict=True)
        for number, (device, report, rims, ocsp) in enumerate(devices):
            options = {"roots": device.roots, "ocsp": ocsp, "evidence": f"GPU {number} report"}
            verified = attest.verify_gpu_report(report, device.pem, nonce=nvidia.NONCE, now=NOW, **options)
            options = {"roots": nvidia.rim_signer().roots, "ocsp": self.rim_ocsp, "evidence": f"RIM of GPU {number}"}
            manifests = [attest.verify_rim(data, now=NOW, **options) for data in rims]
            found.append(attest.match_measurements(verified, manifests))
        return found


@pytest.mark.benchmark(group="an offer of TDX and 8 GPUs, cold")
@pytest.mark.parametrize("are_shared", [True, False], ids=["2 manifests", "16 manifests"])
def test_verify_an_offer(benchmark, are_shared):
    offer = Offer(GPUS, are_manifests_shared=are_shared)
    assert len(benchmark.pedantic(offer.verify, setup=forget, rounds=20)) == GPUS
