"""The machine code of the form for AArch64, which LLVM makes on any CPU: `make aarch64` runs it."""

import re
from functools import cache

import pytest
from helpers import arm
from helpers.cases import each
from helpers.llvm import binding, ir

from fastrack._crypto.isa import INSTRUCTION_SETS
from fastrack_native.gcm_ir import Variant, chunk_function

pytestmark = pytest.mark.slow  # to compile the functions takes seconds
VECTORS = 8  # that the main loop holds at a time
NAMES = ["expand_key", *arm.RUNS]
LONG = Variant(256, INSTRUCTION_SETS["armv8"])
each_variant = each("variant", [Variant(128, INSTRUCTION_SETS["armv8"]), LONG])


@cache
def compiled(name, variant, cpu):
    """A key expansion, or the run of a name: its optimised LLVM code, and the instructions of each function."""
    binding.initialize_all_targets()
    try:
        binding.Target.from_triple(arm.TRIPLE)
    except RuntimeError:
        pytest.skip("this LLVM does not compile for AArch64")
    module = ir.Module()
    build = arm.RUNS.get(name, chunk_function)
    build(module, variant, name).linkage = "external"
    parsed, machine = arm.compile_module(module, cpu)
    functions = re.split(r"^(fastrack_\w+):$", machine.emit_assembly(parsed), flags=re.MULTILINE)[1:]
    instructions = re.compile(r"^\t([a-z][a-z0-9.]*)\t?(.*)$", re.MULTILINE)
    code = {label: instructions.findall(body) for label, body in zip(functions[::2], functions[1::2], strict=True)}
    return str(parsed), code


def only(code):
    (instructions,) = code.values()
    return instructions


def count(code, *mnemonics):
    return sum(mnemonic in mnemonics for mnemonic, _ in code)


@each_variant
@each("name", ["open", "seal"])
def test_a_round_is_two_instructions_and_no_addition_of_a_key(name, variant):
    code = only(compiled(name, variant, arm.CPUS[0])[1])
    blocks = VECTORS + 3  # of the main loop, a lone one, the last bytes, and the mask of the tag
    assert count(code, "aese") == blocks * variant.rounds
    assert count(code, "aesmc") == blocks * (variant.rounds - 1)
    assert count(code, "eor") < 12 * blocks  # those of GHASH, and the text and the last round key of each block


@each_variant
@each("name", ["open", "verify", "seal"])
def test_products_are_made_by_instructions(name, variant):
    code = only(compiled(name, variant, arm.CPUS[0])[1])
    groups = 2 if name == "seal" else 1  # sealing hashes its last group behind the loop
    # Three a vector and two for the reduction; the same for a lone block, the last bytes and the sizes.
    assert count(code, "pmull", "pmull2") >= groups * (3 * VECTORS + 2) + 3 * 5


@each("name", NAMES)
@each("cpu", arm.CPUS)
def test_nothing_is_called_but_to_copy_and_to_fill_memory(cpu, name):
    text, code = compiled(name, LONG, cpu)
    called = {
        operands
        for instructions in code.values()
        for mnemonic, operands in instructions
        if mnemonic in {"bl", "blr", "br"} or (mnemonic == "b" and not operands.startswith(".L"))
    }
    assert called <= {"memcpy", "memmove", "memset"}
    assert "llvm.x86" not in text


@each_variant
@each(("name", "reads"), [("open", VECTORS + 2), ("seal", VECTORS + 1)])
def test_every_vector_of_the_text_is_read_by_a_load_that_may_not_be_repeated(name, reads, variant):
    text, _ = compiled(name, variant, arm.CPUS[0])
    assert len(re.findall(r"load volatile <2 x i64>, ptr [^,]+, align 1\b", text)) == reads
    # Whatever else is read lies aligned, in the schedule, or in the scratch block of the last bytes.
    assert len(set(re.findall(r"load <2 x i64>, ptr ([^,]+), align 1\b", text))) <= 1


@each("name", NAMES)
@each("cpu", arm.CPUS)
def test_every_vector_register_is_cleared_or_restored(cpu, name):
    for code in compiled(name, LONG, cpu)[1].values():
        used = {int(number) for _, operands in code for number in re.findall(r"\b[vqdz](\d+)\b", operands)}
        end = max(index for index, (mnemonic, _) in enumerate(code) if mnemonic == "ret")
        last = {}
        for index, (mnemonic, operands) in enumerate(code[:end]):
            for number in re.findall(r"\b[vqdz](\d+)\b", operands):
                last[int(number)] = index, mnemonic, operands
        for number in used | {*range(8), *range(16, 32)}:
            _, mnemonic, operands = last[number]
            if 8 <= number < 16:  # a function preserves the low half: to load that clears the high half
                assert (mnemonic, f"d{number}" in operands) in {("ldp", True), ("ldr", True)}
            else:
                assert (mnemonic, operands) in {
                    ("movi", f"v{number}.2d, #0000000000000000"),
                    ("mov", f"z{number}.d, #0"),
                }
