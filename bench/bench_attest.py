"""Evidence of CPUs and of NVIDIA's devices, verified offline on one core. The tests' foundry makes and signs all of it.

"Cold" clears all that is kept between calls before each round: parsed certificates and their names, links of chains,
opened manifests and OCSP responses, which machines and devices of a kind have in common; the time is looked at in every
call.
"""

import sys
from pathlib import Path

import pytest

from fastrack import attest
from fastrack.attest._formats import ocsp as _ocsp
from fastrack.attest._formats import x509 as _x509
from fastrack.attest._gpus import rim

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from helpers.foundry import nvidia, snp, tdx
from helpers.foundry.authority import NOW

KEPT = (
    rim.open_signed,
    *(_ocsp._load, _ocsp._verify_responder),
    *(_x509._find_problem, _x509._load_cached, _x509._write_pem, _x509.subject_name),
)


def forget():
    """Clear all that is kept between calls."""
    for kept in KEPT:
        kept.cache_clear()


@pytest.fixture(params=["cold", "warm"])
def run(request, benchmark):
    """Measure a call, with nothing kept from the one before, or with all of it."""
    setup = {"setup": forget} if request.param == "cold" else {}

    def measure(action, *arguments, **options):
        return benchmark.pedantic(lambda: action(*arguments, **options), rounds=200, warmup_rounds=5, **setup)

    return measure


@pytest.fixture(scope="module")
def machine():
    return tdx.platform()


@pytest.mark.benchmark(group="a TDX quote")
@pytest.mark.parametrize("version", [4, 5])
def test_verify_tdx_quote(run, machine, version):
    quote = tdx.quote(machine, version=version)
    collateral = attest.TdxCollateral(**tdx.collateral())
    roots = tdx.intel().roots
    verified = run(attest.verify_tdx_quote, quote, collateral, now=NOW, roots=roots)
    assert verified.tcb.status == "UpToDate"


@pytest.mark.benchmark(group="a TDX quote")
def test_verify_tdx_quote_with_dcap_qvl(benchmark, machine):
    dcap_qvl = pytest.importorskip("dcap_qvl")
    quote = tdx.quote(machine)
    collateral = dcap_qvl.QuoteCollateralV3.from_json(tdx.as_json(tdx.collateral()))
    root = tdx.intel().root.der
    verified = benchmark(dcap_qvl.verify_with_root_ca, quote, collateral, root, int(NOW.timestamp()))
    assert verified.status == "UpToDate"


@pytest.mark.benchmark(group="a TDX quote")
def test_parse_tdx_quote(benchmark, machine):
    assert benchmark(attest.parse_tdx_quote, tdx.quote(machine)).version == 4


@pytest.mark.benchmark(group="an SNP report")
@pytest.mark.parametrize("product", sorted(snp.PRODUCTS))
def test_verify_snp_report(run, product):
    chip, of = snp.chip(product), snp.amd(product)
    report = snp.report(chip)
    verified = run(attest.verify_snp_report, report, chip.leaf, chip.issuers, now=NOW, roots=of.roots, crl=of.ark.crl())
    assert verified.product == product


@pytest.mark.benchmark(group="an SNP report")
def test_parse_snp_report(benchmark):
    assert benchmark(attest.parse_snp_report, snp.report(snp.chip())).version == 3


@pytest.mark.benchmark(group="a policy")
def test_check_cpu(benchmark, machine):
    collateral = attest.TdxCollateral(**tdx.collateral())
    verified = attest.verify_tdx_quote(tdx.quote(machine), collateral, now=NOW, roots=tdx.intel().roots)
    registers = {"mrtd": "22", "rtmr1": "61", "rtmr2": "62"}
    lines = [f"{name} = ['{value * 48}']" for name, value in registers.items()]
    policy = attest.Policy.from_toml("\n".join(["version = 1", "[cpu.tdx]", *lines]))
    benchmark(policy.check_cpu, verified, now=NOW)


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
