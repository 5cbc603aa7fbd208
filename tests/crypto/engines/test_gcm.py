"""The machine code of the vector kernels: the instructions it must have, and how often it reads what may change."""

import re
from collections import Counter
from functools import cache

import pytest
from helpers.cases import each
from helpers.llvm import binding, ir

from fastrack._crypto.isa import INSTRUCTION_SETS, InstructionSet
from fastrack_native import gcm_ir, gcm_ranges, gcm_reencrypt

TRIPLE = "x86_64-unknown-linux-gnu"
REGISTERS = {16: "xmm", 32: "ymm", 64: "zmm"}
LEVELS = {16: "x86-64", 32: "x86-64-v3", 64: "x86-64-v4"}
pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # to compile the functions takes seconds
VECTORS = 8  # that the main loop holds at a time
OTHERS = {
    "reencrypt": gcm_reencrypt._build_reencrypt,
    "collect": gcm_ranges._build_collect,
    "decrypt": gcm_ranges._build_decrypt,
}  # of functions with six arguments
NATIVE = [form for form in INSTRUCTION_SETS.values() if form.architecture == "x86"]
each_form, each_native_form = (
    each("variant", [gcm_ir.Variant(bits, form) for bits in (128, 256) for form in forms])
    for forms in ([*NATIVE, InstructionSet("x86", 32, 16), InstructionSet("x86", 64, 32)], NATIVE)
)


@cache
def compiled(name, variant):
    """One chunk function for a plain x86-64, whatever this CPU is: its optimised LLVM code, and its instructions."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple(TRIPLE)
    except RuntimeError:
        pytest.skip("this LLVM compiles for other CPUs only")
    machine = target.create_target_machine(cpu="x86-64", opt=3)
    module = ir.Module()
    if name in OTHERS:
        gcm_ir.define_chunk(module, variant, name, 6, OTHERS[name]).linkage = "external"
    else:
        gcm_ir.chunk_function(module, variant, name).linkage = "external"
    parsed = binding.parse_assembly(str(module))
    parsed.triple = TRIPLE
    parsed.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    lines = (line.strip() for line in machine.emit_assembly(parsed).splitlines())
    return str(parsed), [line for line in lines if line and line[0] not in ".#"]


def prefix_of(variant):
    """Return what the vector instructions of a form begin with: those of 16 bytes are there in SSE."""
    return "" if variant.isa.native == 16 else "v"


def count(code, mnemonic, register):
    return sum(line.startswith(mnemonic + "\t") and register in line for line in code)


@each_form
@each("name", ["expand_key", "open", "verify", "seal", *OTHERS])
def test_every_function_compiles_for_its_own_cpu_level(name, variant):
    text, code = compiled(name, variant)
    assert f'"target-cpu"="{LEVELS[variant.isa.native]}"' in text
    assert any(line.startswith("ret") for line in code)


@each_native_form
@each("name", ["open", "seal"])
def test_the_main_loop_enciphers_whole_vectors(name, variant):
    _, code = compiled(name, variant)
    register, prefix = REGISTERS[variant.isa.width], prefix_of(variant)
    lone = variant.isa.width == 16  # the same registers hold a lone block, and that which masks the tag
    assert count(code, f"{prefix}aesenc", register) == (VECTORS + 3 * lone) * (variant.rounds - 1)
    assert count(code, f"{prefix}aesenclast", register) == VECTORS + 3 * lone


@each_native_form
@each(("name", "loops"), [("open", 1), ("verify", 1), ("seal", 2)])
def test_the_main_loop_hashes_whole_vectors(name, loops, variant):
    # Three products a vector and two for the reduction. Sealing hashes its last group behind the loop.
    _, code = compiled(name, variant)
    mnemonic, register = f"{prefix_of(variant)}pclmul", REGISTERS[variant.isa.width]
    products = [line for line in code if line.startswith(mnemonic) and register in line]
    others = len(products) - loops * (3 * VECTORS + 2)
    if variant.isa.width > 16:
        assert others == 0
    else:  # lone blocks, the last bytes, and the sizes, each with a reduction
        assert others >= 3 * 5
        assert others % 5 == 0


@each_form
def test_no_instruction_is_wider_than_the_form_allows(variant):
    wider = [register for width, register in REGISTERS.items() if width > variant.isa.native]
    for name in ("open", "verify", "seal", *OTHERS):
        _, code = compiled(name, variant)
        assert not [line for line in code if any(register in line for register in wider)]
        assert name == "decrypt" or [line for line in code if line.startswith(f"{prefix_of(variant)}pclmul")]


@each_form
@each(
    ("name", "reads"),
    [("open", VECTORS + 2), ("collect", VECTORS + 2), ("seal", VECTORS + 1), ("reencrypt", VECTORS + 2)],
)
def test_every_vector_of_the_text_is_read_by_a_load_that_may_not_be_repeated(name, reads, variant):
    # The main loop's, one for a lone block, and one for the tag to compare with. The last bytes are copied before use.
    text, _ = compiled(name, variant)
    loads = re.findall(r"load volatile <(\d) x i64>, ptr [^,]+, align (\d+)", text)
    if name == "reencrypt":  # what was sealed is read back by such loads as well: of groups, and of a lone block
        again = [(str(variant.isa.width // 8), str(variant.isa.width))] * VECTORS + [("2", "16")]
        assert not Counter(again) - Counter(loads)
        loads = list((Counter(loads) - Counter(again)).elements())
    if name == "collect" and variant.isa.width == 16:
        reads += VECTORS - 2  # LLVM unrolls the loop over lone blocks, of which there are fewer than a group has
    assert len(loads) == reads
    sizes = [variant.isa.width // 8] * VECTORS + [2] * (reads - VECTORS)
    assert Counter(loads) == Counter((str(size), "1") for size in sizes)
    # Whatever else is read lies aligned, in the schedule, or in the scratch block of the last bytes.
    others = re.findall(r"load <\d x i64>, ptr ([^,]+), align 1\b", text)
    assert len(set(others)) <= 1


@each_form
@each("name", ["open", "verify", "collect"])
def test_the_last_bytes_of_the_ciphertext_are_read_once(name, variant):
    text, _ = compiled(name, variant)
    scratch = re.findall(r"(\S+) = alloca ", text)
    copies = re.findall(r"call void @llvm\.mem(?:cpy|move)[^(]*\(ptr [^,]*, ptr [^,%]*(\S+), i64 \S+, i1 (\w+)\)", text)
    assert [is_volatile for source, is_volatile in copies if source not in scratch] == ["true"]


@each_native_form
@each("name", ["open", "seal"])
def test_the_machine_code_reads_every_vector_of_a_group_once(name, variant):
    # The text is what lies at eight places from one register, a vector apart; all else is a table or on the stack.
    _, code = compiled(name, variant)
    register = REGISTERS[variant.isa.width]
    reads = [re.match(rf"{prefix_of(variant)}[a-z0-9]+\t(-?\d*)(\([^)]+\)), %{register}", line) for line in code]
    places = {}
    for match in filter(None, reads):
        places.setdefault(match[2], []).append(int(match[1] or 0))
    texts = [
        base
        for base, offsets in places.items()
        if sorted(offset - min(offsets) for offset in offsets) == [variant.isa.width * lane for lane in range(VECTORS)]
    ]
    assert len(texts) == 1
    assert "rsp" not in texts[0]
    assert "rbp" not in texts[0]
    assert sum(texts[0] in line for line in code if f"%{register}" in line) == VECTORS


def print_loads_in_another_way(monkeypatch):
    describe = ir.LoadInstr.descr

    def descr(load, buffer):
        start = len(buffer)
        describe(load, buffer)
        buffer[start] = buffer[start].replace("load ", "load\t")

    monkeypatch.setattr(ir.LoadInstr, "descr", descr)


def print_instructions_without_asking_them(monkeypatch):
    def to_string(load):
        buffer = []
        ir.LoadInstr.descr(load, buffer)
        return f"{load.get_reference()} = {''.join(buffer)}"

    monkeypatch.setattr(ir.LoadInstr, "_to_string", to_string)


@pytest.mark.parametrize("change", [print_loads_in_another_way, print_instructions_without_asking_them])
@each("name", ["open", "seal"])
def test_code_whose_loads_cannot_be_marked_is_not_made(monkeypatch, name, change):
    change(monkeypatch)
    with pytest.raises(RuntimeError, match="expected llvmlite to print 'load volatile', got "):
        gcm_ir.chunk_function(ir.Module(), gcm_ir.Variant(128, InstructionSet("x86", 32, 16)), name)
