"""Test what is asked of the CPU before a form is chosen, on stand-ins for its registers and for the kernel's word."""

import platform
import re
from pathlib import Path

import pytest
from helpers.cases import each

from fastrack._crypto import isa, native

# Where the manuals have each flag: leaf, register and bit (Intel SDM, volume 2, CPUID; AMD APM, volume 3, appendix E).
EAX, EBX, ECX = range(3)
EXTENDED = 0x80000000
OSXSAVE = (1, ECX, 27)
NARROW = {"PCLMUL": (1, ECX, 1), "SSSE3": (1, ECX, 9), "AES": (1, ECX, 25)}
LEVEL_3 = {
    "FMA": (1, ECX, 12),
    "SSE4_2": (1, ECX, 20),
    "MOVBE": (1, ECX, 22),
    "POPCNT": (1, ECX, 23),
    "AVX": (1, ECX, 28),
    "F16C": (1, ECX, 29),
    "BMI": (7, EBX, 3),
    "AVX2": (7, EBX, 5),
    "BMI2": (7, EBX, 8),
    "LZCNT": (EXTENDED + 1, ECX, 5),
}
PREFETCH = {"PRFCHW": (EXTENDED + 1, ECX, 8)}
VAES = {"VAES": (7, ECX, 9), "VPCLMULQDQ": (7, ECX, 10)}
LEVEL_4 = {
    "AVX512F": (7, EBX, 16),
    "AVX512DQ": (7, EBX, 17),
    "AVX512CD": (7, EBX, 28),
    "AVX512BW": (7, EBX, 30),
    "AVX512VL": (7, EBX, 31),
}
VBMI = {"AVX512VBMI": (7, ECX, 1)}
FLAGS = NARROW | LEVEL_3 | PREFETCH | VAES | LEVEL_4 | VBMI

# Of XCR0: the states of registers that the kernel saves (Intel SDM, volume 1, section 13.3).
X87, XMM, YMM, MASKS, ZMM_UPPER, ZMM_16_TO_31, AMX = 1, 1 << 1, 1 << 2, 1 << 5, 1 << 6, 1 << 7, 0b11 << 17
AVX_STATE = X87 | XMM | YMM
AVX512_STATE = AVX_STATE | MASKS | ZMM_UPPER | ZMM_16_TO_31

WESTMERE = {**NARROW, **{name: FLAGS[name] for name in ("SSE4_2", "POPCNT")}}
SANDY_BRIDGE = {**WESTMERE, "AVX": FLAGS["AVX"]}
HASWELL = NARROW | LEVEL_3
SKYLAKE_X = HASWELL | PREFETCH | LEVEL_4
ZEN_3 = HASWELL | PREFETCH | VAES
ZEN_4 = ICE_LAKE = ZEN_3 | LEVEL_4 | VBMI

ALL = ("vaes-512", "vaes-256", "aesni")


class StandIn:
    """The native module of a CPU with these flags. Its kernel saves these states; None if no program may ask it."""

    def __init__(self, flags, saved=AVX512_STATE, *, highest=0x20, highest_extended=EXTENDED + 8):
        self._words = {(0, EAX): highest, (EXTENDED, EAX): highest_extended}
        self._highest = {0: highest, EXTENDED: highest_extended}
        self._saved = saved
        for leaf, register, bit in (*flags.values(), *([] if saved is None else [OSXSAVE])):
            self._words[leaf, register] = self._words.get((leaf, register), 0) | 1 << bit

    def cpuid(self, leaf, part, target):
        assert part == 0
        if leaf & ~EXTENDED and leaf > self._highest[leaf & EXTENDED]:  # then Intel's CPUs answer with another leaf
            target[:] = type(target)("q", [0xFFFFFFFF] * 4)
            return
        for register in range(4):
            target[register] = self._words.get((leaf, register), 0)

    def xcr0(self):
        assert self._saved is not None, "asked for XCR0 of a CPU that would end the process"
        return self._saved


class ArmStandIn:
    """The native module of an Arm CPU, with the kernel's word of its instructions."""

    def __init__(self, word):
        self.hwcap = lambda: word


@pytest.fixture
def use(monkeypatch):
    """Makes the forms ask a stand-in."""
    return lambda module: monkeypatch.setattr(native, "load", lambda: module)


@each(
    ("flags", "saved", "expected"),
    [
        ({}, None, ()),  # a CPU of 2003
        (WESTMERE, None, ("aesni",)),  # Westmere
        (SANDY_BRIDGE, AVX_STATE, ("aesni",)),  # Sandy Bridge
        (HASWELL, AVX_STATE, ("aesni",)),  # Haswell
        (SKYLAKE_X, AVX512_STATE, ("aesni",)),  # Skylake-X, which has no wide AES
        (ZEN_3, AVX_STATE, ("vaes-256", "aesni")),  # Zen 3, which has no AVX-512
        (ZEN_4, AVX512_STATE, ALL),  # Zen 4
        (ICE_LAKE, AVX512_STATE | AMX, ALL),  # Ice Lake and later
    ],
)
def test_a_cpu_gets_the_forms_that_it_can_run(use, flags, saved, expected):
    use(StandIn(flags, saved))
    assert isa.supported_instruction_sets() == expected


@each("name", FLAGS)
def test_no_form_is_chosen_without_one_of_its_flags(use, name):
    use(StandIn({flag: place for flag, place in ICE_LAKE.items() if flag != name}))
    expected = () if name in NARROW else ALL[1:] if name in LEVEL_4 | VBMI else ALL[2:]
    assert isa.supported_instruction_sets() == expected


def test_no_form_is_chosen_by_flags_that_are_not_its_own(use):
    own = {*FLAGS.values(), OSXSAVE}
    places = [(leaf, register, bit) for leaf in (1, 7, EXTENDED + 1) for register in range(4) for bit in range(32)]
    use(StandIn({place: place for place in places if place not in own}))
    assert isa.supported_instruction_sets() == ()


def test_registers_that_no_program_may_ask_for_are_not_used(use):
    use(StandIn(ICE_LAKE, None))  # without OSXSAVE, as under the kernel's option "noxsave"
    assert isa.supported_instruction_sets() == ("aesni",)


@each("saved", [0, X87, X87 | XMM, X87 | YMM, AVX512_STATE & ~YMM, AVX512_STATE & ~XMM])
def test_wide_registers_that_the_kernel_does_not_save_are_not_used(use, saved):
    use(StandIn(ICE_LAKE, saved))
    assert isa.supported_instruction_sets() == ("aesni",)


@each("absent", [MASKS, ZMM_UPPER, ZMM_16_TO_31, MASKS | ZMM_UPPER | ZMM_16_TO_31])
def test_the_widest_registers_are_used_only_if_the_kernel_saves_all_of_their_state(use, absent):
    use(StandIn(ICE_LAKE, (AVX512_STATE | AMX) & ~absent))  # as under "clearcpuid=avx512f"
    assert isa.supported_instruction_sets() == ("vaes-256", "aesni")


def test_a_leaf_beyond_the_highest_tells_nothing(use):
    for highest in (1, 2, 6):  # as where firmware limits the leaves for an old system
        use(StandIn(ICE_LAKE, highest=highest))
        assert isa.supported_instruction_sets() == ("aesni",)
    use(StandIn(ICE_LAKE, highest=0))
    assert isa.supported_instruction_sets() == ()
    for highest in (0, EXTENDED):
        use(StandIn(ICE_LAKE, highest_extended=highest))
        assert isa.supported_instruction_sets() == ("aesni",)


# Of <asm/hwcap.h> of Linux for arm64.
FP, ASIMD, EVTSTRM, AES, PMULL, SHA1, SHA2, CRC32, ATOMICS = (1 << bit for bit in range(9))


@each(
    ("word", "expected"),
    [
        (FP | ASIMD | EVTSTRM | CRC32, ()),  # Cortex-A72 of a Raspberry Pi 4
        (FP | ASIMD | EVTSTRM | AES | PMULL | SHA1 | SHA2 | CRC32, ("armv8",)),  # Cortex-A76
        (ASIMD | AES | PMULL, ("armv8",)),  # the least
        ((1 << 64) - 1, ("armv8",)),  # all
        (-1, ("armv8",)),  # all, as a signed word
        (((1 << 64) - 1) & ~ASIMD, ()),  # no vectors
        (((1 << 64) - 1) & ~AES, ()),  # no AES
        (((1 << 64) - 1) & ~PMULL, ()),  # no multiplication of polynomials
        (0, ()),  # nothing
    ],
)
def test_an_arm_cpu_gets_the_form_if_the_kernel_tells_of_its_instructions(use, word, expected):
    use(ArmStandIn(word))
    assert isa.supported_instruction_sets() == expected


def test_there_are_no_forms_without_machine_code(use):
    use(None)
    assert isa.supported_instruction_sets() == ()


# The manuals, as others read them

# The names of LLVM, of the kernel's /proc/cpuinfo, and of a compiler's cpuid.h.
NAMES = """
aes aes AES; avx avx AVX; avx2 avx2 AVX2; avx512bw avx512bw AVX512BW; avx512cd avx512cd AVX512CD;
avx512dq avx512dq AVX512DQ; avx512f avx512f AVX512F; avx512vbmi avx512vbmi AVX512VBMI;
avx512vl avx512vl AVX512VL; bmi bmi1 BMI; bmi2 bmi2 BMI2;
f16c f16c F16C; fma fma FMA; lzcnt abm LZCNT; movbe movbe MOVBE; pclmul pclmulqdq PCLMUL; popcnt popcnt POPCNT;
prfchw 3dnowprefetch PRFCHW; sse4.2 sse4_2 SSE4_2; ssse3 ssse3 SSSE3; vaes vaes VAES; vpclmulqdq vpclmulqdq VPCLMULQDQ
"""
NAMES = [entry.split() for entry in NAMES.split(";")]


def test_every_flag_that_a_form_needs_has_a_name_here():
    needed = set().union(*(isa._needed(form) for form in isa.INSTRUCTION_SETS.values() if form.architecture == "x86"))
    assert {name for name, _, _ in NAMES} == needed - {"x86"}
    assert {name for _, _, name in NAMES} == set(FLAGS)


def cpuid_headers():
    return sorted(Path("/usr/lib").glob("gcc/x86_64-*/*/include/cpuid.h"))


@pytest.mark.skipif(not cpuid_headers(), reason="needs the header cpuid.h of GCC for x86-64")
def test_the_bits_are_those_that_gcc_knows():
    text = cpuid_headers()[-1].read_text()
    bits = {name: int(bit) for name, bit in re.findall(r"#define bit_(\w+)\s+\(1u? << (\d+)\)", text)}
    assert {name: bits[name] for name in (*FLAGS, "OSXSAVE")} == {
        name: bit for name, (_, _, bit) in {**FLAGS, "OSXSAVE": OSXSAVE}.items()
    }


@pytest.mark.skipif(
    native.load() is None or platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(),
    reason="needs the native extension, Linux and x86-64",
)
def test_this_cpu_has_what_the_kernel_says():
    flags = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split()
    told = {name for name, kernels, _ in NAMES if kernels in flags}
    assert isa._cpu_features() == {"x86", *told}
