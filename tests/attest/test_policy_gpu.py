from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta

import pytest
from helpers.foundry import nvidia as foundry
from helpers.foundry.authority import NOW

from fastrack import AttestationError, FormatError, attest
from fastrack.attest import GpuPolicy, Policy, Revocation

DAY = timedelta(days=1)


def verified(device, **options):
    data = foundry.report(device, **options)
    found = attest.verify_gpu_report(
        data, device.pem, nonce=foundry.NONCE, now=NOW, roots=device.roots, evidence="GPU 0 report"
    )
    return replace(found, revocation_checked_at=NOW - 2 * DAY, valid_until=NOW + 9 * DAY)


def manifest(data):
    found = attest.verify_rim(data, now=NOW, roots=foundry.rim_signer().roots)
    return replace(found, revocation_checked_at=NOW - 2 * DAY, valid_until=NOW + 9 * DAY)


REPORT = verified(foundry.hopper())  # with driver 580.159.03 and VBIOS 96.00.74.00.20
RIMS = manifest(foundry.rim()), manifest(foundry.vbios_rim())
MATCHED = attest.match_measurements(REPORT, RIMS)
SWITCH = attest.match_measurements(
    verified(foundry.switch(), fields=foundry.switch_fields(), measurements=foundry.MEASUREMENTS[:31]),
    [manifest(foundry.switch_rim())],
)


def matched(*, rims=RIMS, **changes):
    return replace(MATCHED, report=replace(REPORT, **changes), rims=rims)


def policy(text=""):
    return Policy.from_toml(f"version = 1\n[gpu]\n{text}")


def check(text="", *devices, now=NOW):
    return policy(text).check_gpus(devices or [MATCHED], now=now)


def several(count):
    return [matched(evidence=f"GPU {at} report", chip_id=f"A{at}") for at in range(count)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "count = 1",
        "architectures = ['blackwell', 'hopper']",
        "chips = ['GH100']",
        "chip_ids = ['41e23d711e1c4fbfac']",
        "min_driver = '580.159.03'",
        "min_driver = '580.95.05'",
        "min_driver = '580'",
        "min_vbios = { hopper = '96.00.74.00.20', blackwell = '97.00' }",
        "min_vbios = { hopper = '96.00.74.00.1F' }",
        "min_vbios = { blackwell = '97' }",
        "modes = ['SPT']",
        "revocation = 'none'",
        "revocation = 'required'\nmax_revocation_age_days = 2",
    ],
)
def test_a_gpu_that_fits_is_accepted(text):
    assert check(text) is None


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("count = 8", "number of GPUs"),
        ("architectures = ['blackwell']", "architecture"),
        ("chips = ['GB100']", "chip"),
        ("chip_ids = ['00']", "chip id"),
        ("min_driver = '580.159.04'", "driver version"),
        ("min_driver = '1000'", "driver version"),
        ("min_vbios = { hopper = '96.00.A0.00.00' }", "VBIOS version"),
        ("modes = ['MPT', 'PPCIE']", "confidential mode"),
        ("revocation = 'required'", "revocation"),
        ("revocation = 'required'\nmax_revocation_age_days = 0", "revocation"),
    ],
)
def test_a_gpu_that_does_not_fit_is_refused(text, field):
    with pytest.raises(AttestationError, match=re.escape(f"gpu.{text.split(' = ')[0]}")) as raised:
        check(text)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"driver_version": None}, "min_driver = '1'"),
        ({"driver_version": "r550"}, "min_driver = '1'"),
        ({"vbios_version": "x"}, "min_vbios = { hopper = '1' }"),
        ({"mode": None}, "modes = ['SPT']"),
        ({"revocation_checked_at": None}, ""),
        ({"valid_until": NOW - DAY}, ""),
        ({"verified_at": NOW + DAY}, ""),
    ],
)
def test_a_claim_that_is_missing_or_odd_is_refused(change, text):
    with pytest.raises(AttestationError):
        check(text, matched(**change))


@pytest.mark.parametrize("change", [{"revocation_checked_at": None}, {"valid_until": NOW - DAY}])
def test_manifests_are_judged_as_the_reports_are(change):
    with pytest.raises(AttestationError, match="reference manifest of the GPU 0 report"):
        check("", matched(rims=(RIMS[0], replace(RIMS[1], **change))))


def test_a_report_without_manifests_is_refused_unless_allowed():
    with pytest.raises(AttestationError, match="match_measurements"):
        check("", REPORT)
    check("require_manifests = false", REPORT)
    check("require_manifests = false", MATCHED)


def test_a_device_counts_once():
    with pytest.raises(AttestationError, match="Ask each device for its own report") as raised:
        check("", MATCHED, matched(evidence="GPU 1 report"))
    assert (raised.value.evidence, raised.value.field) == ("GPU 1 report", "chip id")


def test_switches_do_not_count_as_gpus():
    check("count = 8\nmin_driver = '580'\nmodes = ['SPT']", *several(8), SWITCH)
    with pytest.raises(AttestationError, match="number of GPUs"):
        check("", SWITCH)
    with pytest.raises(AttestationError, match="VBIOS"):
        check("min_vbios = { nvswitch = '96.10.58' }", MATCHED, SWITCH)
    with pytest.raises(AttestationError, match="architecture"):
        check("architectures = ['hopper']", MATCHED, SWITCH)


@pytest.mark.parametrize("count", [7, 9])
def test_another_number_of_gpus_is_refused(count):
    with pytest.raises(AttestationError, match="8"):
        check("count = 8", *several(count))


def test_gpus_are_accepted_by_a_section_alone():
    nothing = Policy.from_toml("version = 1")
    nothing.check_gpus([], now=NOW)
    with pytest.raises(AttestationError, match=r"\[gpu\]"):
        nothing.check_gpus([MATCHED], now=NOW)
    with pytest.raises(AttestationError, match="number of GPUs"):
        policy().check_gpus([], now=NOW)


@pytest.mark.parametrize("thing", [None, b"report", RIMS[0], attest.parse_gpu_report(foundry.report(foundry.hopper()))])
def test_what_was_not_verified_is_not_judged(thing):
    with pytest.raises(TypeError, match="verify the evidence first"):
        check("", thing)


def test_a_time_without_a_zone_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="time zone"):
        check(now=NOW.replace(tzinfo=None))


def test_the_defaults_are_strict():
    assert policy().gpu == GpuPolicy()
    assert policy().gpu.revocation is Revocation.CACHED
    assert policy().gpu.require_manifests


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("count = 0", "1 or more as gpu.count"),
        ("architectures = ['ampere']", "hopper, blackwell, nvswitch"),
        ("modes = ['devtools']", "SPT, MPT, PPCIE"),
        ("chips = []", "not empty"),
        ("chip_ids = ['0x12']", "hexadecimal"),
        ("min_driver = 550", "a string"),
        ("min_driver = 'new'", "a version"),
        ("min_vbios = '96'", "a table"),
        ("min_vbios = { ampere = '94' }", "gpu.min_vbios.ampere"),
        ("min_vbios = { hopper = '96,1' }", "a version"),
        ("driver = '550'", "gpu.driver"),
    ],
)
def test_a_mistake_in_the_section_is_named(text, said):
    with pytest.raises(FormatError, match=re.escape(said)):
        policy(text)
