"""Expansion of a message key into the state of the CUDA kernels, by instructions for AES and GHASH, as LLVM IR."""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from fastrack._crypto.cobblestone import CHUNK_SIZE, NONCE_SIZE
from fastrack._crypto.forms import Form
from fastrack._crypto.native.compiler import compiled_with_lock, declare_cipher
from fastrack._crypto.native.gcm_ir import copy, encrypt_block, expand_key, fill_zero, isolate_frame
from fastrack._crypto.native.intrinsics import emitted
from fastrack._crypto.native.jit import Array, wipe_stack
from fastrack._crypto.native.llvm import I64, Emitter, compile_for, define, emit_loop
from fastrack._devices.cuda.key_state import (
    LAST_POWER,
    LENGTH_OFFSET,
    NONCE_OFFSET,
    POWERS_OFFSET,
    STATE_SIZE,
)

_STRANDS = 8  # powers that are computed at a time, so that no product waits for the one before


def build_key_state(form: Form) -> dict[str, Any]:
    """Return `write_state(material, size, target)`, for a message key of `size` bytes; vectors have one block."""

    @emitted
    def write(builder: ir.IRBuilder, key_size: ir.Value, target: ir.Value, material: ir.Value) -> None:
        short, long = (
            declare_cipher(builder.module, form, partial(state_function, form=form, bits=bits)) for bits in (128, 256)
        )
        function = builder.select(builder.icmp_unsigned("==", key_size, I64(32)), long, short)
        builder.call(function, [target, material])

    @compiled_with_lock
    def write_state(material: Array, size: int, target: Array) -> None:
        write(size - NONCE_SIZE, target, material)
        wipe_stack()

    return {"write_state": write_state}


def state_function(module: ir.Module, form: Form, bits: int) -> ir.Function:
    """Return the function `(target, material)` for keys of so many bits; build it if needed."""
    return define(module, f"fastrack_key_state_{bits}", 2, partial(_emit_state, form=form, bits=bits))


def _emit_state(function: ir.Function, form: Form, bits: int) -> None:
    compile_for(function, *form.target)
    isolate_frame(function)
    target, material = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    emit = Emitter(builder, form)
    fill_zero(builder, target, I64(STATE_SIZE))
    keys = expand_key(emit, material, bits)
    for index, key in enumerate(keys):
        emit.store(key, target, 16 * index)
    copy(builder, builder.add(target, I64(NONCE_OFFSET)), builder.add(material, I64(bits // 8)), I64(NONCE_SIZE))
    # Read back from the target: fifteen round keys do not fit into the registers and would stay on the stack.
    keys = [emit.load(target, 16 * index, once=True) for index in range(len(keys))]
    hash_key = emit.times_x(emit.reverse_bytes(encrypt_block(emit, emit.words(0, 0), keys)))
    emit.store(emit.multiply(emit.words(8 * CHUNK_SIZE, 0), hash_key), target, LENGTH_OFFSET)
    _emit_powers(emit, target, hash_key)
    builder.ret(I64(0))


def _emit_powers(emit: Emitter, target: ir.Value, first: ir.Value) -> None:
    builder = emit.builder
    powers = [first]
    for exponent in range(2, _STRANDS + 1):
        powers.append(emit.multiply(powers[(exponent + 1) // 2 - 1], powers[exponent // 2 - 1]))
    for exponent, power in enumerate(powers, start=1):
        emit.store(power, target, POWERS_OFFSET + 16 * exponent)

    def body(index: ir.Value) -> list[ir.Value]:
        address = builder.add(target, builder.mul(index, I64(16 * _STRANDS)))
        for offset in range(POWERS_OFFSET + 16, POWERS_OFFSET + 16 * (_STRANDS + 1), 16):
            emit.store(emit.multiply(emit.load(address, offset), powers[-1]), address, offset + 16 * _STRANDS)
        return []

    count, rest = divmod(LAST_POWER - _STRANDS, _STRANDS)
    emit_loop(builder, I64(count), [], body)
    for offset in range(POWERS_OFFSET + 16 * (LAST_POWER - rest + 1), POWERS_OFFSET + 16 * (LAST_POWER + 1), 16):
        emit.store(emit.multiply(emit.load(target, offset - 16 * _STRANDS), powers[-1]), target, offset)
