"""Emit the AES and carry-less multiplication instructions of an architecture, as LLVM intrinsics.

`X86` has AES-NI and PCLMULQDQ, or VAES and VPCLMULQDQ, on vectors of 16, 32 or 64 bytes; `Arm` has AESE, AESMC and
PMULL on vectors of 16 bytes. Both have the same operations. Vectors are of 64-bit words.
"""

from __future__ import annotations

from typing import Any, Protocol

from llvmlite import ir

I8, I64 = ir.IntType(8), ir.IntType(64)
_BYTES = ir.VectorType(I8, 16)
_WORDS = ir.VectorType(I64, 2)


class Instructions(Protocol):
    """The operations on vectors of the native width that an architecture has instructions for."""

    def aes_round(self, state: ir.Value, key: ir.Value) -> ir.Value:
        """Return MixColumns(ShiftRows(SubBytes(state))) XOR key, the round of FIPS 197 section 5.1."""

    def aes_last(self, state: ir.Value, key: ir.Value) -> ir.Value:
        """Return ShiftRows(SubBytes(state)) XOR key, the last round."""

    def clmul(self, left: ir.Value, right: ir.Value, select: int) -> ir.Value:
        """Multiply one word of each block: bit 0 of `select` selects the word of `left`, bit 4 that of `right`."""


class X86:
    """The instructions of x86-64."""

    def __init__(self, builder: ir.IRBuilder, native: int) -> None:
        self._builder = builder
        self._suffix = {16: "", 32: ".256", 64: ".512"}[native]

    def aes_round(self, state: ir.Value, key: ir.Value) -> ir.Value:
        return self._call("llvm.x86.aesni.aesenc", state, key)

    def aes_last(self, state: ir.Value, key: ir.Value) -> ir.Value:
        return self._call("llvm.x86.aesni.aesenclast", state, key)

    def clmul(self, left: ir.Value, right: ir.Value, select: int) -> ir.Value:
        return self._call("llvm.x86.pclmulqdq", left, right, I8(select))

    def _call(self, name: str, first: ir.Value, *rest: ir.Value) -> ir.Value:
        return call(self._builder, name + self._suffix, first.type, first, *rest)


class Arm:
    """The instructions of AArch64.

    AESE adds the key before SubBytes, where AESENC adds it behind MixColumns. So a round here adds zeros before and the
    key behind, and LLVM makes one instruction of that addition and the AESE of the next round.
    """

    def __init__(self, builder: ir.IRBuilder) -> None:
        self._builder = builder

    def aes_round(self, state: ir.Value, key: ir.Value) -> ir.Value:
        mixed = call(self._builder, "llvm.aarch64.crypto.aesmc", _BYTES, self._substitute(state))
        return self._add(mixed, key)

    def aes_last(self, state: ir.Value, key: ir.Value) -> ir.Value:
        return self._add(self._substitute(state), key)

    def clmul(self, left: ir.Value, right: ir.Value, select: int) -> ir.Value:
        words = (left, select & 1), (right, select >> 4)
        factors = [self._builder.extract_element(vector, I64(index)) for vector, index in words]
        product = call(self._builder, "llvm.aarch64.neon.pmull64", _BYTES, *factors)
        return self._builder.bitcast(product, _WORDS)

    def _substitute(self, state: ir.Value) -> ir.Value:
        block = self._builder.bitcast(state, _BYTES)
        return call(self._builder, "llvm.aarch64.crypto.aese", _BYTES, block, _BYTES([0] * 16))

    def _add(self, block: ir.Value, key: ir.Value) -> ir.Value:
        return self._builder.xor(self._builder.bitcast(block, _WORDS), key)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> Any:
    """Call the intrinsic of that name."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(declare(builder.module, name, signature), arguments)


def declare(module: ir.Module, name: str, signature: ir.FunctionType) -> ir.Function:
    """Return the function of that name in `module`, and declare it if needed."""
    return module.globals.get(name) or ir.Function(module, signature, name)
