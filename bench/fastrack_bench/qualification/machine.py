"""Rows of this machine: a broker of their own, evidence, made-up values, settings, and where plaintext lies."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastrack import attest
from fastrack._cli.machine import ROOT, CpuTee, read_tee
from fastrack._cli.proofs import lacking_states, read_proofs
from fastrack._devices.graphics import Gpu, Graphics, read_graphics
from fastrack._devices.nvml import Confidential
from fastrack._keys.keys import Key
from fastrack._net.service import Service, read_refusal
from fastrack._sets.folder_writer import seal_folder
from fastrack._util.cpus import read_system
from fastrack._util.shown import format_size
from fastrack.attest import Challenge, MachineEvidence, Offer, OfferBinding, Policy, SnpEvidence, _verify_offer
from fastrack.attest._exchange import GRANTS_LIMIT
from fastrack.attest._kinds import VerifiedCpu, kind_of_verified
from fastrack.attest._offer import CHALLENGE_LIMIT, read_clock
from fastrack.errors import AttestationError, DeviceError, FastrackError
from fastrack.grants import Signer
from fastrack_bench.qualification import child
from fastrack_bench.qualification.record import FAILED, PASSED, READ, STAND_IN
from fastrack_bench.qualification.stage import MARK, Outcome, Stage, expect, not_asked, not_here

_START, _LIMIT, _SLACK = 60.0, 2.0, 3.0  # seconds for the broker to start, for an exchange, and over that
_MEMORY, _BLOCK, _SEARCHED = 1 << 30, 16 << 20, 64 << 20  # bytes of the parent that are searched, in blocks; of a file
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class _Broker:
    """A broker in a process of its own, on a loopback address, which grants a throw-away key."""

    process: subprocess.Popen[bytes]
    url: str
    signer: Signer

    @classmethod
    def of(cls, stage: Stage) -> _Broker:
        """Return the broker of a run. The first row that asks starts it."""
        if "broker" in stage.kept:
            found: _Broker = stage.kept["broker"]
            return found
        if not (find_spec("uvicorn") and find_spec("starlette")):
            not_here("no broker is installed: pip install 'fastrack-io[broker]'")
        files = {name: stage.path / f"broker.{name}" for name in ("key", "signer", "policy", "database")}
        Key.generate().save(files["key"])
        (owner := Signer.generate()).save(files["signer"])
        files["policy"].write_text("version = 1\n")  # which accepts no machine
        options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
        with (stage.path / "broker.log").open("wb") as log:
            words = "broker", "serve", "--insecure-loopback", "--port", "0", *options
            process = child.start(*words, stdout=log, stderr=log)
        stage.ends.callback(process.wait)
        stage.ends.callback(process.kill)
        end = time.monotonic() + _START
        while not (told := [line for line in _lines(stage.path / "broker.log") if b'"listening"' in line]):
            if process.poll() is not None or time.monotonic() > end:
                raise FastrackError(f"starting a broker failed: {_lines(stage.path / 'broker.log')[-1:]}")
            time.sleep(0.05)
        stage.kept["broker"] = made = cls(process, f"http://127.0.0.1:{json.loads(told[0])['port']}", owner)
        return made

    def fetch(self, collect: Callable[[OfferBinding], MachineEvidence]) -> object:
        """Ask for keys, within a limit of time."""
        return attest.fetch_keys(self.url, owner=self.signer.verifier, collect=collect, timeout=_LIMIT)


def _lines(log: Path) -> list[bytes]:
    """Return the lines of a log that are whole."""
    return log.read_bytes().split(b"\n")[:-1]


def ask_without_proof(stage: Stage) -> Outcome:
    """Ask a broker for keys with evidence that it cannot accept."""
    broker = _Broker.of(stage)
    return expect(AttestationError, "got 403", lambda: broker.fetch(_made_up_evidence))


def replay_offer(stage: Stage) -> Outcome:
    """Send one offer twice."""
    service, end = Service(_Broker.of(stage).url, "the broker", "qualifying"), time.monotonic() + _START
    challenge = service.exchange("/v1/challenges", b"", limit=CHALLENGE_LIMIT, end=end).body
    offer = attest.make_offer(Challenge.from_bytes(challenge), _made_up_evidence).to_bytes()
    first, second = (service.exchange("/v1/offers", offer, limit=GRANTS_LIMIT, end=end) for _ in range(2))
    field = read_refusal(second.body).get("field")
    seen = f"status {first.status}, and again {second.status}: {field}"
    return (PASSED if (second.status, field) == (409, "challenge") else FAILED), seen


def disturb_broker(kind: type[Exception], about: str, number: signal.Signals) -> Callable[[Stage], Outcome]:
    """Return the action of a row in which a signal comes to the broker between its challenge and the offer."""

    def act(stage: Stage) -> Outcome:
        broker, start = _Broker.of(stage), time.monotonic()

        def disturb(binding: OfferBinding) -> MachineEvidence:
            broker.process.send_signal(number)
            if number == signal.SIGKILL:
                broker.process.wait()
            return _made_up_evidence(binding)

        state, seen = expect(kind, about, lambda: broker.fetch(disturb))
        broker.process.send_signal(signal.SIGCONT)
        seconds = time.monotonic() - start
        return (state if seconds < _LIMIT + _SLACK else FAILED), f"{seen}, after {seconds:.1f} s"

    return act


def ask_nobody(stage: Stage) -> Outcome:
    """Ask a broker that was killed."""
    broker = _Broker.of(stage)
    broker.process.kill()
    broker.process.wait()
    return expect(ConnectionRefusedError, "refused", lambda: broker.fetch(_made_up_evidence))


# Evidence: this machine's where it gives some, else values that no vendor has signed.


def judge_this_machine(stage: Stage) -> Outcome:
    """Judge the evidence of this machine by the policy."""
    rules, (state, challenge, offer), now = stage.rules, _offer(stage), read_clock()
    if state == STAND_IN:
        not_here("no confidential virtual machine: no sign of a TEE, and no evidence")
    found = _verify_offer.accept_offer(_prove(stage, offer, challenge, now), challenge, rules, now)
    return PASSED, f"{kind_of_verified(found.cpu).title}, {len(found.devices)} devices"


def judge_another(stage: Stage) -> Outcome:
    """Judge this machine, or a made-up one, by the policy with another measurement in the place of a named one."""
    rules, now = stage.rules, read_clock()
    state, challenge, offer = _offer(stage)
    cpus = [_prove(stage, offer, challenge, now)[1]] if state == PASSED else _made_up_cpus(rules, debug=False)
    for cpu in cpus:
        section = getattr(rules, kind := kind_of_verified(cpu).name)
        name = next((key for key, allowed in section.measurements.items() if allowed), None)
        if name is None:
            return FAILED, f"cpu.{kind} names no measurement: it accepts any software"
        other = replace(section, measurements={**section.measurements, name: frozenset({b"\xa5" * 48})})
        fields = _refused_fields(replace(rules, **{kind: other}), cpu)
        if name.upper() not in fields or (state == PASSED and fields != {name.upper()}):
            return FAILED, f"expected a refusal of {name.upper()}, got {', '.join(sorted(fields)) or 'none'}"
    return state, "refused: it alone" if state == PASSED else "refused, with what else is made up"


def judge_debugged(stage: Stage) -> Outcome:
    """Judge a machine whose CPU can be debugged."""
    rules = stage.rules
    fields = [_refused_fields(rules, cpu) for cpu in _made_up_cpus(rules, debug=True)]
    is_refused = all("debug bit" in each for each in fields)
    return (STAND_IN, "refused: debug bit") if is_refused else (FAILED, "accepted: its host may read its memory")


def answer_late(stage: Stage) -> Outcome:
    """Judge evidence after its challenge has expired."""
    state, challenge, offer = _offer(stage)
    late = challenge.expires
    return expect(AttestationError, "the challenge of", lambda: _prove(stage, offer, challenge, late), state)


def answer_another(stage: Stage) -> Outcome:
    """Judge evidence for another challenge."""
    state, _, offer = _offer(stage)
    other = Challenge.generate(now=(now := read_clock()))
    moved = Offer(other.id, offer.recipient, offer.evidence)
    return expect(AttestationError, "the report data of", lambda: _prove(stage, moved, other, now), state)


def _offer(stage: Stage) -> tuple[str, Challenge, Offer]:
    """Return an offer of this machine, or a made-up one, after the state of a row that passes with it.

    What has signs of a TEE, and gives no evidence, fails the row.
    """
    if "offer" not in stage.kept:
        state, challenge = PASSED, Challenge.generate(now=read_clock())
        try:
            offer = attest.make_offer(challenge, attest.collect_evidence).offer
        except DeviceError:
            if read_tee().kind is not None:
                raise
            state, offer = STAND_IN, attest.make_offer(challenge, _made_up_evidence).offer
        stage.kept["offer"] = state, challenge, offer
    found: tuple[str, Challenge, Offer] = stage.kept["offer"]
    return found


def _prove(stage: Stage, offer: Offer, challenge: Challenge, now: datetime) -> Any:
    return _verify_offer.prove_offer(offer, challenge, now, stage.collateral, _verify_offer.VENDOR_ROOTS)


def _refused_fields(rules: Policy, cpu: VerifiedCpu) -> set[str]:
    return {str(error.field) for error in replace(rules, gpu=None).find_mismatches(cpu, now=read_clock())}


def _made_up_cpus(rules: Policy, *, debug: bool) -> list[VerifiedCpu]:
    """Return a made-up CPU of each kind that a policy has a section of."""
    now, empty, cpus = read_clock(), bytes(48), list[VerifiedCpu]()
    if rules.tdx is not None:
        registers: Any = (empty, empty, bytes(8), int(debug), 3, *(empty,) * 4, (empty,) * 4, bytes(64))
        level = attest.TcbLevel(attest.TcbStatus.UP_TO_DATE, now)
        report, tcb = attest.TdReport(bytes(16), *registers), attest.TdxTcb(level, None, level, 0)
        platform = attest.PckIdentity(bytes(16), bytes(6), bytes(2), 0, bytes(16), (0,) * 16)
        cpus.append(attest.VerifiedTdxQuote(report, tcb, platform, now, now, now + _DAY))
    if rules.snp is not None:
        snp = attest.parse_snp_report(_snp_report(bytes(64), debug=debug))
        cpus.append(attest.VerifiedSnpReport(snp, attest.SnpProduct.MILAN, None, now, now, now + _DAY))
    return cpus or not_asked("the policy has neither [cpu.tdx] nor [cpu.snp]")


def _made_up_evidence(binding: OfferBinding) -> MachineEvidence:
    return MachineEvidence(SnpEvidence(_snp_report(binding.report_data(()), debug=False)))


def _snp_report(report_data: bytes, *, debug: bool) -> bytes:
    """Return a report of zeros, but for VERSION, bit 19 of POLICY, SIGNATURE_ALGO and REPORT_DATA."""
    report = bytearray(1184)
    report[0], report[0x0A], report[0x34], report[0x50:0x90] = 2, 8 * debug, 1, report_data
    return bytes(report)


# GPUs and the host.


def look_at_gpu(wanted: str, **state: Any) -> Callable[[Stage], Outcome]:
    """Return the action of a row in which a driver answers so of a GPU, and `wanted` has to be told of it."""

    def act(_: Stage) -> Outcome:
        mode = Confidential(**{"enabled": True, "environment": "production", "devtools": False, "ready": True, **state})
        graphics = Graphics(gpus=(Gpu("made up", None, attests=True),), confidential=mode)
        proofs = [proof.missing or "" for proof in read_proofs(CpuTee(None, ()), graphics)[1:]]
        told = "; ".join([*lacking_states(graphics).values(), *proofs])
        return (STAND_IN, f"told: {wanted}") if wanted in told else (FAILED, f"expected {wanted}, got {told or 'none'}")

    return act


def read_gpus(_: Stage) -> Outcome:
    """Read what the driver tells of the GPUs."""
    graphics = read_graphics()
    if graphics.absent is not None or not graphics.gpus:
        not_here(graphics.absent or "no GPU")
    advice = "".join(f"; {name}: {text}" for name, text in lacking_states(graphics).items())
    return READ, f"{graphics.confidential}, persistence {[gpu.persists for gpu in graphics.gpus]}{advice}"


def read_kernel(_: Stage) -> Outcome:
    """Read where the kernel may write memory of processes, and who may read it."""
    limit, swaps = resource.getrlimit(resource.RLIMIT_CORE)[0], len(read_system(ROOT / "proc/swaps").splitlines()) - 1
    scope = read_system(ROOT / "proc/sys/kernel/yama/ptrace_scope").strip()
    pattern = read_system(ROOT / "proc/sys/kernel/core_pattern").strip()
    # core(5): a program gets dumps with a limit of 0 as well.
    advice = "sysctl kernel.core_pattern=core" if pattern.startswith("|") else "" if limit == 0 else "ulimit -c 0"
    cores = f"to {pattern}, with plaintext: {advice}" if advice else "none"
    swap = f"{swaps} devices, which may get plaintext: swapoff -a" if swaps > 0 else "none"
    others = f"scope {scope}" if scope in {"1", "2", "3"} else "of a user read each other: kernel.yama.ptrace_scope=1"
    return READ, f"core dumps {cores}; swap {swap}; processes {others}"


def fill_disk(stage: Stage) -> Outcome:
    """Unseal a small folder, under a throw-away key, where there is no room for it."""
    plain, key, sealed, target = (stage.new("") / name for name in ("plain", "key", "sealed", "target"))
    plain.mkdir()
    target.mkdir()
    (plain / "data.bin").write_bytes(os.urandom(1 << 20))
    (made := Key.generate()).save(key)
    seal_folder(plain, sealed, made)
    words, pipes = ("unseal", str(sealed), str(target / "out"), "--key", str(key)), subprocess.PIPE
    for how in ("mounted", "limited"):  # the second where no right is to the first
        told, problem = child.start(*words, full=(how, target), stdout=pipes, stderr=pipes).communicate()
        place, left = json.loads(told)
        if place is not None:
            break
    error = problem.decode(errors="replace").strip()
    is_full = any(os.strerror(number) in error for number in (errno.ENOSPC, errno.EFBIG))
    if not is_full or left:
        return FAILED, f"expected an error of {place} and no file, got {error[-150:] or 'none'}, and {left}"
    return PASSED, f"refused in {place}, and nothing left"


def find_in_files(stage: Stage) -> Outcome:
    """Search files for pieces of opened tensors. One that is made with a piece has to be found."""
    (control := stage.new("control")).write_bytes(bytes(99) + _needles(stage)[-1])
    folders = stage.path, stage.folder, "/dev/shm"  # noqa: S108
    paths = [Path(here, name) for folder in folders for here, _, names in os.walk(folder) for name in names]
    started = (stage.path / MARK).stat().st_mtime  # that of the folder is the time of the last row
    paths += [path for path in Path(tempfile.gettempdir()).iterdir() if _is_since(started, path)]
    found = {str(path) for path in paths if path.is_file() and _has_any(path, stage.needles)}
    if str(control) not in found:
        return FAILED, "the search does not find what is there"
    control.unlink()
    if len(found) > 1:
        return FAILED, f"plaintext in {', '.join(sorted(found - {str(control)}))}"
    return PASSED, f"none of {len(stage.needles)} pieces in folder, logs, /dev/shm, new temporary files: 64 MiB of each"


def _is_since(started: float, path: Path) -> bool:
    """Return whether a file was written since then. One that is gone was not."""
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime >= started
    return False


def _needles(stage: Stage) -> list[bytes]:
    return stage.needles or not_asked("no tensor was opened whose bytes can be told from others")


def _has_any(path: Path, needles: list[bytes]) -> bool:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            return any(content.find(needle, 0, _SEARCHED) >= 0 for needle in needles)
    except (OSError, ValueError):  # one that is empty, or may not be read
        return False


def find_in_parent(stage: Stage) -> Outcome:
    """Search the memory of the process that started this one."""
    needles, parent, searched = _needles(stage), Path(f"/proc/{os.getppid()}"), 0
    with contextlib.suppress(OSError), (parent / "mem").open("rb", 0) as memory:
        for line in (parent / "maps").read_text().splitlines():
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            for offset in range(start, end if " rw" in line and searched < _MEMORY else start, _BLOCK):
                with contextlib.suppress(OSError, OverflowError):  # a mapping without memory
                    block = os.pread(memory.fileno(), min(_BLOCK + 99, end - offset), offset)
                    searched += len(block)
                    if any(needle in block for needle in needles):
                        return FAILED, f"plaintext in process {parent.name}, which started this one"
    if not searched:
        not_here("the parent's memory may not be read")
    return PASSED, f"none of {len(needles)} pieces in {format_size(searched)} of process {parent.name}"
