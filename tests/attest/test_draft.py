"""A drafted policy accepts the offer that it was made of, and no other."""

import tomllib
from dataclasses import replace

import pytest
from helpers.foundry import nvidia, snp
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots

from fastrack import AttestationError, attest

OTHER = b"\x99"


def verify(machine, text):
    challenge = attest.Challenge.generate(now=NOW)
    offer = attest.make_offer(challenge, machine).offer
    return attest.verify_offer(offer, challenge, attest.Policy.from_toml(text), now=NOW, roots=roots())


def draft(machine, gpus):
    verified = verify(machine, policy(gpus))
    return verified, attest.draft_policy(verified.cpu, verified.devices)


@pytest.mark.parametrize("cpu", ["tdx", "snp"])
@pytest.mark.parametrize("gpus", [0, 2])
def test_a_draft_accepts_its_offer(cpu, gpus):
    machine = Machine(cpu, gpus)
    _, text = draft(machine, gpus)
    assert verify(machine, text).cpu
    lines = text.splitlines()
    keys = [number for number, line in enumerate(lines) if " = " in line and not line.startswith(("#", "version"))]
    assert keys
    assert all(lines[number - 1].startswith("# ") for number in keys)  # what it covers


def altered(value):
    """Return another value of the same type."""
    if isinstance(value, bytes):
        return OTHER * len(value)
    return tuple(OTHER * len(one) for one in value) if isinstance(value, tuple) else value ^ 1


def test_a_draft_refuses_a_td_with_any_other_measurement_or_attribute():
    verified, text = draft(Machine("tdx", 0), 0)
    judge = attest.Policy.from_toml(text)
    report = verified.cpu.report
    names = ("mrtd", "mrseam", "mrconfigid", "mrowner", "mrownerconfig", "td_attributes", "xfam")
    changed = {name: replace(report, **{name: altered(getattr(report, name))}) for name in names}
    changed["mrservicetd"] = replace(report, mrservicetd=OTHER * 48)
    for number in range(4):
        rtmrs = [*report.rtmrs[:number], OTHER * 48, *report.rtmrs[number + 1 :]]
        changed[f"rtmr{number}"] = replace(report, rtmrs=tuple(rtmrs))
    judge.check_cpu(verified.cpu, now=NOW)
    for name, other in changed.items():
        with pytest.raises(AttestationError):
            judge.check_cpu(replace(verified.cpu, report=other), now=NOW)
        assert name
    tcb = verified.cpu.tcb
    for other in (
        replace(tcb, evaluation_number=tcb.evaluation_number - 1),
        replace(tcb, platform=replace(tcb.platform, status=attest.TcbStatus.OUT_OF_DATE)),
    ):
        with pytest.raises(AttestationError):
            judge.check_cpu(replace(verified.cpu, tcb=other), now=NOW)
    platform = replace(verified.cpu.platform, ppid=OTHER * 16)
    with pytest.raises(AttestationError, match="PPID"):
        judge.check_cpu(replace(verified.cpu, platform=platform), now=NOW)


def test_a_draft_refuses_a_guest_of_snp_with_any_other_measurement_or_level():
    verified, text = draft(Machine("snp", 0), 0)
    judge = attest.Policy.from_toml(text)
    report = verified.cpu.report
    names = ("measurement", "host_data", "family_id", "image_id", "id_key_digest", "author_key_digest")
    changed = {name: replace(report, **{name: OTHER * len(getattr(report, name))}) for name in names}
    changed["vmpl"] = replace(report, vmpl=report.vmpl + 1)
    for kind in ("reported_tcb", "committed_tcb", "launch_tcb"):
        level = getattr(report, kind)
        changed[kind] = replace(report, **{kind: replace(level, snp=level.snp - 1)})
    judge.check_cpu(verified.cpu, now=NOW)
    for other in changed.values():
        with pytest.raises(AttestationError):
            judge.check_cpu(replace(verified.cpu, report=other), now=NOW)
    for field, other in (("product", attest.SnpProduct.GENOA), ("CHIP_ID", OTHER * 64), ("CHIP_ID", None)):
        with pytest.raises(AttestationError, match=field):
            judge.check_cpu(replace(verified.cpu, **{field.lower(): other}), now=NOW)


def verified_snp(*, masked=False, **options):
    machine = snp.chip(**options)
    data = snp.report(machine, chip_id=b"" if masked else None)
    authorities = snp.amd("Milan")
    lists = {"crl": authorities.ark.crl()}
    return attest.verify_snp_report(data, machine.leaf, machine.issuers, now=NOW, roots=authorities.roots, **lists)


def is_accepted(text, verified):
    return not attest.Policy.from_toml(text).find_mismatches(verified, now=NOW)


def test_a_draft_of_a_masked_vlek_names_its_kind_of_key_and_its_provider():
    vlek = verified_snp(masked=True, is_vlek=True)
    text = attest.draft_policy(vlek)
    assert 'signing_key = "VLEK"' in text.splitlines()
    assert 'providers = ["Cloud"]' in text.splitlines()
    assert "# THE HOST MASKS THE CHIP ID: nothing tells this machine from others like it" in text.splitlines()
    assert is_accepted(text, vlek)
    others = (verified_snp(masked=True, is_vlek=True, provider="Other"), verified_snp(is_vlek=True, provider="Other"))
    for other in (*others, verified_snp()):
        assert not is_accepted(text, other)


def test_drafts_of_masked_vlek_and_vcek_machines_refuse_each_other():
    first, second, third, fourth = (bytes([number]) * 64 for number in range(1, 5))
    machines = {
        "VCEK": verified_snp(chip_id=first),
        "VCEK of another chip": verified_snp(chip_id=second),
        "masked VCEK": verified_snp(masked=True, chip_id=third),
        "masked VCEK of another chip": verified_snp(masked=True, chip_id=fourth),
        "VLEK of Cloud": verified_snp(is_vlek=True, chip_id=first),
        "VLEK of Cloud, another chip": verified_snp(is_vlek=True, chip_id=second),
        "VLEK of Other": verified_snp(is_vlek=True, chip_id=first, provider="Other"),
        "masked VLEK of Other": verified_snp(masked=True, is_vlek=True, provider="Other"),
        "masked VLEK of a third": verified_snp(masked=True, is_vlek=True, provider="Third"),
    }
    drafts = {name: attest.draft_policy(verified) for name, verified in machines.items()}
    accepted = {
        (name, other) for name, text in drafts.items() for other in machines if is_accepted(text, machines[other])
    }
    # Nothing tells a masked machine of a provider from its others, which the draft says and the owner is told.
    assert accepted == {(name, name) for name in machines} | {("masked VLEK of Other", "VLEK of Other")}
    assert {name for name, text in drafts.items() if "THE HOST MASKS" in text} == {
        "masked VLEK of Other",
        "masked VLEK of a third",
    }
    for name in ("masked VCEK", "masked VCEK of another chip"):
        assert "by the certificate, as the host masks the chip id in reports: only this machine" in drafts[name]


def test_a_draft_of_claims_names_key_and_provider_too():
    for masked, is_vlek in ((False, False), (True, False), (False, True), (True, True)):
        machine = snp.chip(is_vlek=is_vlek)
        report = snp.report(machine, chip_id=b"" if masked else None)
        for leaf in (machine.leaf, None):
            text = attest.draft_policy(attest.MachineEvidence(attest.SnpEvidence(report, leaf)))
            policy = attest.Policy.from_toml(text).snp
            assert policy.signing_key == ("VLEK" if is_vlek else "VCEK")
            assert policy.providers == ({"Cloud"} if is_vlek and leaf else set())
            assert ("THE HOST MASKS" in text) == (not policy.chip_ids) == masked


def test_a_draft_refuses_another_gpu_and_any_other_measurement_of_it():
    machine = Machine("tdx", 2)
    verified, text = draft(machine, 2)
    judge = attest.Policy.from_toml(text)
    first, second = verified.devices
    judge.check_gpus(verified.devices, now=NOW)
    changes = (
        {"chip_id": "41E23D711E1C999999"},
        {"chip": "GB100"},
        {"architecture": attest.GpuArchitecture.BLACKWELL},
        {"driver_version": "550.1"},
        {"vbios_version": "96.00.74.00.1F"},
        {"mode": attest.GpuMode.MULTI},
    )
    for change in changes:
        other = replace(first, report=replace(first.report, **change))
        with pytest.raises(AttestationError):
            judge.check_gpus([other, second], now=NOW)
    for devices in ([first], [first, second.report], [first, second, replace(second, report=first.report)]):
        with pytest.raises(AttestationError):
            judge.check_gpus(devices, now=NOW)
    assert len(first.matched) >= 6
    for index in first.matched:
        machine.measurements = [*nvidia.MEASUREMENTS]
        machine.measurements[index] = OTHER * 48
        with pytest.raises(AttestationError, match="measurement"):
            verify(machine, text)


def test_a_draft_of_a_machine_with_switches_asks_for_each():
    reports = []
    for number, (device, values) in enumerate(nvidia.protected()):
        report = nvidia.report(device, fields=values, nonce=bytes(32))
        options = {"nonce": bytes(32), "now": NOW, "roots": roots().nvidia, "evidence": f"GPU {number} report"}
        reports.append(attest.verify_gpu_report(report, device.pem, ocsp=nvidia.statuses(device.chain[1:]), **options))
    devices = [attest.MatchedGpuReport(report, (), (), ()) for report in reports]
    verified, _ = draft(Machine("tdx", 0), 0)
    text = attest.draft_policy(verified.cpu, devices)
    judge = attest.Policy.from_toml(text)
    assert (judge.gpu.count, judge.gpu.switch_count, judge.gpu.modes) == (8, 4, {attest.GpuMode.PROTECTED_PCIE})
    assert "NVLINK IS PLAIN" in text
    for number in range(len(reports)):
        other = replace(reports[number], chip_id=reports[number].chip_id[:-4] + "F00D")
        found = [*reports[:number], other, *reports[number + 1 :]]
        with pytest.raises(AttestationError):
            judge.check_gpus([attest.MatchedGpuReport(report, (), (), ()) for report in found], now=NOW)


def test_a_draft_lets_no_debugger_in_by_itself():
    machine = Machine("tdx", 0)
    verified, _ = draft(machine, 0)
    report = replace(verified.cpu.report, td_attributes=verified.cpu.report.td_attributes | 1)
    text = attest.draft_policy(replace(verified.cpu, report=report))
    assert "THE HOST CAN READ THIS MACHINE" in text
    assert not attest.Policy.from_toml(text).tdx.allow_debug
    verified, _ = draft(Machine("snp", 0), 0)
    text = attest.draft_policy(replace(verified.cpu, revocation_checked_at=None))
    assert "NOT CHECKED" in text
    assert attest.Policy.from_toml(text).snp.revocation is attest.Revocation.CACHED


def test_a_draft_is_never_weaker_than_the_defaults_by_itself():
    verified, _ = draft(Machine("tdx", 0), 0)
    platform = replace(verified.cpu.tcb.platform, status=attest.TcbStatus.REVOKED)
    tcb = replace(verified.cpu.tcb, platform=platform, evaluation_number=3)
    policy = attest.Policy.from_toml(attest.draft_policy(replace(verified.cpu, tcb=tcb)))
    assert policy.tdx.tcb_status == {attest.TcbStatus.UP_TO_DATE}
    assert policy.tdx.min_evaluation_number == 17
    verified, _ = draft(Machine("snp", 0), 0)
    text = attest.draft_policy(replace(verified.cpu, report=replace(verified.cpu.report, vmpl=3)))
    assert attest.Policy.from_toml(text).snp.max_vmpl == 0


UNUSUAL = {
    "td_attributes": {"td_attributes": 0},  # without SEPT_VE_DISABLE
    "td_attributes, performance counters": {"td_attributes": 1 << 28 | 1 << 63},
    "xfam": {"xfam": 3 | 1 << 40},
    "mrservicetd": {"mrservicetd": OTHER * 48},
}


def test_a_draft_takes_nothing_unusual_of_a_td_over_without_a_word():
    verified, _ = draft(Machine("tdx", 0), 0)
    defaults = attest.Policy.from_toml('version = 1\n[cpu.tdx]\nmrtd = "any"\nrtmr1 = "any"\nrtmr2 = "any"')
    for name, fields in UNUSUAL.items():
        other = replace(verified.cpu, report=replace(verified.cpu.report, **fields))
        text = attest.draft_policy(other)
        assert f"\n# {name.partition(',')[0]} = " in text
        for judge in (defaults, attest.Policy.from_toml(text)):
            with pytest.raises(AttestationError):
                judge.check_cpu(other, now=NOW)


def test_a_debugger_is_a_difference():
    verified, old = draft(Machine("snp", 0), 0)
    report = replace(verified.cpu.report, policy=verified.cpu.report.policy | 1 << 19)
    new = attest.draft_policy(replace(verified.cpu, report=report))
    assert any("allow_debug" in line for line in attest.compare_policies(old, new))


def test_a_draft_names_no_version_that_cannot_be_compared():
    verified, _ = draft(Machine("tdx", 1), 1)
    (device,) = verified.devices
    beta = replace(device, report=replace(device.report, driver_version="580.beta"))
    assert '# min_driver = "580.beta"' in attest.draft_policy(verified.cpu, [beta])


def test_a_draft_of_claims_alone_says_so():
    for kind in ("tdx", "snp"):
        text = attest.draft_policy(attest.MachineEvidence(Machine(kind, 0).prove(bytes(64))))
        assert text.startswith("# NOT VERIFIED")
        tomllib.loads(text)


def test_policies_are_compared_key_by_key():
    _, old = draft(Machine("tdx", 1), 1)
    new = old.replace("61" * 48, "77" * 48).replace("count = 1", "count = 2").replace('modes = ["SPT"]\n', "")
    assert attest.compare_policies(old, new) == (
        f"cpu.tdx.rtmr1: {'61' * 48} -> {'77' * 48}",
        "gpu.count: 1 -> 2",
        "gpu.modes: SPT -> absent",
    )
    assert attest.compare_policies(old, old) == ()


def test_events_are_compared_in_their_order_and_lists_of_values_are_not():
    one, two = '[[cpu.tdx.events.rtmr2]]\ndigests = ["aa"]\n', '[[cpu.tdx.events.rtmr2]]\ndigests = ["bb"]\n'
    assert attest.compare_policies(one + two, two + one)
    lists = ['[gpu]\nchips = ["GH100", "GB100"]', '[gpu]\nchips = ["GB100", "GH100"]']
    assert not attest.compare_policies(*lists)
