"""Attestation evidence of CPUs, verified offline on one core. The tests' foundry makes and signs all of it.

"Cold" clears all caches before each round: parsed certificates and their names. Machines of a kind share all
certificates but one.
"""

import sys
from pathlib import Path

import pytest
from conftest import import_private

from fastrack import attest
from fastrack.attest._formats import x509 as _x509

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from helpers.foundry import snp, tdx
from helpers.foundry.authority import NOW

KEPT = (
    import_private("fastrack.attest._formats.x509:_find_problem", "fastrack.attest._formats.links:_find_problem"),
    _x509._load_cached,
    _x509._write_pem,
    _x509.subject_name,
    import_private("fastrack.attest._gpus.rim:open_signed", "fastrack.attest._rim:_open_signed"),
    import_private("fastrack.attest._formats.ocsp:_load", "fastrack.attest._ocsp:_load"),
    import_private("fastrack.attest._formats.ocsp:_verify_responder", "fastrack.attest._ocsp:_verify_responder"),
)


def forget():
    for kept in KEPT:
        kept.cache_clear()


@pytest.fixture(params=["cold", "warm"])
def run(request, benchmark):
    """Run a function with warm or cold caches."""

    def run(action, *arguments, **options):
        def call():
            return action(*arguments, **options)

        if request.param == "cold":
            return benchmark.pedantic(call, setup=forget, rounds=200)
        return benchmark(call)

    return run


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
