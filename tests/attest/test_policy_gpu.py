import json
import re
from base64 import b64decode
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache

import pytest
from helpers.cases import each
from helpers.foundry import nvidia as foundry
from helpers.foundry.authority import NOW

from fastrack import AttestationError, FormatError, attest
from fastrack.attest import GpuMode, GpuPolicy, PinnedMeasurements, Policy, Revocation
from fastrack.attest._policy_gpu import draft_gpus

DAY = timedelta(days=1)
REAL = datetime(2026, 6, 1, tzinfo=UTC)  # of evidence of real machines


def verified(device, **options):
    data = foundry.report(device, **options)
    options = {"nonce": foundry.NONCE, "roots": device.roots, "evidence": "GPU 0 report"}
    found = attest.verify_gpu_report(data, device.pem, now=NOW, **options)
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


@each(
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


@each(
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
        ("modes = ['PPCIE']", "confidential mode"),
        ("revocation = 'required'", "revocation"),
        ("revocation = 'required'\nmax_revocation_age_days = 0", "revocation"),
    ],
)
def test_a_gpu_that_does_not_fit_is_refused(text, field):
    with pytest.raises(AttestationError, match=re.escape(f"gpu.{text.split(' = ')[0]}")) as raised:
        check(text)
    assert raised.value.field == field


@each(
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
    with pytest.raises(AttestationError, match=r"`fastrack attest fetch`.*match_measurements"):
        check("", REPORT)
    check("require_manifests = false", REPORT)
    check("require_manifests = false", MATCHED)


NAME = f"GH100 {foundry.DRIVER} {foundry.VBIOS_TEXT}"


def pinned(*, name=NAME, until="2099-01-31", **digests):
    values = {**dict(enumerate(foundry.MEASUREMENTS)), **{int(at[2:]): value for at, value in digests.items()}}
    texts = ", ".join(f"{index} = '{value.hex()}'" for index, value in values.items() if value is not None)
    return f"measurements = {{ '{name}' = {{ until = '{until}', digests = {{ {texts} }} }} }}"


class TestPinned:
    """Measurements that a policy knows by itself, for want of NVIDIA's manifest of a driver."""

    def test_they_stand_for_a_manifest_that_is_absent(self):
        check(pinned(), REPORT)
        check(pinned(at5=None), REPORT)  # an index that is left open
        for other in (NAME + "1", NAME.lower()):
            with pytest.raises(AttestationError, match=f"with reference manifests.*got ones of '{NAME}' that"):
                check(pinned(name=other), REPORT)

    def test_another_measurement_is_refused(self):
        for more in ("", "\nrequire_manifests = false"):
            with pytest.raises(
                AttestationError, match=r"pinned values at all of 64 indexes.*2 others, at 7, 61"
            ) as raised:
                check(pinned(at7=b"x" * 48, at61=b"y" * 48) + more, REPORT)
        assert raised.value.field == "measurements"
        with pytest.raises(AttestationError, match="1 others, at 64"):
            check(pinned(at64=bytes(48)), REPORT)

    def test_they_count_for_nothing_where_the_manifests_are_there(self):
        check(pinned(at7=b"x" * 48), MATCHED)

    def test_none_at_all_are_refused(self):
        with pytest.raises(ValueError, match="of one index or more"):
            PinnedMeasurements(NOW, {})

    def test_they_end(self):
        day = f"{NOW:%Y-%m-%d}"
        with pytest.raises(AttestationError, match=rf"until a later time.*ones until {day}.*attest fetch"):
            check(pinned(until=day), REPORT, now=NOW)
        check(pinned(until=f"{NOW + DAY:%Y-%m-%d}"), REPORT, now=NOW)

    def test_a_draft_has_them_as_a_comment_and_accepts_the_machine_once_they_are_lines(self):
        other = replace(REPORT, chip_id="A1", measurements=(*REPORT.measurements[:63], b"z" * 48))
        lines = [str(line) for line in draft_gpus([REPORT, other])]
        (line,) = [line for line in lines if "\n# measurements = " in line]
        assert "IF YOU APPROVED THEM BY OTHER MEANS" in line
        text = line.replace("\n# ", "\n")
        (drafted,) = policy(text).gpu.measurements.values()
        assert (drafted.until - NOW).days in {29, 30}
        assert drafted.digests == dict(enumerate(REPORT.measurements[:63]))  # what both have in common
        check("count = 2\n" + text, REPORT, other)
        assert not any("measurements" in str(line) for line in draft_gpus([MATCHED]) if line.key == "measurements")

    def test_two_policies_differ_by_the_indexes_of_measurements(self):
        before, after = (f"[gpu]\n{text}" for text in (pinned(), pinned(at9=b"x" * 48)))
        (change,) = attest.compare_policies(before, after)
        assert change == f"gpu.measurements.{NAME}.digests.9: {'09' * 48} -> {'78' * 48}"

    @each(
        "text",
        [
            "measurements = 7",
            "measurements = { a = 7 }",
            "measurements = { a = { until = '2027-01-31' } }",
            "measurements = { a = { until = '2027-01-31', digests = {} } }",
            "measurements = { a = { until = '2027-02-31', digests = { 0 = '00' } } }",
            "measurements = { a = { until = 2027-01-31, digests = { 0 = '00' } } }",
            "measurements = { a = { until = '2027-01-31', digests = { 0 = '00' } } }",
            f"measurements = {{ a = {{ until = '2027-01-31', digests = {{ 00 = '{'00' * 48}' }} }} }}",
            f"measurements = {{ a = {{ until = 'never', digests = {{ 0 = '{'00' * 48}' }} }} }}",
        ],
    )
    def test_malformed_ones_are_refused(self, text):
        with pytest.raises(FormatError, match=r"gpu\.measurements"):
            policy(text)


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


# Protected PCIe: eight GPUs whose NVLinks carry plain data through four switches.


PPCIE = "modes = ['PPCIE']\nrequire_manifests = false"


@cache
def protected(gpus=8, switches=4):
    made = foundry.protected(gpus, switches)
    return [verified(device, fields=fields) for device, fields in made]


def refused_in(text, devices):
    with pytest.raises(AttestationError) as raised:
        check(text, *devices)
    return raised.value


def test_protected_pcie_is_accepted_if_the_policy_asks_for_it():
    devices = protected()
    assert {device.mode for device in devices if not device.is_switch} == {GpuMode.PROTECTED_PCIE}
    for text in (PPCIE, "modes = ['SPT', 'PPCIE']\nrequire_manifests = false\ncount = 8\nswitch_count = 4"):
        check(text, *devices)
        check(text, *reversed(devices))
    for text in ("", "modes = ['SPT', 'MPT']\n"):
        assert refused_in(f"{text}require_manifests = false", devices).field == "confidential mode"


def test_switches_have_manifests_too():
    assert refused_in("modes = ['PPCIE']", protected()).field == "measurements"
    gpus, switches = protected()[:8], protected()[8:]
    found = [replace(MATCHED, report=gpu) for gpu in gpus] + [replace(SWITCH, report=switch) for switch in switches]
    check("modes = ['PPCIE']", *found)
    assert "switch" not in refused_in("modes = ['PPCIE']", [*found[:11], switches[3]]).field
    unchecked = replace(found[11], report=replace(switches[3], revocation_checked_at=None))
    assert refused_in("modes = ['PPCIE']", [*found[:11], unchecked]).field == "revocation"


def test_fewer_or_more_devices_than_the_machine_has_are_refused():
    devices = protected()
    for dropped in range(12):
        error = refused_in(PPCIE, devices[:dropped] + devices[dropped + 1 :])
        assert error.field == ("number of GPUs" if dropped < 8 else "number of switches")
    assert refused_in(PPCIE, devices[:8]).field == "number of switches"
    assert refused_in(PPCIE, devices[8:]).field == "number of GPUs"
    for text in ("\ncount = 4", "\nswitch_count = 3"):
        assert refused_in(PPCIE + text, devices).field.startswith("number of")
    check(f"{PPCIE}\ncount = 4\nswitch_count = 2", *protected(4, 2))


def test_a_device_that_is_dropped_where_fewer_are_allowed_is_missed_by_the_others():
    devices = protected()
    assert refused_in(f"{PPCIE}\ncount = 7", devices[1:]).field == "links"
    assert refused_in(f"{PPCIE}\nswitch_count = 3", devices[:11]).field == "links"


def test_a_switch_or_gpu_counts_once():
    devices = protected()
    for place in (1, 9):
        doubled = [*devices[:place], replace(devices[place - 1], evidence="GPU 12 report"), *devices[place + 1 :]]
        assert refused_in(PPCIE, doubled).field == "chip id"


def test_foreign_devices_are_refused():
    devices = protected()
    for place in range(12):
        foreign = replace(devices[place], chip_id=devices[place].chip_id[:-4] + "F00D")
        assert refused_in(PPCIE, [*devices[:place], foreign, *devices[place + 1 :]]).field == "links"
        lonely = replace(devices[place], linked_to=frozenset())
        assert refused_in(PPCIE, [*devices[:place], lonely, *devices[place + 1 :]]).field == "links"


def test_gpus_that_switches_do_not_name_are_refused():
    """The GPUs of another machine name these switches, whose lists have the machine's own."""
    devices = protected()
    strangers = [replace(one, chip_id=f"41{number:016X}") for number, one in enumerate(devices[:8], 1)]
    error = refused_in(PPCIE, strangers + devices[8:])
    assert (error.evidence, error.field) == (devices[8].evidence, "links")


def test_a_gpu_in_another_mode_is_refused_beside_protected_ones():
    devices = protected()
    for mode in (None, GpuMode.SINGLE, GpuMode.MULTI):
        mixed = [replace(devices[0], mode=mode), *devices[1:]]
        for text in ("modes = ['SPT', 'MPT', 'PPCIE']\nrequire_manifests = false", PPCIE):
            assert refused_in(text, mixed).field == "confidential mode"


def test_a_switch_that_is_not_locked_is_refused():
    devices = protected()
    assert refused_in(PPCIE, [*devices[:11], replace(devices[11], is_locked=False)]).field == "lock"


@pytest.mark.parametrize("names", [("ppcie_8_gpus", "ppcie_4_switches"), ("ppcie_b_8_gpus", "ppcie_b_4_switches")])
def test_real_machines_in_protected_pcie_mode_name_each_other(evidence, names):
    gpus, switches = (real(evidence, name) for name in names)
    text = f"{PPCIE}\nrevocation = 'none'"
    check(text, *gpus, *switches, now=REAL)
    without_modes = text.partition("\n")[2]
    assert refused_at_real(without_modes, gpus + switches).field == "confidential mode"
    for dropped in range(12):
        devices = gpus + switches
        del devices[dropped]
        assert refused_at_real(text, devices)
    assert refused_at_real(text, gpus + [switches[0]] * 4).field == "chip id"
    foreign = real(evidence, "ppcie_b_4_switches" if names[1] == "ppcie_4_switches" else "ppcie_4_switches")
    assert refused_at_real(text, gpus + foreign).field == "links"


def test_real_gpus_with_encrypted_nvlinks_need_no_switch(evidence):
    devices = real(evidence, "mpt_8_gb100")
    assert {device.mode for device in devices} == {GpuMode.MULTI}
    check("require_manifests = false\nrevocation = 'none'\ncount = 8", *devices, now=REAL)


def refused_at_real(text, devices):
    with pytest.raises(AttestationError) as raised:
        check(text, *devices, now=REAL)
    return raised.value


def real(evidence, name):
    """Verify the reports in a file of recorded evidence."""
    path = evidence / "wire" / "nvidia" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no {path.name} among the real evidence")
    found = []
    for number, item in enumerate(json.loads(path.read_text())):
        report, chain = b64decode(item["evidence"]), b64decode(item["certificate"])
        nonce, title = bytes.fromhex(item["nonce"]), f"{name} {number} report"
        found.append(attest.verify_gpu_report(report, chain, nonce=nonce, now=REAL, evidence=title))
    return found


def test_gpus_are_accepted_by_a_section_alone():
    nothing = Policy.from_toml("version = 1")
    nothing.check_gpus([], now=NOW)
    with pytest.raises(AttestationError, match=r"\[gpu\]"):
        nothing.check_gpus([MATCHED], now=NOW)
    with pytest.raises(AttestationError, match="number of GPUs"):
        policy().check_gpus([], now=NOW)


@each("thing", [None, b"report", RIMS[0], attest.parse_gpu_report(foundry.report(foundry.hopper()))])
def test_what_was_not_verified_is_not_judged(thing):
    with pytest.raises(TypeError, match="verify the evidence first"):
        check("", thing)


def test_the_defaults_are_strict():
    assert policy().gpu == GpuPolicy()
    assert policy().gpu.revocation is Revocation.CACHED
    assert policy().gpu.require_manifests


@each(
    ("text", "said"),
    [
        ("count = 0", "an integer from 1 as gpu.count"),
        ("switch_count = 0", "an integer from 1 as gpu.switch_count"),
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
