"""List the forms of the compiled engine, and select those that this machine can run."""

from __future__ import annotations

import os
import sys
from typing import Literal, NamedTuple


class Form(NamedTuple):
    """A form of the compiled code: its architecture, bytes of a vector, and bytes of the widest AES instruction.

    With `native < width` several instructions process each vector. That is slower, and lets tests run wide code on
    narrow instructions.
    """

    architecture: Literal["x86", "arm"]
    width: int
    native: int

    @property
    def narrow(self) -> Form:
        """The form with vectors of one block."""
        return self._replace(width=16, native=16)

    @property
    def target(self) -> tuple[str, str]:
        """LLVM's name of a microarchitecture level or "", and further features: the arguments of `compile_for`."""
        level, features = _TARGETS[self.architecture, self.native]
        return level, ",".join(f"+{feature}" for feature in features)


FORMS = {
    "vaes-512": Form("x86", 64, 64),
    "vaes-256": Form("x86", 32, 32),
    "aesni": Form("x86", 16, 16),
    "armv8": Form("arm", 16, 16),
}
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512cd", "avx512dq")
_VAES = ("aes", "pclmul", "prfchw", "vaes", "vpclmulqdq")
_TARGETS = {
    ("x86", 64): ("x86-64-v4", _VAES),
    ("x86", 32): ("x86-64-v3", _VAES),
    ("x86", 16): ("x86-64", ("aes", "pclmul", "ssse3")),
    ("arm", 16): ("", ("neon", "aes")),
}
_LEVELS = {"x86-64-v4": ("avx2", "bmi2", *_AVX512), "x86-64-v3": ("avx2", "bmi2")}  # what to look for in a CPU


def supported_forms() -> tuple[str, ...]:
    """Return the names of the forms that this machine can run, fastest first."""
    if sys.platform not in {"linux", "darwin"} or not is_compiling():
        return ()
    return tuple(name for name, form in FORMS.items() if _is_supported(form))


def narrow_form() -> Form | None:
    """Return the form with vectors of one block that this machine can run, if there is one."""
    return next((FORMS[name] for name in supported_forms() if FORMS[name].width == 16), None)


def _is_supported(form: Form) -> bool:
    level, features = _TARGETS[form.architecture, form.native]
    return _cpu_has(*_LEVELS.get(level, ()), *features)


def _cpu_has(*names: str) -> bool:
    """Return whether this CPU has these instructions, by LLVM's names.

    The names tell architectures apart as well: "pclmul" is of x86 alone, and "neon" of Arm. On Arm "aes" includes the
    multiplication of polynomials.
    """
    from llvmlite import binding

    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know this machine
        return False
    return all(features.get(name, False) for name in names)


def is_compiling() -> bool:
    """Return whether numba compiles functions, without importing it: NUMBA_DISABLE_JIT=1 disables that."""
    disabled = getattr(sys.modules.get("numba.core.config"), "DISABLE_JIT", None)
    if disabled is None:
        try:
            disabled = int(os.environ.get("NUMBA_DISABLE_JIT", "0"))
        except ValueError:  # numba reads other values as 0
            disabled = 0
    return not disabled
