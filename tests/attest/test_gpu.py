import json
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from cryptography import x509
from helpers import pyca_chain
from helpers.cases import each
from helpers.foundry import nvidia as foundry
from helpers.foundry.authority import LONG, NOW, Authority, flips, is_refused, rsa_key
from helpers.foundry.nvidia import NONCE
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastrack import AttestationError, FormatError, attest
from fastrack.attest import GpuArchitecture, GpuMode
from fastrack.attest._formats.x509 import load_chain, verify_chain


def verify(device=None, report=None, *, nonce=NONCE, now=NOW, **options):
    device = device or foundry.hopper()
    report = foundry.report(device) if report is None else report
    return attest.verify_gpu_report(report, device.pem, nonce=nonce, now=now, roots=device.roots, **options)


# Good ones.


def test_a_good_report_of_a_hopper_gpu_is_verified():
    device = foundry.hopper()
    verified = verify(device)
    assert type(verified) is attest.VerifiedGpuReport
    assert verified.architecture is GpuArchitecture.HOPPER
    assert (verified.model, verified.chip, verified.chip_id) == ("GH100 A01 GSP BROM", "GH100", "41E23D711E1C4FBFAC")
    assert verified.ueid == device.leaf.certificate.serial_number
    assert (verified.project, verified.project_sku, verified.chip_sku) == ("1010", "0205", "862")
    assert (verified.driver_version, verified.vbios_version) == ("580.159.03", "96.00.74.00.20")
    assert verified.mode is GpuMode.SINGLE
    assert (verified.is_pcie_protected, verified.is_nvdec_enabled, verified.is_switch) == (False, False, False)
    assert (verified.fwid, verified.nonce) == (foundry.FWID, NONCE)
    assert verified.measurements == foundry.MEASUREMENTS
    assert verified.verified_at == NOW
    assert verified.valid_until == NOW + LONG
    assert verified.revocation_checked_at is None
    assert verified.rim_ids == ("NV_GPU_DRIVER_GH100_580.159.03", "NV_GPU_VBIOS_1010_0205_862_9600740020")


def test_a_good_report_of_a_blackwell_gpu_is_verified():
    device = foundry.blackwell()
    fields = foundry.gpu_fields(version=None, feature=None, pcie=None, nvdec=b"\xaa")
    verified = verify(device, foundry.report(device, fields=fields))
    assert verified.architecture is GpuArchitecture.BLACKWELL
    assert (verified.mode, verified.is_pcie_protected, verified.is_nvdec_enabled) == (None, None, True)
    assert verified.rim_ids[0] == "NV_GPU_CC_DRIVER_GB100_580.159.03"
    fields = foundry.gpu_fields(chip=b"GB200\0")
    verified = verify(device, foundry.report(device, fields=fields))
    assert verified.chip == "GB200"
    assert verified.rim_ids[0] == "NV_GPU_CC_DRIVER_GB200_580.159.03"


def test_a_good_report_of_a_switch_is_verified():
    device = foundry.switch()
    verified = verify(device, foundry.report(device, fields=foundry.switch_fields(), measurements=[bytes(48)] * 31))
    assert verified.is_switch
    assert (verified.chip, verified.chip_id, verified.vbios_version) == ("LS10", "50203EB31AD9ED0008", "96.10.55.00.01")
    assert (verified.driver_version, verified.project, verified.mode) == (None, None, None)
    assert len(verified.measurements) == 31
    assert verified.rim_ids == ("NV_SWITCH_BIOS_5612_0002_890_9610550001",)


@each(
    ("fields", "mode"),
    [
        ({"feature": b"\0\0"}, GpuMode.SINGLE),
        ({"feature": b"\1\0"}, GpuMode.MULTI),
        ({"feature": b"\1\0", "pcie": None}, GpuMode.MULTI),
        ({"feature": b"\2\0", "pcie": b"\xaa"}, GpuMode.PROTECTED_PCIE),
        ({"feature": None, "version": None, "pcie": b"\xaa"}, GpuMode.PROTECTED_PCIE),  # as of driver 570
        ({"feature": None, "version": b"\0\0", "pcie": b"\xaa"}, GpuMode.PROTECTED_PCIE),
        ({"feature": None, "version": None}, None),
        ({"feature": None, "version": None, "pcie": None}, None),
    ],
)
def test_the_mode_is_reported_and_not_judged(fields, mode):
    fields = foundry.gpu_fields(**fields)
    assert verify(report=foundry.report(foundry.hopper(), fields=fields)).mode is mode


def test_links_are_read_in_the_order_of_bytes_of_each_kind():
    links = bytes.fromhex("0800edd91ab33e20") * 2 + bytes(16 * 8)
    fields = foundry.gpu_fields(switches=links)
    found = verify(report=foundry.report(foundry.hopper(), fields=fields))
    assert (found.linked_to, found.is_locked) == ({"50203EB31AD9ED0008"}, None)
    fields = foundry.switch_fields(gpus=[bytes.fromhex("e23d711e1c4fbfac")])
    found = verify(foundry.switch(), foundry.report(foundry.switch(), fields=fields))
    assert (found.linked_to, found.is_locked) == ({"41E23D711E1C4FBFAC"}, True)
    for lock in (b"\0\0", b"\0\1", b"\1", None):
        fields = foundry.switch_fields(lock=lock)
        assert verify(foundry.switch(), foundry.report(foundry.switch(), fields=fields)).is_locked is False
    assert verify().linked_to == frozenset()


@each("pdi", [None, b"", bytes(8), bytes.fromhex("203eb31ad9ed0009")])
def test_a_switch_that_names_another_device_than_its_certificate_is_refused(pdi):
    report = foundry.report(foundry.switch(), fields=foundry.switch_fields(pdi=pdi))
    with pytest.raises(AttestationError) as caught:
        verify(foundry.switch(), report)
    assert caught.value.field == "device id"


def test_zeros_may_follow_a_report():
    report = foundry.report(foundry.hopper())
    for zeros in (1, 4096):
        assert verify(report=report + bytes(zeros)) == verify(report=report)
        assert attest.parse_gpu_report(report + bytes(zeros)).data == report
        with pytest.raises(FormatError, match=f"padding at offset {len(report) + zeros}"):
            verify(report=report + bytes(zeros) + b"\1")


def test_a_firmware_id_need_not_be_reported():
    fields = foundry.gpu_fields(fwid=None)
    assert verify(report=foundry.report(foundry.hopper(), fields=fields)).fwid == foundry.FWID


def test_a_parsed_report_is_parsed_again_from_its_bytes():
    report = attest.parse_gpu_report(foundry.report(foundry.hopper()))
    forged = replace(report, measurements=(), signed=b"", nonce=bytes(32))
    assert verify(report=forged).measurements == foundry.MEASUREMENTS
    assert report.field(3) == b"580.159.03\0"
    assert report.field(99) is None


def test_errors_name_the_device():
    with pytest.raises(AttestationError, match=r"nonce of the GPU 3 report failed: expected 0909.*, got 00") as caught:
        verify(nonce=b"\x09" * 32, evidence="GPU 3 report")
    assert (caught.value.evidence, caught.value.field) == ("GPU 3 report", "nonce")
    assert (caught.value.wanted, caught.value.found) == ("09" * 32, NONCE.hex())


def test_a_nonce_of_another_size_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="32 bytes, got 31"):
        verify(nonce=bytes(31))


def test_revocation_is_checked_where_responses_are_passed():
    device = foundry.hopper()
    responses = foundry.statuses(device.chain[1:])
    verified = verify(ocsp=responses)
    assert verified.revocation_checked_at == NOW - foundry.DAY
    assert verified.valid_until == NOW + foundry.DAY
    for absent in range(3):
        with pytest.raises(AttestationError, match="expected a response for it, got none among 2"):
            verify(ocsp=responses[:absent] + responses[absent + 1 :])
    with pytest.raises(AttestationError, match="none among 0"):
        verify(ocsp=[])
    bad = foundry.status(device.chain[2], device.chain[3], good=False)
    for revoked in ([responses[0], bad, responses[2]], [*responses, bad]):  # one good response does not outweigh it
        with pytest.raises(AttestationError, match=r"expected good, got revoked since 2026-05-31.* \(keyCompromise\)"):
            verify(ocsp=revoked)


# Reports and chains that are wrong.


def wrong_reports():
    device, other = foundry.hopper(), foundry.blackwell()
    fields = foundry.gpu_fields
    return {
        "it is signed by another key": foundry.report(device, key=foundry.new_key()),
        "it is signed by another device": foundry.report(device, key=other.leaf.key),
        "the firmware is another one": foundry.report(device, fields=fields(fwid=bytes(48))),
        "the nonce is another one": foundry.report(device, nonce=bytes(32)),
    }


@each("report", wrong_reports)
def test_a_report_is_refused_if(report):
    with pytest.raises(AttestationError):
        verify(report=report)


def malformed_reports():
    def of(**options):
        return foundry.report(foundry.hopper(), **options)

    fields = foundry.gpu_fields
    opaque = foundry.opaque(fields())
    block = foundry.block
    return {
        "SPDM version of the request": of(request=b"\x12\xe0\x01\xff"),
        "code of the request": of(request=b"\x11\xe1\x01\xff"),
        "attributes of the request": of(request=b"\x11\xe0\x00\xff"),
        "measurement operation": of(request=b"\x11\xe0\x01\x01"),
        "SPDM version of the response": of(response=b"\x10\x60\0\0"),
        "code of the response": of(response=b"\x11\x7f\0\0"),
        "measurement index": of(record=block(2, bytes(48)), count=1),
        "measurement index ": of(record=block(1, bytes(48)) + block(1, bytes(48)), count=2),
        "measurement index  ": of(record=block(1, bytes(48)), count=2),
        "measurement specification": of(record=block(1, bytes(48), specification=2), count=1),
        "type of the value": of(record=block(1, bytes(48), kind=0x81), count=1),
        "size of the value": of(record=block(1, bytes(32)), count=1),
        "end": of(record=block(1, bytes(48)) + b"\0", count=1),
        "end ": of(record=block(1, bytes(48)) * 2, count=1),
        "padding": of() + b"\0\1",
        "field 6": of(data=opaque[:9]),
        "size of a field": of(data=opaque + b"\1\2\3"),
        "number of a field": of(data=opaque + opaque[:12]),
        "format": of(data=b"NVDAOD\0\0\2\0\0\0" + opaque),
        "version of the opaque data": of(fields=fields(version=b"\2\0")),
        "driver version": of(fields=fields(driver=None)),
        "driver version ": of(fields=fields(driver=b"580\n159\0")),
        "driver version  ": of(fields=fields(driver=b"\0\0")),
        "project": of(fields=fields(project=b"\xc3\xa9\0")),
        "project SKU": of(fields=fields(project_sku=None)),
        "chip SKU": of(fields=fields(chip_sku=b"8\0006")),
        "chip": of(fields=fields(chip=b"")),
        "VBIOS version": of(fields=fields(vbios=foundry.VBIOS[:7])),
        "VBIOS version ": of(fields=fields(vbios=foundry.VBIOS[:7] + b"\1")),
        "VBIOS version  ": of(fields=fields(vbios=None)),
        "status of the video decoder": of(fields=fields(nvdec=b"\x56")),
        "status of protected PCIe": of(fields=fields(pcie=b"\x55\x55")),
        "feature flag": of(fields=fields(feature=b"\3\0")),
        "feature flag ": of(fields=fields(feature=None)),
        "feature flag  ": of(fields=fields(feature=b"\2\0")),
        "feature flag   ": of(fields=fields(feature=b"\2\0", pcie=None)),
        "feature flag    ": of(fields=fields(pcie=b"\xaa")),
        "feature flag     ": of(fields=fields(feature=b"\1\0", pcie=b"\xaa")),
        "linked switches": of(fields=fields(switches=bytes(143))),
    }


@each(("field", "report"), malformed_reports)
def test_a_malformed_report_is_told_with_its(field, report):
    with pytest.raises(FormatError, match=f"as its {field.strip()}"):
        verify(report=report)


def with_rsa_provisioner():
    hopper = foundry.hopper()
    ica = Authority("NVIDIA GH100 Provisioner ICA 1", hopper.chain[3], key=rsa_key("provisioner"))
    rom = Authority(foundry.device_name("GH100 A01 GSP BROM", "41E23D711E1C4FBFAC"), ica, key=foundry.new_key())
    made = [(foundry.COMPOSITE, foundry.composite(rom))]
    leaf = Authority(hopper.leaf.subject, rom, key=foundry.new_key(), ca=False, extensions=made)
    return foundry.Device((leaf, rom, ica, *hopper.chain[3:]))


def wrong_devices():
    hopper = foundry.hopper()
    stranger = Authority("NVIDIA Device Identity CA", key=foundry.new_key())
    rom = hopper.chain[1]
    return {
        "the leaf is of another chip": foundry.device(leaf="GB100 A01 GSP FMC LF"),
        "the provisioner is of another chip": foundry.device(provisioner="NVIDIA GB100 Provisioner ICA 1"),
        "the provisioner is of another kind": foundry.device(provisioner="NVIDIA GH100 Reference CA"),
        "it is a network card": foundry.device("CX700"),
        "the leaf has expired": foundry.device(end=NOW - foundry.DAY),
        "the leaf is an authority": foundry.device(ca=True, basic=True),
        "the key of the leaf is of another curve": foundry.device(key=Authority("x").key),
        "the chain is too short": foundry.Device(hopper.chain[:2] + hopper.chain[3:]),
        "the chain has no root": foundry.Device(hopper.chain[:4]),
        "the chain has another root": foundry.Device((*hopper.chain[:4], stranger)),
        "the chain is in reverse order": foundry.Device(hopper.chain[::-1]),
        "the leaf is of another device": foundry.Device((hopper.leaf, *foundry.device().chain[1:])),
        "an authority has an RSA key": with_rsa_provisioner(),
        "the extension has another device's key": foundry.device(extension=(foundry.COMPOSITE, foundry.composite(rom))),
        "a critical extension is unknown": foundry.device(extension=("1.2.3", b"\5\0"), critical=["1.2.3"]),
    }


@each("device", wrong_devices)
def test_a_chain_is_refused_if(device):
    with pytest.raises(AttestationError):
        verify(device)


def test_a_chain_must_lead_to_a_pinned_root():
    device = foundry.hopper()
    report = foundry.report(device)
    for roots in ({}, attest.NVIDIA_ROOTS, [foundry.device_root().fingerprint[:-1]]):
        with pytest.raises(AttestationError, match="root"):
            attest.verify_gpu_report(report, device.pem, nonce=NONCE, now=NOW, roots=roots)
    with pytest.raises(AttestationError, match="root"):
        attest.verify_gpu_report(report, device.pem, nonce=NONCE, now=NOW)


def malformed_extensions():
    rom = foundry.hopper().chain[1]
    composite, tcb = foundry.composite(rom), foundry.tcb_info()
    of = foundry.fwid
    return {
        "absent": None,
        "other version": (foundry.COMPOSITE, foundry.composite(rom, version=2)),
        "other digest": (foundry.COMPOSITE, composite[:-50] + b"\x04\x2f" + bytes(47)),
        "trailing byte": (foundry.COMPOSITE, composite + b"\0"),
        "cut": (foundry.COMPOSITE, composite[:-1]),
        "empty": (foundry.COMPOSITE, b""),
        "tcb info without digests": (foundry.TCB_INFO, foundry.tcb_info(fwids=b"")),
        "tcb info with another hash": (foundry.TCB_INFO, foundry.tcb_info(fwids=of(oid=b"\x06\x01\x2a"))),
        "tcb info with a short digest": (foundry.TCB_INFO, foundry.tcb_info(fwids=of(bytes(47)))),
        "tcb info twice a member": (foundry.TCB_INFO, foundry.der(0x30, *2 * [foundry.der(0xA6, foundry.fwid())])),
        "tcb info with a trailing byte": (foundry.TCB_INFO, tcb + b"\0"),
    }


@each("extension", malformed_extensions)
def test_an_extension_is_malformed(extension):
    with pytest.raises((FormatError, AttestationError)):
        verify(foundry.device(extension=extension))


@each("serial", [None, "41e23d711e1c4fbfac", "41E2", "GH" * 9])
def test_a_device_must_have_a_serial_number(serial):
    with pytest.raises(FormatError, match="chip id"):
        verify(foundry.device(serial=serial))


# Every byte.


def short_report(device):
    """Return a report with two measurements, as one more is parsed like these and signed with them."""
    return foundry.report(device, measurements=foundry.MEASUREMENTS[:2])


@pytest.mark.slow
def test_every_byte_of_a_report_counts():
    device = foundry.hopper()
    report = short_report(device)
    verify(device, report)
    accepted = [index for index, bad in flips(report) if not is_refused(verify, device, bad)]
    assert accepted == []


@pytest.mark.slow
@pytest.mark.parametrize("make", [foundry.hopper, foundry.blackwell])
def test_every_byte_of_a_chain_counts(make):
    device = make()
    report = short_report(device)

    def check(chain):
        attest.verify_gpu_report(report, chain, nonce=NONCE, now=NOW, roots=device.roots)

    check(device.pem)
    accepted = [index for index, bad in flips(device.pem) if not is_refused(check, bad)]
    assert accepted == []


# Garbage.


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
@example(b"\x11\xe0\x01\xff" + bytes(33) + b"\x11\x60\0\0" + bytes(38))
def test_garbage_is_a_format_error(data):
    for value in (data, b"\x11\xe0\x01\xff" + bytes(33) + b"\x11\x60\0\0" + data):
        with suppress(FormatError):
            attest.parse_gpu_report(value)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=120), st.sampled_from([foundry.COMPOSITE, foundry.TCB_INFO]), st.booleans())
@pytest.mark.slow
def test_garbage_in_an_extension_is_refused(data, oid, is_wrapped):
    value = foundry.der(0x30, data) if is_wrapped else data
    assert is_refused(verify, garbled(oid, value))


def garbled(oid, value):
    device = foundry.hopper()
    name, options = foundry.device_name("GH100 A01 GSP FMC LF"), {"key": device.leaf.key, "extensions": [(oid, value)]}
    leaf = Authority(name, device.chain[1], ca=False, **options)
    return foundry.Device((leaf, *device.chain[1:]))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_chains_are_judged_as_the_verifier_of_cryptography_does(data):
    """The links that are kept must not change the verdict, whatever is done to the order of a chain."""
    made = [*foundry.hopper().chain, *foundry.blackwell().chain]
    picked = data.draw(st.lists(st.sampled_from(made), min_size=1, max_size=6))
    chain = picked if data.draw(st.booleans()) else list(foundry.hopper().chain)
    now = data.draw(st.sampled_from([NOW, NOW + 2 * LONG]))
    certificates = [one.certificate for one in chain]
    options = {"roots": foundry.hopper().roots, "now": now, "evidence": "chain"}
    ours = is_refused(lambda: verify_chain(certificates, **options))
    assert ours == is_refused(lambda: pyca_chain.verify_chain(certificates, **options))


# Evidence of real devices.

WHEN = datetime(2026, 6, 1, tzinfo=UTC)


def real(evidence, name, chain=None):
    folder = evidence / "nvidia"
    report = bytes.fromhex((folder / f"{name}.txt").read_text())
    return report, (folder / f"{chain or name.replace('report', 'chain')}.txt").read_bytes()


@pytest.mark.parametrize(
    ("name", "chip", "version", "mode"),
    [
        ("hopper_report", "GH100", "580.159.03", GpuMode.SINGLE),
        ("blackwell_report", "GB100", "575.32", None),
        ("switch_report", "LS10", None, None),
    ],
)
def test_the_report_of_a_real_device_holds(evidence, name, chip, version, mode):
    report, chain = real(evidence, name)
    verified = attest.verify_gpu_report(report, chain, nonce=report[4:36], now=WHEN)
    assert (verified.chip, verified.driver_version, verified.mode) == (chip, version, mode)
    assert verified.valid_until.year == 9999
    with pytest.raises(AttestationError, match="nonce"):
        attest.verify_gpu_report(report, chain, nonce=bytes(32), now=WHEN)


def test_a_real_report_is_parsed_as_another_parser_does(evidence):
    report, _ = real(evidence, "hopper_report")
    parsed = attest.parse_gpu_report(report)
    other = json.loads((evidence / "nvidia" / "hopper_report_parsed.json").read_text())
    blocks = other["MeasurementRecord"]["MeasurementBlocks"]
    assert len(blocks) == len(parsed.measurements)
    for index, block in blocks.items():
        assert f"0x{parsed.measurements[int(index) - 1].hex()}" == block["DMTFSpecMeasurementValue"]
    assert f"0x{parsed.signature.hex()}" == other["Signature"]


def test_an_altered_real_report_is_refused(evidence):
    report, chain = real(evidence, "hopper_report_bad_signature", "hopper_bad_signature_chain")
    with pytest.raises(AttestationError, match="signature of the GPU report"):
        attest.verify_gpu_report(report, chain, nonce=report[4:36], now=WHEN)


def test_the_chain_of_another_real_device_is_refused(evidence):
    report, _ = real(evidence, "hopper_report")
    for name in ("blackwell_report", "switch_report"):
        with pytest.raises(AttestationError, match="signature"):
            attest.verify_gpu_report(report, real(evidence, name)[1], nonce=report[4:36], now=WHEN)


@pytest.mark.parametrize("name", ["hopper", "blackwell", "switch"])
def test_the_verifier_of_cryptography_accepts_the_chains_of_real_devices_too(evidence, name):
    certificates = load_chain((evidence / "nvidia" / f"{name}_chain.txt").read_bytes(), evidence="chain")
    for check in (verify_chain, pyca_chain.verify_chain):
        chain = check(certificates, roots=attest.NVIDIA_ROOTS, now=WHEN, evidence="chain")
        assert isinstance(chain.leaf, x509.Certificate)
