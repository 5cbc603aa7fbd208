"""Ask NVSwitches for evidence by NVIDIA's program nvattest, which has access to the library NSCQ.

The program is asked once for each switch, as it asks all of them with one nonce: so each report has the nonce of its
own place in the offer.
"""

import os
import select
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from fastrack._documents.exchange import CHAIN_LIMIT, REPORT_LIMIT, Reader
from fastrack._documents.fields import Fields, binary
from fastrack._util.gate import most_bytes
from fastrack._util.rights import require_own
from fastrack.attest._gpus.evidence import read_claims
from fastrack.attest._gpus.report import parse_gpu_report
from fastrack.attest._offer import DEVICES_LIMIT, DeviceEvidence
from fastrack.errors import DeviceError, FormatError, KeyPermissionError

PROGRAMS = ("/usr/bin/nvattest", "/usr/local/bin/nvattest")
"""The paths of the program. PATH is not asked, in which an earlier folder could have another."""

_KIND = "answer of nvattest"
_SECONDS = 60.0  # for each call, by which a hanging driver does not hang its caller
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
_EVIDENCE: Fields = {"evidence": binary(REPORT_LIMIT).of("report"), "certificate": binary(CHAIN_LIMIT).of("chain")}
_GO_ON = (
    "Install NVIDIA's nvattest, with support for NVSwitch and the driver's libnvidia-nscq; or collect with "
    "switches=False, and add the reports to those of the GPUs"
)


def collect_switches(make_nonce: Callable[[int], bytes]) -> list[DeviceEvidence]:
    """Ask all NVSwitches of this machine for reports, each with the nonce of its number.

    Raise DeviceError if the program is absent, may be another user's, fails, or answers with other reports.
    """
    program = _find_program()
    first = _ask(program, make_nonce(0))
    answers = [first, *(_ask(program, make_nonce(number)) for number in range(1, len(first)))]
    if any(answer.keys() != first.keys() for answer in answers):
        raise _error("the same switches each time", "others", "Try again.")
    return [answer[chip] for answer, chip in zip(answers, first, strict=True)]


def _find_program() -> str:
    for path in PROGRAMS:
        if os.path.exists(path):  # noqa: PTH110 - a text for the error too
            try:
                require_own(path)
            except KeyPermissionError as error:
                raise _error(f"{path} that no other user can replace", "another", str(error)) from None
            return path
    raise _error(f"NVIDIA's program at {' or '.join(PROGRAMS)}", "none", f"{_GO_ON}.")


def _ask(program: str, nonce: bytes) -> dict[str, DeviceEvidence]:
    """Return the evidence of all switches for a nonce, by the ids of their chips."""
    command = [program, "collect-evidence", "--device", "nvswitch", "--nonce", nonce.hex(), "--format", "json"]
    status, output = _run(command)
    if status:
        told = f"signal {-status}" if status < 0 else f"status {status}"
        raise _error("reports of nvattest", f"{told} of it", f"Run {' '.join(command)} to see why. {_GO_ON}.")
    found: dict[str, DeviceEvidence] = {}
    try:
        answer = Reader.parse(output, _KIND)
        answer.expect("result_code", 0)
        for item in answer.items("evidences"):
            evidence = DeviceEvidence(**item.read_all(_EVIDENCE))
            chip = _read_chip(evidence, nonce)
            if chip in found:
                raise _error("each switch once", f"chip {chip} twice", "Restart the fabric manager, and try again.")
            found[chip] = evidence
    except FormatError as error:
        raise _error("reports of switches", f"other output: {error}", "Update nvattest.") from None
    if not 0 < len(found) <= DEVICES_LIMIT:
        raise _error(f"1 to {DEVICES_LIMIT} switches", len(found), "See that the fabric manager runs.")
    return found


def _read_chip(evidence: DeviceEvidence, nonce: bytes) -> str:
    """Return the id that a switch claims. The owner verifies it; here a mistake is found before it is sent."""
    claims = read_claims(evidence.report, evidence.chain)
    if "driver" in claims:
        raise _error("reports of switches", "one of a GPU", "Update nvattest.")
    if parse_gpu_report(evidence.report).nonce != nonce:
        raise _error("reports with the nonce that was asked for", "one with another", "Try again.")
    return claims["chip_id"]


def _run(command: list[str]) -> tuple[int, bytes]:
    """Run a program without a shell, and return its status and its output, within bounds of both time and size."""
    limit, end, output = most_bytes(_KIND), monotonic() + _SECONDS, bytearray()
    try:
        process = subprocess.Popen(  # noqa: S603 - a fixed path, and hexadecimal digits
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise _error(f"{command[0]} that runs", str(error), f"{_GO_ON}.") from None
    assert process.stdout is not None
    ready, descriptor = select.poll(), process.stdout.fileno()
    ready.register(descriptor)
    try:
        while ready.poll(1000 * max(0.0, end - monotonic())):
            chunk = os.read(descriptor, 1 << 16)
            output += chunk
            if len(output) > limit:
                raise _error(f"up to {limit} bytes of nvattest", "more", "Update nvattest.")
            if not chunk:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(max(0.0, end - monotonic())), bytes(output)
                break
        advice = "See that the fabric manager runs, and try again."
        raise _error(f"an answer of nvattest within {_SECONDS:.0f} s", "none", advice)
    finally:
        if process.returncode is None:  # it was not waited for: its group is its own, though it may have ended
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)  # what it started too
                process.wait(1.0)  # and no longer: one that waits for its driver does not end
        process.stdout.close()


def _error(wanted: str, found: object, advice: str) -> DeviceError:
    return DeviceError(f"collecting evidence of the NVSwitches failed: expected {wanted}, got {found}. {advice}")
