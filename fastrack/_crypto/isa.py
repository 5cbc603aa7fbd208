"""List the instruction sets of the compiled engine, and select those that this machine can run."""

from __future__ import annotations

from array import array
from typing import Any, Literal, NamedTuple

from fastrack._crypto import native


class InstructionSet(NamedTuple):
    """An architecture, the bytes of a vector, and the bytes of its widest AES instruction: what code is made for.

    With `native < width` several instructions process each vector. That is slower, and lets tests run wide code on
    narrow instructions.
    """

    architecture: Literal["x86", "arm"]
    width: int
    native: int

    @property
    def one_block(self) -> InstructionSet:
        """The instruction set with vectors of one block."""
        return self._replace(width=16, native=16)

    @property
    def target(self) -> tuple[str, str]:
        """LLVM's name of a microarchitecture level or "", and further features: the attributes of functions."""
        level, features = _TARGETS[self.architecture, self.native]
        return level, ",".join(f"+{feature}" for feature in features)


SCHEDULE_SIZE = 2048  # bytes of an expanded message key, of the layout in `gcm_ir`

INSTRUCTION_SETS = {
    "vaes-512": InstructionSet("x86", 64, 64),
    "vaes-256": InstructionSet("x86", 32, 32),
    "aesni": InstructionSet("x86", 16, 16),
    "armv8": InstructionSet("arm", 16, 16),
}
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512cd", "avx512dq")
_VAES = ("aes", "pclmul", "prfchw", "vaes", "vpclmulqdq")
_TARGETS = {
    ("x86", 64): ("x86-64-v4", (*_VAES, "avx512vbmi")),
    ("x86", 32): ("x86-64-v3", _VAES),
    ("x86", 16): ("x86-64", ("aes", "pclmul", "ssse3")),
    ("arm", 16): ("", ("neon", "aes")),
}
# What a CPU of a level has (System V ABI for x86-64, section 3.1.1).
_V3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4.2", "ssse3")
_LEVELS = {"x86-64-v3": _V3, "x86-64-v4": (*_V3, *_AVX512)}


def supported_instruction_sets() -> tuple[str, ...]:
    """Return the names of the instruction sets that the native extension has and this CPU can run, fastest first."""
    features = _cpu_features()
    return tuple(name for name, isa in INSTRUCTION_SETS.items() if _needed(isa) <= features)


def _needed(isa: InstructionSet) -> set[str]:
    level, features = _TARGETS[isa.architecture, isa.native]
    return {*_LEVELS.get(level, ()), *features, isa.architecture}


def _cpu_features() -> frozenset[str]:
    """Return the instructions that this process may use, by LLVM's names, and its architecture; none without code."""
    code = native.load()
    if code is None:
        return frozenset()
    if not hasattr(code, "hwcap"):
        return _x86_features(code)
    word = code.hwcap()
    found = {name for name, bit in _HWCAP.items() if word >> bit & 1}
    # LLVM's "aes" includes the multiplication of polynomials.
    return frozenset({"arm", *(found if "pmull" in found else found - {"aes"})})


# Where CPUID tells of instructions: leaf, part, register and bit (Intel SDM, volume 2, CPUID).
_EBX, _ECX = 1, 2
_CPUID = {
    (1, 0, _ECX): {"pclmul": 1, "ssse3": 9, "fma": 12, "sse4.2": 20, "movbe": 22, "popcnt": 23, "aes": 25, "f16c": 29},
    (7, 0, _EBX): {"bmi": 3, "bmi2": 8},
    (0x80000001, 0, _ECX): {"lzcnt": 5, "prfchw": 8},
}
_CPUID_AVX = {
    (1, 0, _ECX): {"avx": 28},
    (7, 0, _EBX): {"avx2": 5},
    (7, 0, _ECX): {"vaes": 9, "vpclmulqdq": 10},
}
_CPUID_AVX512 = {
    (7, 0, _EBX): {"avx512f": 16, "avx512dq": 17, "avx512cd": 28, "avx512bw": 30, "avx512vl": 31},
    (7, 0, _ECX): {"avx512vbmi": 1},
}
_OSXSAVE = 27  # of ECX of leaf 1: the system lets programs ask which registers it saves
_YMM, _ZMM = 0b110, 0b11100110  # of XCR0: the registers that it saves

_HWCAP = {"neon": 1, "aes": 3, "pmull": 4}  # bits of the kernel's word


def _x86_features(code: Any) -> frozenset[str]:
    registers = array("q", bytes(32))

    def read(leaf: int, part: int, register: int) -> int:
        code.cpuid(leaf & ~0xFFFF, 0, registers)  # the highest leaf of this kind
        if registers[0] < leaf:
            return 0
        code.cpuid(leaf, part, registers)
        return registers[register]

    saved = code.xcr0() if read(1, 0, _ECX) >> _OSXSAVE & 1 else 0
    tables = [_CPUID]
    if saved & _YMM == _YMM:
        tables.append(_CPUID_AVX)
    if saved & _ZMM == _ZMM:
        tables.append(_CPUID_AVX512)
    found = {"x86"}
    for table in tables:
        for place, bits in table.items():
            word = read(*place)
            found |= {name for name, bit in bits.items() if word >> bit & 1}
    return frozenset(found)
