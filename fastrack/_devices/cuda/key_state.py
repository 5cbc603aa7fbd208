"""Expansion of a message key on the host into the state that the CUDA kernels read.

The layout is that of `State` in ``kernels/chunk.cuh``: the key schedule (FIPS 197, section 5.2), the base nonce, the
last GHASH block of a full chunk times H, and the powers of H from 1 to 513, divided by x for the reason in
``kernels/ghash.cuh``.

CPUs with instructions for AES and GHASH use them, by LLVM IR. Other CPUs, and processes without numba's compiler, use
`portable_key_state`. Neither looks up a table or branches on a secret.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
from llvmlite import ir

from fastrack._crypto.base import Bytes
from fastrack._crypto.cobblestone import CHUNK_SIZE, NONCE_SIZE, MessageKey
from fastrack._crypto.forms import Form, narrow_form
from fastrack._crypto.gcm_ir import copy, encrypt_block, expand_key, fill_zero, isolate_frame
from fastrack._crypto.jit import cached_njit, emitted, source_digest, wipe_stack
from fastrack._crypto.llvm import I64, Emitter, compile_for, define, emit_loop
from fastrack._devices.cuda.portable_key_state import (
    LAST_POWER,
    LENGTH_OFFSET,
    NONCE_OFFSET,
    POWERS_OFFSET,
    STATE_SIZE,
    write_portably,
)

Writer = Callable[[Bytes, Bytes], None]

_STRANDS = 8  # powers that are computed at a time, so that no product waits for the one before

_compiled = cached_njit(nogil=False)  # releasing the lock would cost more than the call


def write_state(key: MessageKey, target: Bytes) -> None:
    """Expand a message key into the state that the kernels read, and write every byte of `target`.

    The target has `STATE_SIZE` bytes, writable and contiguous, at a multiple of 8, such as page-locked memory. Raise
    ValueError if it differs from that. Native code relies on this check.
    """
    flags = target.flags
    if target.dtype != np.uint8 or target.shape != (STATE_SIZE,) or not (flags.c_contiguous and flags.writeable):
        raise ValueError(
            f"expected a writable, contiguous uint8 array of {STATE_SIZE} bytes for the state of a key, "
            f"got {target.dtype} of shape {target.shape}"
        )
    _writer()(np.frombuffer(key.material, np.uint8), target)


@cache
def _writer() -> Writer:
    return write_by_instructions() if has_instructions() else write_portably


def has_instructions() -> bool:
    """Return whether this machine can run `write_by_instructions`."""
    return narrow_form() is not None


@cache
def write_by_instructions() -> Writer:
    """Compile the implementation for CPUs with instructions for AES and GHASH."""
    # numba considers only this file and the closure of a function to decide whether cached code is valid.
    layout = (STATE_SIZE, NONCE_OFFSET, LENGTH_OFFSET, POWERS_OFFSET, LAST_POWER, CHUNK_SIZE, NONCE_SIZE)
    digest = f"{source_digest()}/{layout}"

    @_compiled
    def write(material: Bytes, target: Bytes) -> None:
        assert digest
        _write(material.size - NONCE_SIZE, target.ctypes.data, material.ctypes.data)
        wipe_stack()

    return write  # type: ignore[no-any-return]


@emitted
def _write(builder: ir.IRBuilder, key_size: ir.Value, target: ir.Value, material: ir.Value) -> None:
    form = narrow_form()
    assert form is not None
    short, long = (
        define(builder.module, f"fastrack_key_state_{bits}", 2, partial(emit_state, form=form, bits=bits))
        for bits in (128, 256)
    )
    function = builder.select(builder.icmp_unsigned("==", key_size, I64(32)), long, short)
    builder.call(function, [target, material])


def emit_state(function: ir.Function, form: Form, bits: int) -> None:
    """Emit the function `(target, material)`."""
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
