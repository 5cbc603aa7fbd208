"""Ask the CPU what instructions it has."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from fastrack_native.compiler import compiled_with_lock
from fastrack_native.intrinsics import emitted, word_pointer
from fastrack_native.kernels_chunks import Array
from fastrack_native.llvm import I32, I64, call

_AT_HWCAP = 16  # of getauxval: the instructions that the kernel lets programs use


def build_cpu(architecture: str) -> dict[str, Any]:
    """Return `cpuid(leaf, part, target)` and `xcr0()` for x86-64, or `hwcap()` for AArch64."""
    return {"cpuid": cpuid, "xcr0": xcr0} if architecture == "x86_64" else {"hwcap": hwcap}


@compiled_with_lock
def cpuid(leaf: int, part: int, target: Array) -> None:
    """Write EAX, EBX, ECX and EDX of a leaf, each as a word (Intel SDM, volume 2, CPUID)."""
    _cpuid(leaf, part, target)


@compiled_with_lock
def xcr0() -> int:
    """Return the states of registers that the kernel saves. It ends a process on a CPU without OSXSAVE."""
    return int(_xcr0())


@compiled_with_lock
def hwcap() -> int:
    """Return the kernel's word of instructions."""
    return int(_hwcap())


@emitted
def _cpuid(builder: ir.IRBuilder, leaf: ir.Value, part: ir.Value, target: ir.Value) -> None:
    kind = ir.FunctionType(ir.LiteralStructType([I32] * 4), [I32, I32])
    asm = ir.InlineAsm(kind, "cpuid", "={ax},={bx},={cx},={dx},{ax},{cx}", side_effect=True)
    found = builder.call(asm, [builder.trunc(leaf, I32), builder.trunc(part, I32)])
    for index in range(4):
        word = builder.zext(builder.extract_value(found, index), I64)
        builder.store(word, word_pointer(builder, target, I64(index)))


@emitted
def _xcr0(builder: ir.IRBuilder) -> ir.Value:
    kind = ir.FunctionType(ir.LiteralStructType([I32, I32]), [I32])
    found = builder.call(ir.InlineAsm(kind, "xgetbv", "={ax},={dx},{cx}", side_effect=True), [I32(0)])
    low, high = (builder.zext(builder.extract_value(found, index), I64) for index in range(2))
    return builder.or_(low, builder.shl(high, I64(32)))


@emitted
def _hwcap(builder: ir.IRBuilder) -> ir.Value:
    return call(builder, "getauxval", I64, I64(_AT_HWCAP))
