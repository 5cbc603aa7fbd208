"""Test what the machine code has of instructions, by disassembling it: outside a form those of every CPU."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from struct import unpack_from

import pytest

pytestmark = pytest.mark.nightly

MAKE = """
import os
import sys
from pathlib import Path

os.environ |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_OPT": "0"}
from fastrack_native import build, compiler

Path(sys.argv[2]).write_bytes(build.make_object(compiler.TARGETS[sys.argv[1]], name="_native"))
"""


@pytest.fixture(scope="module")
def make_code(tmp_path_factory):
    """Makes the object code for an architecture, which unlike the module has the names of its functions."""

    def make(architecture):
        pytest.importorskip("numba", reason="makes the machine code")
        path = tmp_path_factory.mktemp("code") / f"{architecture}.o"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", MAKE, architecture, path], check=True, env=environment)
        return path

    return make


def form_of(function):
    """Return the form that a function is of by its name, or "" if it is for every CPU."""
    found = re.search(r"_(x86|arm)_(\d+)_\d+", function)
    return "" if found is None else {"64": "vaes-512", "32": "vaes-256", "16": "narrow"}[found[2]]


# x86-64

OBJDUMP = shutil.which("x86_64-linux-gnu-objdump") or shutil.which("objdump")

# The bytes that no other instruction begins with in 64-bit code (Intel SDM, volume 2, sections 2.3 and 2.7).
VEX, EVEX = {"c4", "c5"}, {"62"}

# What came after the first x86-64: SSE3, SSSE3, SSE4, AES, PCLMULQDQ, SHA, and instructions on general registers.
LATER = re.compile(
    r"""addsubp|h(add|sub)p|lddqu|movddup|movs[hl]dup|monitor|mwait
    |palignr|pabs|ph(add|sub|minposuw)|pmadd(ub|52)|pmulhrsw|pshufb|psign
    |blend|dpp[ds]$|extractps|insertps|movntdqa|mpsadbw|packusdw|pblend|pcmp(eqq|gtq|[ei]str)|pextr[bdq]|pinsr[bdq]
    |p(max|min)(s[bd]|u[wd])|pmov[sz]x|pmul(dq|ld)|ptest|round[ps]|crc32|popcnt
    |aes|pclmul|sha(1|256)|gf2p8
    |[lt]zcnt|movbe|andn$|bextr|bls|bzhi|mulx|pdep|pext$|rorx|s[ah][lr]x|ad[co]x|cmpxchg16b|[ls]ahf|prefetchw
    |rd(rand|seed|pid|tscp)|xsave|xrstor|clflushopt|clwb|movdir|xbegin|xtest|serialize|umwait|tpause""",
    re.VERBOSE,
)
OF_AESNI = re.compile(
    r"aes|pclmul|pshufb|palignr|pabs|psign|ph(add|sub)|pmaddub|pmulhrsw|addsubp|h(add|sub)p|movddup|lddqu"
)
PREFIXES = {"lock", "rep", "repz", "repnz", "notrack", "bnd", "data16", "cs", "ds"}


@pytest.fixture(scope="module")
def instructions(make_code):
    """Holds for each form how often its functions have an instruction: first byte, name and widest register."""
    if OBJDUMP is None:
        pytest.skip("needs objdump")
    command = [OBJDUMP, "-dw", "-M", "intel", make_code("x86_64")]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)
    if "x86-64" not in listing.stdout:
        pytest.skip("needs an objdump for x86-64")
    found, form = defaultdict(Counter), None
    for line in listing.stdout.splitlines():
        if start := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            form = form_of(start[1])
        elif line.count("\t") == 2:
            _, code, text = line.split("\t")
            name = next(word for word in text.split() if word not in PREFIXES)
            found[form][code.split()[0], name, max(re.findall(r"\b[xyz]mm(?=\d)", text), default="")] += 1
    return found


def test_every_form_has_functions(instructions):
    assert set(instructions) == {"", "narrow", "vaes-256", "vaes-512"}
    assert min(sum(counts.values()) for counts in instructions.values()) > 1000


def test_code_for_every_cpu_has_no_instruction_that_came_later(instructions):
    later = [name for first, name, _ in instructions[""] if first in VEX | EVEX or LATER.match(name)]
    assert later == []


def test_the_narrow_form_needs_nothing_but_aes_and_what_came_before(instructions):
    narrow = instructions["narrow"]
    assert [name for first, name, _ in narrow if first in VEX | EVEX] == []
    assert [name for _, name, _ in narrow if LATER.match(name) and not OF_AESNI.match(name)] == []
    assert {width for _, _, width in narrow} <= {"", "xmm"}
    assert {"aesenc", "aesenclast", "pshufb"} <= {name for _, name, _ in narrow if LATER.match(name)}


def test_the_form_with_256_bits_needs_no_avx_512(instructions):
    wide = instructions["vaes-256"]
    assert [name for first, name, _ in wide if first in EVEX] == []
    assert {width for _, _, width in wide} == {"", "xmm", "ymm"}
    assert any(name == "vaesenc" and width == "ymm" for _, name, width in wide)


def test_the_form_with_512_bits_has_all_that_is_looked_for(instructions):
    wide = instructions["vaes-512"]
    assert {"c4", "c5", "62"} <= {first for first, _, _ in wide}
    assert any(name == "vaesenc" and width == "zmm" for _, name, width in wide)


# AArch64, whose instructions have four bytes each: the words of some, and which of their bits say so (Arm ARM, C4.1).
NM = shutil.which("nm")
OF_ARM = {
    "aes": (0x4E280800, 0xFFFF0C00),
    "pmull": (0x0EE0E000, 0xBFE0FC00),
    "sha": (0x5E000000, 0xFFE08C00),
    "sha of two registers": (0x5E280800, 0xFFFF0C00),
    "sve": (0x04000000, 0x1E000000),
    "lse": (0x38200000, 0x3F200C00),
    "cas": (0x08A07C00, 0x3FA07C00),
}


@pytest.fixture(scope="module")
def arm_instructions(make_code):
    """Holds for each form how often its functions have an instruction of `OF_ARM`."""
    if NM is None:
        pytest.skip("needs nm")
    path = make_code("aarch64")
    listing = subprocess.run([NM, "-S", "--defined-only", path], capture_output=True, text=True, check=True)
    code = path.read_bytes()
    text = text_of(code)
    found = defaultdict(Counter)
    for line in listing.stdout.splitlines():
        place, size, kind, name = line.split() if line.count(" ") == 3 else (0, 0, "", "")
        if kind in {"t", "T"}:
            start, stop = int(place, 16), int(place, 16) + int(size, 16)
            for word in memoryview(text[start:stop]).cast("I"):
                found[form_of(name)]["all"] += 1
                found[form_of(name)].update(kind for kind, (bits, mask) in OF_ARM.items() if word & mask == bits)
    return found


def text_of(code):
    """Return the section .text of an object file (ELF, 64 bits, little-endian)."""
    (table,) = unpack_from("<Q", code, 0x28)
    size, count, names = unpack_from("<3H", code, 0x3A)
    sections = [unpack_from("<2I4Q", code, table + size * index) for index in range(count)]
    for name, _, _, _, offset, length in sections:
        start = sections[names][4] + name
        if code[start : code.index(b"\0", start)] == b".text":
            return code[offset : offset + length]
    raise AssertionError("no section .text")


def test_code_for_every_arm_cpu_has_no_instruction_that_came_later(arm_instructions):
    assert set(arm_instructions) == {"", "narrow"}
    assert arm_instructions[""].keys() == {"all"}
    assert arm_instructions[""]["all"] > 1000


def test_the_arm_form_needs_nothing_but_aes(arm_instructions):
    assert arm_instructions["narrow"].keys() == {"all", "aes", "pmull"}
