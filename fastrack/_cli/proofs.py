"""The evidence that this machine could give to `fastrack attest collect`, and its missing parts. None is requested."""

import os
from dataclasses import dataclass
from pathlib import Path

from fastrack._cli.machine import ROOT, CpuTee
from fastrack._devices.graphics import Gpu, Graphics
from fastrack.errors import DeviceError

_TSM = "sys/kernel/config/tsm/report"


@dataclass(frozen=True, slots=True)
class Proof:
    """The evidence of one part of the machine: "CPU", or "GPU" and its number."""

    part: str
    kind: str | None  # "tdx", "snp" or "gpu"; None if it is not known
    possible: bool
    missing: str | None  # the missing part and advice, if it is not possible

    def __str__(self) -> str:
        from fastrack.attest._kinds import CPU_KINDS

        kind = CPU_KINDS.get(self.kind or "gpu")
        document = "an attestation report" if kind is None else f"a {kind.document}"
        return f"can give {document}" if self.possible else f"no evidence: {self.missing}"


def read_proofs(tee: CpuTee, graphics: Graphics, root: Path = ROOT) -> tuple[Proof, ...]:
    """Return the evidence that the CPU and each GPU could give."""
    missing = (_missing_on_gpu(gpu, graphics) for gpu in graphics.gpus)
    gpus = (Proof(f"GPU {number}", "gpu", problem is None, problem) for number, problem in enumerate(missing))
    return (_read_cpu(tee, root / _TSM), *gpus)


def lacking_states(graphics: Graphics) -> dict[str, str]:
    """Return what is to be set on GPUs in confidential mode before the first process, by the name of the state."""
    lacking = {}
    if graphics.confidential.enabled and graphics.confidential.ready is False:
        lacking["ready"] = (
            "no: the GPU refuses all work. Set it when the machine has proved itself: nvidia-smi conf-compute -srs 1"
        )
    if graphics.confidential.enabled and any(gpu.persists is False for gpu in graphics.gpus):
        lacking["persistence"] = (
            "off: the GPU may need a new session, and a new proof, after each last process. nvidia-smi -pm 1"
        )
    return lacking


def _read_cpu(tee: CpuTee, folder: Path) -> Proof:
    from fastrack.attest._collect import read_tsm_provider
    from fastrack.attest._kinds import CPU_KINDS

    known = {kind.platform: kind for kind in CPU_KINDS.values()}.get(tee.kind or "")
    kind = None if known is None else known.name
    if not folder.is_dir():
        platforms = " or ".join(kind.platform for kind in CPU_KINDS.values())
        missing = f"this is no guest of {platforms}. Run it in a confidential virtual machine"
        if known is not None:
            missing = f"there is no folder /{_TSM}. Use Linux 6.7 or later, mount configfs, and load {known.provider}"
        return Proof("CPU", kind, False, missing)
    if not os.access(folder, os.W_OK):
        missing = f"/{_TSM} cannot be written by this user. Run `fastrack attest collect` as root"
        return Proof("CPU", kind, False, missing)
    try:
        return Proof("CPU", read_tsm_provider(folder), True, None)
    except DeviceError as error:
        return Proof("CPU", kind, False, str(error))


def _missing_on_gpu(gpu: Gpu, graphics: Graphics) -> str | None:
    mode = graphics.confidential
    if mode.enabled is None:
        return "the driver did not report confidential mode. Install driver 550 or later"
    if not mode.encrypts_copies:
        return "confidential mode is off. Switch it on from the host, before the virtual machine starts"
    if mode.devtools:
        return "dev-tools mode is on, which policies refuse. Switch confidential mode on without it, from the host"
    if mode.environment not in {None, "production"}:
        return f"its environment is {mode.environment}. Use a GPU in a production environment"
    if not gpu.attests:
        return "it gave no certificates. It needs the generation Hopper or later, and driver 550 or later"
    return None
