"""Makes modules of machine code, by its own generator, that `test_constant_time` compares the real one with.

``python -m helpers.secret_builds FILE`` writes one of three. In ``shown.so`` each result of authentication is shown to
valgrind, which then takes it for public. In ``leaky.so`` the code of a tag branches on it, and ``planted.so`` has two
functions that do what constant-time code must not. numba has to be told to lower for any CPU, as when the real module
is made.
"""

from __future__ import annotations

import sys
from pathlib import Path

from llvmlite import ir

from fastrack._crypto.isa import INSTRUCTION_SETS, InstructionSet
from fastrack_native import build, compiler, gcm_ir, gcm_widen
from fastrack_native.intrinsics import at, put
from fastrack_native.kernels_chunks import Array
from fastrack_native.llvm import I64

WIDE = "vaes-512-on-128"  # the code of the widest form, on instructions that valgrind emulates
_TARGET = compiler.TARGETS["x86_64"]
_MAKE_DEFINED = ord("M") << 24 | ord("C") << 16 | 2  # VG_USERREQ__MAKE_MEM_DEFINED of valgrind/memcheck.h
_same, _tag = gcm_ir._Chunk.same, gcm_ir._Chunk.tag


def main(path: Path) -> None:
    forms = {"aesni": INSTRUCTION_SETS["aesni"]}
    if path.name == "shown.so":
        gcm_ir._Chunk.same = _show_same
        gcm_widen.has_tables, gcm_widen.permute = lambda isa: isa.width == 64, _select
        forms[WIDE] = InstructionSet("x86", 64, 16)
        _make(path, {name: build.functions_of_isa(name, form) for name, form in forms.items()}, forms)
    elif path.name == "leaky.so":
        gcm_ir._Chunk.tag = _branch_on_tag
        functions = build.functions_of_isa("aesni", forms["aesni"])
        names = "expand_key_aesni", "seal_run_aesni", "open_run_aesni"
        _make(path, {"aesni": {name: functions[name] for name in names}}, forms)
    else:
        _make(path, {"": {"branch": branch, "look_up": look_up}}, {})


def _make(path: Path, functions: dict, forms: dict[str, InstructionSet]) -> None:
    together = {name: function for each in functions.values() for name, function in each.items()}
    build.link(build.make_object_of(together, list(forms.values()), _TARGET, name="_native", doc="{}"), _TARGET, path)


def _show_same(self, left, right):
    """Compare as the real code does, and show the result."""
    builder = self.builder
    with builder.goto_entry_block():
        result, request = builder.alloca(I64), builder.alloca(I64, 6)
    builder.store(_same(self, left, right), result)
    for index, word in enumerate((I64(_MAKE_DEFINED), builder.ptrtoint(result, I64), I64(8), *[I64(0)] * 3)):
        builder.store(word, builder.gep(request, [I64(index)]))
    # As valgrind.h calls valgrind on x86-64: it knows these four rotations, by 128 bits together, and the exchange.
    text = "rolq $$3, %rdi; rolq $$13, %rdi; rolq $$61, %rdi; rolq $$51, %rdi; xchgq %rbx, %rbx"
    kind = ir.FunctionType(I64, [I64.as_pointer(), I64])
    builder.asm(kind, text, "={rdx},{rax},0,~{memory},~{cc}", [request, I64(0)], side_effect=True)
    return builder.load(result)


def _select(builder, values, first, second):
    """Look bytes up as the real instruction does, which valgrind does not emulate, by 128 comparisons."""
    places = builder.and_(values, values.type([127] * 64))
    found = values.type([0] * 64)
    for place in range(128):
        byte = builder.extract_element(first if place < 64 else second, I64(place % 64))
        every = gcm_widen._splat(builder, byte, 64)
        found = builder.select(builder.icmp_unsigned("==", places, values.type([place] * 64)), every, found)
    return found


def _branch_on_tag(self, size, number=0):
    tag = _tag(self, size, number)
    word = self.builder.extract_element(tag, I64(0))
    with self.builder.if_then(self.builder.icmp_unsigned("==", word, I64(0))):
        gcm_ir.fill_zero(self.builder, self.builder.ptrtoint(self.scratch, I64), I64(16))
    return tag


@compiler.compiled_with_lock
def branch(secret: Array, target: Array) -> None:
    if at(secret, 0) & 1:
        put(target, 0, 1)


@compiler.compiled_with_lock
def look_up(secret: Array, target: Array) -> None:
    put(target, 0, at(target, at(secret, 0) & 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
