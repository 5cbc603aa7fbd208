"""Require confidential GPUs, or certain ones, before this process opens a GPU: for callers, and for keys granted so.

The driver is asked once a process, and again when a key is granted or renewed. Its answers are those of the machine,
which evidence has to prove. `open_device` calls `check` before it makes anything on a GPU, and no other function opens
one: so a requirement of a key holds for the whole process, whatever the key is used for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from importlib import import_module
from typing import Any

from fastrack._devices.nvml import Confidential, open_queries, read_confidential
from fastrack._util.fork import register_fork_reset
from fastrack._util.shown import shown
from fastrack.errors import DeviceError

CONFIDENTIAL = "confidential"
VARIABLE = "FASTRACK_REQUIRE"
"""The environment variable that, with the value "confidential", requires such GPUs of all that a process opens."""

_PROTECTED_PCIE = "protected PCIe"
_SEE = "`fastrack doctor` shows what the driver tells"


def requirement(value: str | None, place: str = "require=") -> str:
    """Return a requirement, empty for none. Raise ValueError, or DeviceError for the variable, if it is another."""
    if value not in {None, "", CONFIDENTIAL}:
        kind = DeviceError if place == VARIABLE else ValueError  # of the caller
        raise kind(f"{place}: expected {CONFIDENTIAL!r} or nothing, got {shown(value)}. Correct it")
    return value or ""


def check(name: str, require: str | None = None) -> None:
    """Require of a device what its caller, the environment, and the keys of this process require.

    Raise DeviceError if the device does not meet it, or cannot be asked, and ValueError for an unknown requirement.
    Without `require`, host memory is not asked about: it is where a key that was granted lies.
    """
    asked = requirement(require)
    if name != "cpu":
        with _process.lock:
            _process.judge(name, asked)
            _process.opened[name] = _process.opened.get(name, "") or asked
    elif asked:
        raise DeviceError("require=: expected a GPU in confidential mode, got 'cpu'. Name a GPU, or leave require= out")


def bind_key(key_id: str, require: str | None, chips: Collection[str] | None) -> None:
    """Require of this process from now on what a key was granted for, and ask the driver again, as after a renewal.

    `require` is None for any GPU, and `chips` None for all in confidential mode. Raise DeviceError if the process has
    opened a GPU that is not, or no longer, as required; all requirements are then as before.
    """
    with _process.lock:
        before = _process.keys.copy()
        if require is not None:
            _process.keys[key_id] = chips
        _process.is_confidential = False
        _process.chips.clear()
        try:
            _process.judge_opened()
        except BaseException:
            _process.keys = before
            raise


class _Process:
    """The requirements of this process on GPUs, and the GPUs that it has opened."""

    def __init__(self) -> None:
        self.keys: dict[str, Collection[str] | None] = {}  # the chips by the id of the key; None for all
        self.is_confidential = False  # the driver attaches no GPU in another mode than the first (its gpu_mgr.c)
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Forget the GPUs: a forked child uses none of its parent's, and may number others."""
        self.chips: dict[str, str | None] = {}  # the id in its certificate, by the name of a GPU
        self.opened: dict[str, str] = {}  # what callers require, by the names of GPUs
        self.lock = threading.Lock()

    def judge_opened(self) -> None:
        for name, asked in list(self.opened.items()):
            if _find_place(name) is None:  # an attempt that failed: it is judged when it is made again
                del self.opened[name]
            else:
                self.judge(name, asked)

    def judge(self, name: str, asked: str) -> None:
        told = requirement(os.environ.get(VARIABLE), VARIABLE)
        by = "require=" if asked else VARIABLE if told else next((f"key {key_id}" for key_id in self.keys), None)
        if by is None:
            return
        if not self.is_confidential:
            for found, advice in _problems(read_confidential()):
                raise _refusal(name, by, "in confidential mode", found, advice)
            self.is_confidential = True
        for key_id, chips in self.keys.items():
            if chips is None:
                continue
            chip = self.chips.get(name) or _read_chip(name)
            if chip not in chips:
                found = f"chip {chip}" if chip else "one whose certificate cannot be read"
                wanted = f"of the chips {', '.join(sorted(chips)):.200}"
                advice = "Use a GPU that proved itself when the key was granted, or ask the owner's broker for it again"
                raise _refusal(name, f"key {key_id}", wanted, found, advice)
            self.chips[name] = chip


_process = _Process()


def _refusal(name: str, by: str, wanted: str, found: str, advice: str) -> DeviceError:
    return DeviceError(f"using {name} failed: expected a GPU {wanted}, as {by} requires, got {found}. {advice}")


def _problems(mode: Confidential) -> Iterator[tuple[str, str]]:
    """Yield why keys are not safe on the GPUs of a machine, and what to do."""
    is_protected = mode.multi_gpu == _PROTECTED_PCIE
    if mode.enabled is None:
        yield "one of an unknown mode", f"Install nvidia-ml-py beside NVIDIA's driver: {_SEE}"
    if not mode.encrypts_copies:
        only = "" if mode.multi_gpu in {None, "none"} else f", and {mode.multi_gpu}, which leaves copies unencrypted"
        yield f"one with the mode off{only}", f"Switch it on, on the host: {_SEE}"
    # Of protected PCIe, which is apart from this mode, the driver tells no environment, and whether GPUs are ready only
    # by refusing all work of CUDA while they are not.
    if mode.environment != "production" and not (is_protected and mode.environment == "unavailable"):
        yield f"one in the environment {mode.environment or 'unknown'}", f"Use a GPU in production: {_SEE}"
    if mode.devtools is not False:
        yield "one in dev-tools mode, whose memory others can read", f"Switch that off, on the host: {_SEE}"
    if mode.ready is not True and not (is_protected and mode.ready is None):
        advice = "Set it ready once the machine has proved itself: nvidia-smi conf-compute -srs 1"
        yield "one that is not known to be ready", advice


def _find_place(name: str) -> str | None:
    """Return the PCI address of a GPU by CUDA's number, which is not NVML's; None if CUDA does not know it."""
    try:
        runtime: Any = import_module("cupy").cuda.runtime
        place: str = runtime.deviceGetPCIBusId(int(name.removeprefix("cuda:")))
    except (ImportError, RuntimeError):
        return None
    return place


def _read_chip(name: str) -> str | None:
    """Return the serial number in the certificate of a GPU's chip; None if it cannot be read."""
    from cryptography import x509  # deferred: only keys that are bound to chips need it

    place, nvml = _find_place(name), import_module("pynvml")  # by which the mode was asked
    try:
        with open_queries(nvml) as queries:
            handle = queries.ask(name, "nvmlDeviceGetHandleByPciBusId", place)
            answer = None if handle is None else queries.ask(name, "nvmlDeviceGetConfComputeGpuCertificate", handle)
        if answer is None:
            return None
        chain = bytes(answer.attestationCertChain[: answer.attestationCertChainSize]).rstrip(b"\0")
        chip = x509.load_pem_x509_certificates(chain)[1]  # the issuer of the key that signs reports
        return str(chip.subject.get_attributes_for_oid(x509.NameOID.SERIAL_NUMBER)[0].value)
    except (nvml.NVMLError, ValueError, IndexError):
        return None
