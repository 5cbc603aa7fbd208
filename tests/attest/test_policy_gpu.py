from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import pytest
from helpers.foundry.authority import NOW

from fastrack import AttestationError, FormatError
from fastrack.attest import GpuPolicy, Policy, Revocation

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Report:
    """The claims of a verified report of a GPU, as a policy sees them."""

    evidence: str = "GPU 0 report"
    architecture: str = "hopper"
    chip: str = "GH100"
    chip_id: str = "41E23D711E1C4FBFAC"
    driver_version: str | None = "550.144.03"
    vbios_version: str = "96.00.9F.00.01"
    mode: str | None = "SPT"
    verified_at: datetime = NOW
    revocation_checked_at: datetime | None = NOW - 2 * DAY
    valid_until: datetime = NOW + 9 * DAY


@dataclass(frozen=True)
class Manifest:
    verified_at: datetime = NOW
    revocation_checked_at: datetime | None = NOW - 2 * DAY
    valid_until: datetime = NOW + 9 * DAY


@dataclass(frozen=True)
class Matched:
    report: Report = Report()
    rims: tuple[Manifest, ...] = (Manifest(), Manifest())
    matched: tuple[int, ...] = (0, 1)


SWITCH = Report("switch 0 report", "nvswitch", "LS10", "50203EB31AD9ED0008", None, "96.10.57.00.01", None)


def policy(text=""):
    return Policy.from_toml(f"version = 1\n[gpu]\n{text}")


def check(text="", *devices, now=NOW):
    return policy(text).check_gpus(devices or [Matched()], now=now)


def several(count):
    return [Matched(replace(Report(), evidence=f"GPU {at} report", chip_id=f"A{at}")) for at in range(count)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "count = 1",
        "architectures = ['blackwell', 'hopper']",
        "chips = ['GH100']",
        "chip_ids = ['41e23d711e1c4fbfac']",
        "min_driver = '550.144.03'",
        "min_driver = '550.90.07'",
        "min_driver = '550'",
        "min_vbios = { hopper = '96.00.9F.00.01', blackwell = '97.00' }",
        "min_vbios = { hopper = '96.00.74.00.1C' }",
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
        ("min_driver = '550.144.04'", "driver version"),
        ("min_driver = '1000'", "driver version"),
        ("min_vbios = { hopper = '96.00.A0.00.00' }", "VBIOS version"),
        ("modes = ['MPT', 'PPCIE']", "confidential mode"),
        ("revocation = 'required'", "revocation"),
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
        check(text, Matched(replace(Report(), **change)))


@pytest.mark.parametrize("change", [{"revocation_checked_at": None}, {"valid_until": NOW - DAY}])
def test_manifests_are_judged_as_the_reports_are(change):
    with pytest.raises(AttestationError, match="reference manifest of the GPU 0 report"):
        check("", Matched(rims=(Manifest(), replace(Manifest(), **change))))


def test_a_report_without_manifests_is_refused_unless_allowed():
    with pytest.raises(AttestationError, match="match_measurements"):
        check("", Report())
    check("require_manifests = false", Report())
    check("require_manifests = false", Matched())


def test_a_device_counts_once():
    with pytest.raises(AttestationError, match="Ask each device for its own report") as raised:
        check("", Matched(), Matched(replace(Report(), evidence="GPU 1 report")))
    assert (raised.value.evidence, raised.value.field) == ("GPU 1 report", "chip id")


def test_switches_do_not_count_as_gpus():
    check("count = 8\nmin_driver = '550'\nmodes = ['SPT']", *several(8), Matched(SWITCH))
    with pytest.raises(AttestationError, match="number of GPUs"):
        check("", Matched(SWITCH))
    with pytest.raises(AttestationError, match="VBIOS"):
        check("min_vbios = { nvswitch = '96.10.58' }", Matched(), Matched(SWITCH))
    with pytest.raises(AttestationError, match="architecture"):
        check("architectures = ['hopper']", Matched(), Matched(SWITCH))


@pytest.mark.parametrize("count", [7, 9])
def test_another_number_of_gpus_is_refused(count):
    with pytest.raises(AttestationError, match="8"):
        check("count = 8", *several(count))


def test_gpus_are_accepted_by_a_section_alone():
    nothing = Policy.from_toml("version = 1")
    nothing.check_gpus([], now=NOW)
    with pytest.raises(AttestationError, match=r"\[gpu\]"):
        nothing.check_gpus([Matched()], now=NOW)
    with pytest.raises(AttestationError, match="number of GPUs"):
        policy().check_gpus([], now=NOW)


@pytest.mark.parametrize("thing", [None, b"report", Manifest(), Matched(report=b"report")])
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
