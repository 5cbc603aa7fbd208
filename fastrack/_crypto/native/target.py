"""The platforms that machine code is made for.

Code of no instruction set is for every CPU of an architecture, and no generator asks the machine that it runs on: the
same sources give the same code on all of them.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from typing import Any

from llvmlite import binding

from fastrack._crypto.isa import INSTRUCTION_SETS

_FIRST_LLVM = (22,)  # LLVM 20 aborts the process at "zero-call-used-regs"="all"; what of 21 is not known


@dataclass(frozen=True, slots=True)
class Target:
    """A platform: its name by `platform.machine`, LLVM's names of it and its oldest CPU, and its instruction sets."""

    architecture: str
    triple: str
    cpu: str
    isas: tuple[str, ...]


TARGETS = {
    "x86_64": Target("x86_64", "x86_64-unknown-linux-gnu", "x86-64", ("vaes-512", "vaes-256", "aesni")),
    "aarch64": Target("aarch64", "aarch64-unknown-linux-gnu", "generic", ("armv8",)),
}
assert set(INSTRUCTION_SETS) == {isa for target in TARGETS.values() for isa in target.isas}


def host_target() -> Target:
    """Return the platform of this process, to compile for it here. Raise RuntimeError if it has none."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    found = TARGETS.get(machine)
    if found is None or sys.maxsize < 1 << 62:
        raise RuntimeError(f"expected a 64-bit CPU of {' or '.join(TARGETS)}, got {platform.machine()}")
    return Target(found.architecture, binding.get_process_triple(), found.cpu, found.isas)


def require_llvm() -> None:
    """Raise RuntimeError if this LLVM cannot make the code. It would not say so, but end the process."""
    if binding.llvm_version_info < _FIRST_LLVM:
        version = ".".join(map(str, binding.llvm_version_info))
        raise RuntimeError(
            f"expected LLVM {_FIRST_LLVM[0]} or later, which numba 0.66 and later have, got LLVM {version}. "
            "Install a later numba, or unset FASTRACK_ENGINE to use the code that is there"
        )


def target_machine(target: Target, *, here: bool = False) -> Any:
    """Return LLVM's compiler for a platform, of code for a shared object, or with `here` for this process."""
    require_llvm()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    binding.initialize_native_asmparser()  # for CPUID, which has no intrinsic
    found = binding.Target.from_triple(target.triple)
    if not here:
        return found.create_target_machine(target.cpu, "", 3, reloc="pic", codemodel="small")
    relocation = "static" if found.name.startswith("x86") else "default"
    return found.create_target_machine(target.cpu, "", 3, reloc=relocation, codemodel="jitdefault", jit=True)
