import pickle
from datetime import UTC, datetime

import pytest
from helpers.cases import each
from helpers.foundry import nvidia as foundry
from helpers.foundry.authority import NOW
from helpers.foundry.nvidia import resource

from fastrack import AttestationError, attest

WHEN = datetime(2026, 6, 1, tzinfo=UTC)


def report(device=None, **options):
    device = device or foundry.hopper()
    data = foundry.report(device, **options)
    options = {"nonce": foundry.NONCE, "roots": device.roots, "evidence": "GPU 3 report"}
    return attest.verify_gpu_report(data, device.pem, now=NOW, **options)


def rim(data):
    return attest.verify_rim(data, now=NOW, roots=foundry.rim_signer().roots)


def rims():
    return [rim(foundry.rim()), rim(foundry.vbios_rim())]


def changed(index):
    return [bytes(48) if number == index else value for number, value in enumerate(foundry.MEASUREMENTS)]


def test_a_gpu_matches_its_manifests():
    found = attest.match_measurements(report(), rims())
    assert type(found) is attest.MatchedGpuReport
    assert found.matched == (0, 1, 2, 7, 23, 40)
    assert found.skipped == (35,)
    assert set(found.uncovered) == set(range(64)) - {0, 1, 2, 7, 23, 35, 40}
    assert [one.rim.version for one in found.rims] == [foundry.DRIVER, foundry.VBIOS_TEXT]
    assert pickle.loads(pickle.dumps(found)) == found


def test_the_order_of_manifests_does_not_matter():
    of, given = report(), rims()
    assert attest.match_measurements(of, given[::-1]) == attest.match_measurements(of, given)


def test_a_switch_matches_its_manifest():
    of = report(foundry.switch(), fields=foundry.switch_fields(), measurements=foundry.MEASUREMENTS[:31])
    found = attest.match_measurements(of, [rim(foundry.switch_rim())])
    assert (found.matched, found.skipped, found.uncovered) == (tuple(range(31)), (), ())
    for wrong in (rims(), [], [rim(foundry.switch_rim(edition="GPU"))], [rim(foundry.switch_rim(product="GH100"))]):
        with pytest.raises(AttestationError, match="reference manifests"):
            attest.match_measurements(of, wrong)


@each("index", [0, 1, 2, 7, 23, 40])
def test_any_measurement_with_a_reference_value_must_have_it(index):
    measurements = [b"\xdd" * 48 if number == index else value for number, value in enumerate(foundry.MEASUREMENTS)]
    with pytest.raises(AttestationError) as caught:
        attest.match_measurements(report(measurements=measurements), rims())
    assert caught.value.evidence == "GPU 3 report"
    assert f"1 others, at {index} (Measurement_{index})" in str(caught.value)


@each("index", [3, 22, 35, 63])
def test_a_measurement_without_one_may_be_anything(index):
    attest.match_measurements(report(measurements=changed(index)), rims())


def test_any_of_several_values_will_do():
    attest.match_measurements(report(measurements=changed(23)), rims())


def test_the_video_decoder_is_measured_where_it_is_on():
    on = foundry.gpu_fields(nvdec=b"\xaa")
    with pytest.raises(AttestationError, match="1 others, at 35"):
        attest.match_measurements(report(fields=on), rims())
    measurements = [b"\xee" * 48 if number == 35 else value for number, value in enumerate(foundry.MEASUREMENTS)]
    found = attest.match_measurements(report(fields=on, measurements=measurements), rims())
    assert 35 in found.matched
    assert found.skipped == ()
    unknown = foundry.gpu_fields(nvdec=None)
    with pytest.raises(AttestationError, match="1 others, at 35"):
        attest.match_measurements(report(fields=unknown), rims())


def test_a_report_with_fewer_measurements_is_refused():
    with pytest.raises(AttestationError, match=r"1 others, at 40.*newest revision.*do not trust"):
        attest.match_measurements(report(measurements=foundry.MEASUREMENTS[:40]), rims())
    with pytest.raises(AttestationError, match=r"6 others, at 0 .*40"):
        attest.match_measurements(report(measurements=()), rims())


def wrong_manifests():
    driver, vbios = foundry.rim(), foundry.vbios_rim()
    inactive = [resource(n, [bytes(48)], active=False) for n in range(64)]
    halves = [[resource(n, [foundry.MEASUREMENTS[n]])] for n in (0, 7)]  # which match, without an index in common
    return {
        "none": [],
        "only the driver's": [driver],
        "only the VBIOS's": [vbios],
        "the driver's twice": [driver, driver],
        "the driver's in two parts": [foundry.rim(half) for half in halves],
        "the VBIOS's in two parts": [foundry.rim(half, version=foundry.VBIOS_TEXT) for half in halves],
        "the driver's in two parts besides": [vbios, *(foundry.rim(half) for half in halves)],
        "another besides": [driver, vbios, foundry.rim(version="1")],
        "one of another driver": [foundry.rim(version="580.159.04"), vbios],
        "one of another VBIOS": [driver, foundry.vbios_rim(version="96.00.74.00.21")],
        "one of another chip": [foundry.rim(product="GB100"), vbios],
        "one of a switch": [foundry.rim(edition="SWITCH"), vbios],
        "one with no active value": [foundry.rim(inactive), vbios],
        "two with the same index": [driver, foundry.rim([resource(7, [bytes(48)])], version=foundry.VBIOS_TEXT)],
    }


@each("rims", wrong_manifests)
def test_manifests_are_refused(rims):
    with pytest.raises(AttestationError, match="reference manifests"):
        attest.match_measurements(report(), map(rim, rims))


def test_the_version_of_a_vbios_may_have_small_letters():
    device = foundry.hopper()
    fields = foundry.gpu_fields(vbios=bytes.fromhex("00d000960a000000"))
    of = report(device, fields=fields)
    assert of.vbios_version == "96.00.D0.00.0A"
    attest.match_measurements(of, [rim(foundry.rim()), rim(foundry.vbios_rim(version="96.00.d0.00.0a"))])


def test_what_was_only_parsed_is_a_mistake_of_the_caller():
    with pytest.raises(TypeError, match="expected VerifiedGpuReport, got GpuReport"):
        attest.match_measurements(attest.parse_gpu_report(foundry.report(foundry.hopper())), rims())
    with pytest.raises(TypeError, match="expected VerifiedRim, got Rim"):
        attest.match_measurements(report(), [attest.parse_rim(foundry.rim())])


def test_a_real_switch_matches_its_manifest(evidence):
    folder = evidence / "nvidia"
    data = bytes.fromhex((folder / "switch_report.txt").read_text())
    chain = (folder / "switch_chain.txt").read_bytes()
    of = attest.verify_gpu_report(data, chain, nonce=data[4:36], now=WHEN)
    manifest = attest.verify_rim((folder / "switch_rim_matching.xml").read_bytes(), now=WHEN)
    found = attest.match_measurements(of, [manifest])
    assert (found.matched, found.uncovered) == (tuple(range(31)), ())


def test_a_real_gpu_does_not_match_the_manifest_of_another_driver(evidence):
    folder = evidence / "nvidia"
    data = bytes.fromhex((folder / "hopper_report.txt").read_text())
    of = attest.verify_gpu_report(data, (folder / "hopper_chain.txt").read_bytes(), nonce=data[4:36], now=WHEN)
    driver = attest.verify_rim((folder / "rim_driver_gh100_550.144.03.xml").read_bytes(), now=WHEN)
    with pytest.raises(AttestationError, match=r"got GPU GH100 550\.144\.03"):
        attest.match_measurements(of, [driver])


def test_a_real_gpu_holds_with_its_manifests_and_what_was_answered_about_revocation(evidence):
    folder = evidence / "wire" / "nvidia" / "h100_complete"
    if not folder.is_dir():
        pytest.skip("no evidence of a whole GPU")
    data, chain = ((folder / name).read_bytes() for name in ("report.bin", "chain.pem"))
    manifests = [path.read_bytes() for path in sorted(folder.glob("*.xml"))]
    answers = {path.stem: path.read_bytes() for path in (folder / "ocsp").glob("*.der")}
    of_device = [answers.pop(name) for name in sorted(answers) if name.startswith(("41431d", "4c255e", "6afe71"))]
    asked = {"device": datetime(2025, 8, 21, 12, tzinfo=UTC), "manifests": datetime(2025, 10, 24, 18, tzinfo=UTC)}

    def judge(now, text, *, device=None, manifest=None):
        of = attest.verify_gpu_report(data, chain, nonce=data[4:36], now=now, ocsp=device)
        matched = attest.match_measurements(of, [attest.verify_rim(one, now=now, ocsp=manifest) for one in manifests])
        attest.Policy.from_toml(f"version = 1\n[gpu]\n{text}").check_gpus([matched], now=now)
        return matched

    found = judge(asked["manifests"], "revocation = 'none'")
    assert (found.report.driver_version, len(found.matched)) == ("550.90.07", 32)
    with pytest.raises(AttestationError, match="revocation"):
        judge(asked["manifests"], "")
    # The answers about the device and about its manifests are of different days.
    attest.verify_gpu_report(data, chain, nonce=data[4:36], now=asked["device"], ocsp=of_device)
    for one in manifests:
        attest.verify_rim(one, now=asked["manifests"], ocsp=list(answers.values()))
    with pytest.raises(AttestationError, match="validity of the OCSP response"):
        judge(asked["manifests"], "", device=of_device, manifest=list(answers.values()))
