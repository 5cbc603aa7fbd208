"""Evidence of NVSwitches, from stand-ins of NVIDIA's program nvattest: recorded on a real machine, and made up."""

import json
import os
import subprocess
import threading
import time
from base64 import b64decode, b64encode
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from helpers.cases import each
from helpers.foundry import nvidia
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots
from test_collect import Kernel, Nvml

from fastrack import AttestationError, DeviceError, attest
from fastrack.attest import _switches
from fastrack.attest._switches import collect_switches

REAL = datetime(2026, 6, 1, tzinfo=UTC)
PPCIE = "version = 1\n[gpu]\nmodes = ['PPCIE']\nrequire_manifests = false\nrevocation = 'none'\n"
NONCE = nvidia.NONCE


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that puts a script in the place of nvattest."""
    path = tmp_path / "nvattest"
    monkeypatch.setattr(_switches, "PROGRAMS", (str(tmp_path / "absent"), str(path)))

    def put(script, mode=0o700):
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(mode)
        return path

    return put


@pytest.fixture
def printing(program, tmp_path):
    """Return a function that has nvattest print these evidences."""

    def put(items, **more):
        (tmp_path / "answer").write_text(json.dumps({"evidences": items, "result_code": 0} | more))
        program(f"cat {tmp_path}/answer")

    return put


def item(device, *, nonce=NONCE, pdi=nvidia.SWITCH_PDI, **options):
    report = nvidia.report(device, nonce=nonce, **{"fields": nvidia.switch_fields(pdi=pdi)} | options)
    texts = {"evidence": b64encode(report).decode(), "certificate": b64encode(device.pem).decode()}
    return {"arch": "LS10", "nonce": nonce.hex(), "version": "1.0", **texts}


class TestRecorded:
    """Read the answers of four switches of a real machine, all with one nonce."""

    @pytest.fixture(params=["ppcie", "ppcie_b"])
    def recorded(self, request, evidence):
        paths = [evidence / "wire" / "nvidia" / f"{request.param}_{what}.json" for what in ("8_gpus", "4_switches")]
        if not all(path.is_file() for path in paths):
            pytest.skip("no recording of switches among the real evidence")
        return [json.loads(path.read_text()) for path in paths]

    def verify(self, gpus, switches):
        reports = [(b64decode(one["evidence"]), b64decode(one["certificate"]), one["nonce"]) for one in gpus]
        reports += [(one.report, one.chain, gpus[0]["nonce"]) for one in switches]
        found = [
            attest.verify_gpu_report(report, chain, nonce=bytes.fromhex(nonce), now=REAL, evidence=f"device {number}")
            for number, (report, chain, nonce) in enumerate(reports)
        ]
        attest.Policy.from_toml(PPCIE).check_gpus(found, now=REAL)
        return [one for one in found if one.is_switch]

    def test_four_switches_verify_beside_their_gpus(self, recorded, printing):
        gpus, switches = recorded
        printing(switches, result_message="Ok")
        found = collect_switches(lambda _: bytes.fromhex(switches[0]["nonce"]))
        assert len({one.chip_id for one in self.verify(gpus, found)}) == 4

    def test_one_that_is_missing_is_refused(self, recorded, printing):
        gpus, switches = recorded
        for dropped in range(4):
            printing(switches[:dropped] + switches[dropped + 1 :])
            found = collect_switches(lambda _: bytes.fromhex(switches[0]["nonce"]))
            with pytest.raises(AttestationError, match="number of switches"):
                self.verify(gpus, found)

    def test_one_that_is_doubled_or_answers_another_nonce_is_refused(self, recorded, printing, evidence):
        _, switches = recorded
        doubled = (
            [*switches[:3], switches[2]],
            json.loads((evidence / "wire/nvidia/one_switch_four_times.json").read_text()),
        )
        for items in doubled:
            printing(items)
            with pytest.raises(DeviceError, match=r"expected each switch once, got chip 50.* twice"):
                collect_switches(lambda _, items=items: bytes.fromhex(items[0]["nonce"]))
        printing(switches)
        with pytest.raises(
            DeviceError, match="expected reports with the nonce that was asked for, got one with another"
        ):
            collect_switches(lambda _: NONCE)


class ProtectedNvml(Nvml):
    """NVML of a machine whose GPUs are in protected PCIe mode."""

    def __init__(self, pairs):
        machine = Machine("tdx", 0)
        machine.devices = [device for device, _ in pairs]
        super().__init__(machine)
        self.fields = [fields for _, fields in pairs]

    def nvmlDeviceGetConfComputeGpuAttestationReport(self, handle, nonce):  # noqa: N802
        found = super().nvmlDeviceGetConfComputeGpuAttestationReport(handle, nonce)
        fields = self.fields[self.machine.devices.index(handle)]
        report = nvidia.report(handle, nonce=bytes(nonce), fields=fields)
        found.attestationReport, found.attestationReportSize = list(report), len(report)
        return found


def answering(tmp_path, program, switches, calls):
    """Have nvattest ask this process, which signs reports for the nonce that it was given."""
    ask, answer = tmp_path / "ask", tmp_path / "answer"
    for path in (ask, answer):
        os.mkfifo(path)
    program(f'echo "$@" > {ask}; cat {answer}')

    def serve():
        with suppress(OSError):
            while line := ask.read_text().split():
                calls.append(line)
                nonce = bytes.fromhex(line[line.index("--nonce") + 1])
                items = [item(device, nonce=nonce, fields=fields) for device, fields in switches]
                turned = items[len(calls) % 4 :] + items[: len(calls) % 4]  # in no certain order
                answer.write_text(json.dumps({"evidences": turned, "result_code": 0}))

    threading.Thread(target=serve, daemon=True).start()
    return ask


def test_a_machine_in_protected_pcie_mode_collects_its_switches(tmp_path, program):
    pairs, calls = nvidia.protected(), []
    ask = answering(tmp_path, program, pairs[8:], calls)
    nvml = ProtectedNvml(pairs[:8])
    kernel = Kernel(tmp_path / "tsm", nvml.machine)
    challenge = attest.Challenge.generate(now=NOW)
    pending = attest.make_offer(
        challenge, lambda binding: attest.collect_evidence(binding, root=kernel.root, collateral=None, nvml=nvml)
    )
    ask.write_text("")  # ends the thread
    binding = attest.OfferBinding(challenge, pending.offer.recipient)
    nonces = [binding.device_nonce(8 + number).hex() for number in range(4)]
    assert calls == [
        ["collect-evidence", "--device", "nvswitch", "--nonce", nonce, "--format", "json"] for nonce in nonces
    ]
    rules = attest.Policy.from_toml(policy(0) + PPCIE.removeprefix("version = 1\n"))
    collateral = nvml.machine.collateral
    found = attest.verify_offer(pending.to_bytes(), challenge, rules, now=NOW, roots=roots(), collateral=collateral)
    assert [device.is_switch for device in found.devices] == [False] * 8 + [True] * 4


def test_other_machines_are_not_asked_for_switches_and_these_may_be_left_out(tmp_path, program):
    program("exit 1")
    binding = attest.OfferBinding(attest.Challenge.generate(now=NOW), nvidia_recipient())
    machine = Machine("tdx", 1)
    for number, (nvml, options) in enumerate(
        [(Nvml(machine), {}), (ProtectedNvml(nvidia.protected()[:8]), {"switches": False})]
    ):
        kernel = Kernel(tmp_path / str(number), machine)
        assert attest.collect_evidence(binding, root=kernel.root, nvml=nvml, **options).devices
    with pytest.raises(DeviceError, match="status 1 of it"):
        attest.collect_evidence(binding, root=tmp_path, nvml=Nvml(machine), switches=True)


def nvidia_recipient():
    from fastrack.grants import Identity

    return Identity.generate("MLKEM768_X25519").recipient


def ask_one(nonce=NONCE):
    return collect_switches(lambda _: nonce)


class TestProgram:
    def test_an_absent_program_is_named_with_how_to_go_on(self, program):
        with pytest.raises(
            DeviceError, match=r"NVIDIA's program at .*/absent or .*/nvattest, got none. Install NVIDIA's"
        ):
            ask_one()

    def test_one_that_others_may_replace_is_not_run(self, program, tmp_path):
        path = program(f"touch {tmp_path}/ran", 0o777)
        with pytest.raises(DeviceError, match=r"expected .*nvattest that no other user can replace"):
            ask_one()
        path.chmod(0o600)
        with pytest.raises(DeviceError, match=r"nvattest that runs, got .*Permission denied"):
            ask_one()
        assert not (tmp_path / "ran").exists()

    def test_it_has_a_minimal_environment_and_no_input(self, program, tmp_path, monkeypatch):
        monkeypatch.setenv("LD_PRELOAD_OF_A_TEST", "secret")
        program(f"env > {tmp_path}/env; cat >> {tmp_path}/env; pwd >> {tmp_path}/env; exit 3")
        with pytest.raises(DeviceError, match=r"got status 3 of it. Run .*nvattest collect-evidence .* to see why"):
            ask_one()
        told = (tmp_path / "env").read_text().splitlines()
        assert {line.partition("=")[0] for line in told} <= {"PATH", "LC_ALL", "PWD", "OLDPWD", "SHLVL", "_", "/"}
        assert "/" in told

    @pytest.mark.slow
    def test_one_that_hangs_is_ended_with_what_it_started(self, program, tmp_path, monkeypatch):
        monkeypatch.setattr(_switches, "_SECONDS", 0.5)
        for script in (
            f"sleep 60 & echo $! > {tmp_path}/pid; wait",
            f"sleep 60 & echo $! > {tmp_path}/pid",
            f"echo $$ > {tmp_path}/pid; exec >&-; sleep 60",
        ):
            program(script)
            start = time.monotonic()
            with pytest.raises(DeviceError, match="an answer of nvattest within 0 s, got none"):
                ask_one()
            assert time.monotonic() - start < 5
            assert is_gone(int((tmp_path / "pid").read_text()))

    def test_one_that_a_driver_keeps_from_ending_is_left(self, program, monkeypatch):
        wait, waited = subprocess.Popen.wait, []

        def never(process, timeout=None):
            waited.append(wait(process, 5))  # for the test
            if timeout is None:
                pytest.fail("waits without end")
            raise subprocess.TimeoutExpired("nvattest", timeout)

        monkeypatch.setattr(_switches, "_SECONDS", 0.5)
        monkeypatch.setattr(subprocess.Popen, "wait", never)
        program("sleep 60")
        with pytest.raises(DeviceError, match="an answer of nvattest within 0 s, got none"):
            ask_one()
        assert waited == [-9]

    def test_output_without_end_is_bounded(self, program):
        program("yes")
        with pytest.raises(DeviceError, match="expected up to 2097152 bytes of nvattest, got more"):
            ask_one()

    @each(
        "output",
        [
            "",
            "x",
            "[]",
            "{}",
            '{"evidences": [], "result_code": 1}',
            '{"evidences": [], "result_code": true}',
            '{"evidences": {}, "result_code": 0}',
            '{"evidences": [1], "result_code": 0}',
            '{"evidences": [{"evidence": "x", "certificate": ""}], "result_code": 0}',
            '{"evidences": [{"evidence": "AAAA", "certificate": "AAAA"}], "result_code": 0}',
            '{"evidences": [{"evidence": "AAAA"}], "result_code": 0}',
            '{"evidences": [], "result_code": 0, "result_code": 0}',
            "[" * 2000,
        ],
    )
    def test_other_output_is_refused(self, program, tmp_path, output):
        (tmp_path / "answer").write_text(output)
        program(f"cat {tmp_path}/answer")
        with pytest.raises(DeviceError, match="expected reports of switches, got other output"):
            ask_one()

    def test_no_switch_and_one_that_is_a_gpu_are_refused(self, printing):
        printing([])
        with pytest.raises(DeviceError, match="expected 1 to 32 switches, got 0"):
            ask_one()
        printing([item(nvidia.hopper(), fields=nvidia.gpu_fields())])
        with pytest.raises(DeviceError, match="got one of a GPU"):
            ask_one()

    def test_a_made_up_one_that_is_doubled_or_of_another_nonce_is_refused(self, printing):
        switch = nvidia.switch()
        printing([item(switch), item(switch)])
        with pytest.raises(DeviceError, match="expected each switch once"):
            ask_one()
        printing([item(switch, nonce=bytes(32))])
        with pytest.raises(DeviceError, match="got one with another"):
            ask_one()

    def test_a_switch_that_is_gone_in_a_later_answer_is_noticed(self, program, tmp_path):
        first = nvidia.switch()
        both = [item(first), item(nvidia.sibling(first, bytes.fromhex("203eb31ad9ed0009"), 0x50))]
        for name, items in (("first", both), ("later", both[:1])):
            (tmp_path / name).write_text(json.dumps({"evidences": items, "result_code": 0}))
        program(f"cat {tmp_path}/first; cp {tmp_path}/later {tmp_path}/first")
        with pytest.raises(DeviceError, match="the same switches each time, got others"):
            ask_one()


def is_gone(pid):
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with suppress(OSError):
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        time.sleep(0.05)
    return False
