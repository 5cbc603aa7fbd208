"""An event log is believed as far as it gives the registers of a quote."""

import json
import struct
from dataclasses import replace

import pytest
from helpers.foundry import tdx
from helpers.foundry.authority import NOW
from helpers.foundry.event_logs import (
    APPLICATION,
    EVENTS,
    NO_ACTION,
    SEPARATOR,
    SHA256,
    SHA384,
    ccel,
    digest,
    dstack,
    event,
    header,
)
from helpers.foundry.machine import roots as machine_roots

from fastrack import AttestationError, FormatError, attest
from fastrack.attest._cpu.event_log import text_digests


@pytest.mark.parametrize("end", [b"", b"\xff" * 64, bytes(64)])
def test_a_log_gives_the_registers_that_its_digests_make(end):
    log = attest.EventLog.parse(ccel(end=end))
    wanted = [bytes(48)] * 4
    for register, value in (
        (0, digest(b"\1\0")),
        (0, digest(bytes(4))),
        (1, digest(b"the kernel itself")),
        (2, digest(b"quiet root=/dev/vda")),
        (3, digest(b"by the workload")),
    ):
        wanted[register] = digest(wanted[register] + value)
    assert log.rtmrs == tuple(wanted)
    log.require(wanted)
    assert [one.register for one in log.events] == [0, 0, 1, 2, 3]


def test_content_is_what_the_digest_proves_and_no_more():
    boot, separator, kernel, line, workload = attest.EventLog.parse(ccel()).events
    assert (boot.content, separator.content, kernel.content) == (b"\1\0", bytes(4), None)
    assert (line.content, line.name) == (b"quiet root=/dev/vda", "IPL")
    assert (workload.content, workload.name) == (b"by the workload", "0x12345")
    assert line.digest in text_digests("quiet root=/dev/vda")
    assert digest("quiet".encode("utf-16-le") + bytes(2)) in text_digests("quiet")


def test_a_log_with_a_change_gives_other_registers():
    rtmrs = attest.EventLog.parse(ccel()).rtmrs
    changed = [
        EVENTS[:2] + EVENTS[3:],
        EVENTS + EVENTS[-1:],
        [EVENTS[1], EVENTS[0], *EVENTS[2:]],
        [*EVENTS[:2], event(2, APPLICATION, b"path of a kernel", value=digest(b"another")), *EVENTS[3:]],
        [*EVENTS[:2], event(3, APPLICATION, b"path of a kernel", value=digest(b"the kernel itself")), *EVENTS[3:]],
    ]
    for events in changed:
        log = attest.EventLog.parse(ccel(events))
        with pytest.raises(AttestationError, match=r"RTMR\d"):
            log.require(rtmrs)


MALFORMED = {
    "nothing": b"",
    "another first event": header(kind=SEPARATOR),
    "an unknown signature": header().replace(b"Event03", b"Event02"),
    "a digest of another size": header(((SHA384, 32),)),
    "the register of MRTD": ccel([event(0, SEPARATOR, b"")]),
    "a register too high": ccel([event(5, SEPARATOR, b"")]),
    "no digest of SHA-384": ccel([event(1, SEPARATOR, b"", algorithms=(SHA256,))]),
    "a digest twice": ccel([event(1, SEPARATOR, b"", algorithms=(SHA384, SHA384))]),
    "an algorithm that its header lacks": header(((SHA384, 48),)) + event(1, SEPARATOR, b""),
    "an event past the end": header() + EVENTS[0][:-1],
    "a count past the end": header() + struct.pack("<III", 1, 4, 0xFFFFFFFF),
    "a size past the end": header() + event(1, SEPARATOR, b"")[:-4] + struct.pack("<I", 0xFFFFFFFF),
    "JSON that is no log": b'{"event_log": 7}',
    "an event without a digest": dstack(event_type=1, digest=None),
    "a digest that is not its own": dstack(digest="00" * 48),
    "a register that is none": dstack(imr=4),
    "a type that is no number": dstack(event_type="1"),
    "too large": b"[" + b" " * (4 << 20),
}


def test_malformed_logs_are_refused():
    for name, data in MALFORMED.items():
        with pytest.raises(FormatError, match="reading the event log") as caught:
            attest.EventLog.parse(data)
        assert name
        assert len(str(caught.value)) < 400


def test_a_log_has_a_bounded_number_of_events():
    data = header() + struct.pack("<IIII", 1, NO_ACTION, 0, 0) * 65_537
    with pytest.raises(FormatError, match="at most 65536"):
        attest.EventLog.parse(data)


def test_events_of_dstack_have_digests_that_are_computed():
    for data in (dstack(), dstack(digest=None), dstack(digest=""), dstack(version=2), dstack(version=2, digest=None)):
        boot, workload = attest.EventLog.parse(data).events
        assert (boot.digest, boot.content, workload.register) == (b"\xab" * 48, None, 3)
        assert b"app-id" in workload.content
    wrapped = json.dumps({"event_log": dstack().decode(), "quote": ""}).encode()
    assert attest.EventLog.parse(wrapped) == attest.EventLog.parse(dstack())


def test_damage_of_a_digest_or_a_register_is_refused_or_changes_the_registers():
    data, at = ccel(end=b""), len(header())
    rtmrs = attest.EventLog.parse(data).rtmrs
    for part in EVENTS[:4]:
        value = part.index(struct.pack("<H", SHA384)) + 2
        for place in (0, *range(value, value + 48)):
            damaged = bytearray(data)
            damaged[at + place] ^= 0x41
            try:
                assert attest.EventLog.parse(bytes(damaged)).rtmrs != rtmrs
            except FormatError:
                continue
        at += len(part)


KERNEL = f'digests = ["{digest(b"the kernel itself").hex()}", "{"00" * 48}"]'
SECOND = "[[cpu.tdx.events.rtmr2]]"
RULES = f"""
[[cpu.tdx.events.rtmr1]]
{KERNEL}
[[cpu.tdx.events.rtmr2]]
texts = ["quiet", "quiet root=/dev/vda"]
"""


def with_log(events=EVENTS):
    """Return a verified TD whose registers are those of events."""
    log = attest.EventLog.parse(ccel(events))
    body = tdx.td_report(report_data=bytes(64), rtmrs=log.rtmrs)
    evidence = attest.TdxEvidence(tdx.quote(tdx.platform(), body=body), None, ccel(events))
    collateral = attest.TdxCollateral(**tdx.collateral())
    verified, _ = attest.verify_evidence(
        attest.MachineEvidence(evidence), now=NOW, collateral=collateral, roots=machine_roots()
    )
    return verified


def judge(text, verified):
    policy = attest.Policy.from_toml(f"version = 1\n[cpu.tdx]\nmrtd = 'any'\n{text}")
    return [error.field for error in policy.find_mismatches(verified, now=NOW)]


def test_a_policy_names_events_in_place_of_registers():
    verified = with_log()
    assert judge(RULES, verified) == []
    other = digest(b"other").hex()
    kernel = event(2, APPLICATION, b"", value=digest(b"other"))
    assert judge(RULES.replace("00" * 48, other), with_log([*EVENTS[:2], kernel, *EVENTS[3:]])) == []
    assert judge(RULES, with_log([*EVENTS[:2], kernel, *EVENTS[3:]])) == [
        "event 1 of RTMR1 (EFI_BOOT_SERVICES_APPLICATION)"
    ]
    assert judge(RULES.replace("vda", "vdb"), verified) == ["event 1 of RTMR2 (IPL)"]
    assert judge(RULES.replace(KERNEL, "any = true"), verified) == []


def test_an_event_more_or_less_or_elsewhere_is_another_machine():
    another = event(2, APPLICATION, b"", value=digest(b"a second kernel"))
    for events in ([*EVENTS, another], [another, *EVENTS], EVENTS[:2] + EVENTS[3:]):
        assert "events of RTMR1" in judge(RULES, with_log(events))
    doubled = RULES.replace(
        "[[cpu.tdx.events.rtmr2]]", "[[cpu.tdx.events.rtmr1]]\nany = true\n[[cpu.tdx.events.rtmr2]]"
    )
    assert judge(doubled, with_log()) == ["events of RTMR1"]


def test_a_policy_of_events_refuses_a_machine_without_a_log():
    verified = replace(with_log(), event_log=None)
    assert judge(RULES, verified) == ["event log", "event log"]


def test_a_log_of_another_boot_is_refused_with_the_offer():
    verified, other = with_log(), with_log(EVENTS[:3])
    assert verified.event_log != other.event_log
    quote = tdx.quote(tdx.platform(), body=tdx.td_report(report_data=bytes(64)))
    evidence = attest.MachineEvidence(attest.TdxEvidence(quote, attest.TdxCollateral(**tdx.collateral()), ccel()))
    with pytest.raises(AttestationError, match=r"RTMR0 of the event log"):
        attest.verify_evidence(evidence, now=NOW, roots=machine_roots())


def test_events_that_did_not_make_their_register_explain_nothing():
    log = attest.EventLog.parse(ccel())
    rtmrs = [*log.rtmrs[:2], b"\xee" * 48, log.rtmrs[3]]
    quote = tdx.quote(tdx.platform(), body=tdx.td_report(report_data=bytes(64), rtmrs=rtmrs))
    evidence = attest.MachineEvidence(attest.TdxEvidence(quote, attest.TdxCollateral(**tdx.collateral()), ccel()))
    verified, _ = attest.verify_evidence(evidence, now=NOW, roots=machine_roots())
    assert {event.register for event in verified.event_log.events} == {0, 1, 3}
    draft = attest.draft_policy(verified).partition("rtmr3 =")[0].partition("rtmr1 =")[2]
    assert "the event log does not give this register\nrtmr2" in draft
    assert "0x12345" in attest.draft_policy(verified).partition("rtmr2 =")[2]


def test_software_may_add_to_a_register_that_no_event_of_the_policy_is_of():
    log = attest.EventLog.parse(ccel())
    rtmrs = [*log.rtmrs[:3], bytes(48)]
    quote = tdx.quote(tdx.platform(), body=tdx.td_report(report_data=bytes(64), rtmrs=rtmrs))
    evidence = attest.MachineEvidence(attest.TdxEvidence(quote, attest.TdxCollateral(**tdx.collateral()), ccel()))
    verified, _ = attest.verify_evidence(evidence, now=NOW, roots=machine_roots())
    assert judge(RULES, verified) == []
    assert judge(RULES + "[[cpu.tdx.events.rtmr3]]\nany = true", verified) == ["events of RTMR3"]


def test_a_rule_says_one_thing_and_registers_are_named():
    for text, wanted in (
        (RULES.replace('texts = ["quiet", "quiet root=/dev/vda"]', ""), "digests, texts, or any"),
        (RULES + "any = true", "digests, texts, or any"),
        (RULES.replace("rtmr2", "rtmr4"), "one of the keys"),
        (RULES.replace("[[cpu.tdx.events.rtmr2]]\ntexts", "[cpu.tdx.events.rtmr2]\ntexts"), "array of tables"),
        (RULES.partition(SECOND)[0], "rtmr2"),
        (RULES.replace("texts", "words"), "one of the keys"),
    ):
        with pytest.raises(FormatError, match=wanted):
            judge(text, None)


def test_a_draft_lists_the_events_of_each_register():
    text = attest.draft_policy(with_log())
    assert "#   1. IPL: 'quiet root=/dev/vda'" in text
    assert f"#   1. EFI_BOOT_SERVICES_APPLICATION: digest {digest(b'the kernel itself').hex()}" in text
    attest.Policy.from_toml(text).check_cpu(with_log(), now=NOW)


def test_recorded_logs_give_the_registers_of_their_quotes(evidence):
    folder = evidence / "wire" / "eventlog"
    if not folder.is_dir():
        pytest.skip("no recorded logs")
    for name in ("gcp_cos113", "qemu_grub"):
        rtmrs = attest.parse_tdx_quote((folder / name / "quote.bin").read_bytes()).report.rtmrs
        attest.EventLog.parse((folder / name / "ccel.bin").read_bytes()).require(rtmrs)
    with pytest.raises(AttestationError, match="RTMR2"):
        attest.EventLog.parse((folder / "qemu_grub" / "ccel_of_another_boot.bin").read_bytes()).require(rtmrs)
    for name in ("lite_getquote.json", "quote_report.json"):
        data = (folder / "dstack" / name).read_bytes()
        quote = bytes.fromhex(json.loads(data)["quote"])
        attest.EventLog.parse(data).require(attest.parse_tdx_quote(quote).report.rtmrs)
