"""Expansion of a message key on the host into the state that the CUDA kernels read.

The layout is that of `State` in ``kernels/chunk.cuh``: the key schedule (FIPS 197, section 5.2), the base nonce, the
last GHASH block of a full chunk times H, and the powers of H from 1 to 513, divided by x for the reason in
``kernels/ghash.cuh``.

x86 CPUs with AES-NI and PCLMULQDQ use these instructions, by LLVM IR. Other CPUs, and processes without numba's
compiler, use `portable_key_state`. Neither looks up a table or branches on a secret.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from fastrack._crypto.base import Bytes
from fastrack._crypto.cobblestone import CHUNK_SIZE, NONCE_SIZE, MessageKey
from fastrack._crypto.gcm_ir import encrypt_block, expand_128, expand_256, fill_zero, isolate_frame
from fastrack._crypto.jit import cached_njit, source_digest, wipe_stack
from fastrack._crypto.llvm import I32, I64, Emitter, compile_for
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

# The instructions that `has_instructions` requires.
_TARGET = ("x86-64", "+aes,+pclmul,+ssse3")

_compiled = cached_njit(nogil=False)  # releasing the lock would cost more than the call


def write_state(key: MessageKey, target: Bytes) -> None:
    """Expand a message key into the state that the kernels read.

    Parameters
    ----------
    key : MessageKey
        An AES key of 16 or 32 bytes, and a base nonce.
    target : numpy.ndarray
        `STATE_SIZE` bytes, writable and contiguous, at a multiple of 8, such as page-locked memory. Every byte is
        written.

    Raises
    ------
    ValueError
        If the target differs from that. Native code relies on this check.
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
    """Return whether this CPU has AES-NI and PCLMULQDQ."""
    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know this machine
        return False
    return all(features.get(name, False) for name in ("aes", "pclmul", "ssse3"))


@cache
def write_by_instructions() -> Writer:
    """Compile the implementation for x86 CPUs with these instructions."""
    # numba considers only this file and the closure of a function to decide whether cached code is valid.
    layout = (STATE_SIZE, NONCE_OFFSET, LENGTH_OFFSET, POWERS_OFFSET, LAST_POWER, CHUNK_SIZE, NONCE_SIZE)
    digest = f"{source_digest()}/{layout}"

    @_compiled
    def write(material: Bytes, target: Bytes) -> None:
        if material.size == 32 + NONCE_SIZE:
            _emitted(digest, 256, target.ctypes.data, material.ctypes.data)
        else:
            _emitted(digest, 128, target.ctypes.data, material.ctypes.data)
        wipe_stack()

    return write  # type: ignore[no-any-return]


@intrinsic(prefer_literal=True)
def _emitted(typingctx: Any, digest: Any, bits: Any, target: Any, material: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        builder.call(_emit(builder.module, bits.literal_value), values[2:])
        return context.get_dummy_value()

    return types.void(digest, bits, types.int64, types.int64), codegen


def _emit(module: ir.Module, bits: int) -> ir.Function:
    """Return the function `(target, material)` of a module, and build it first if it is missing."""
    name = f"fastrack_key_state_{bits}"
    existing = module.globals.get(name)
    if existing is not None:
        return existing
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64, I64]), name)
    function.linkage = "internal"
    compile_for(function, *_TARGET)
    isolate_frame(function)
    target, material = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    emit = Emitter(builder, 16)
    fill_zero(builder, target, ir.Constant(I64, STATE_SIZE))
    keys = expand_128(emit, material) if bits == 128 else expand_256(emit, material)
    for index, key in enumerate(keys):
        emit.store(key, target, 16 * index)
    for start, word in ((0, I64), (8, I32)):
        source = builder.add(material, ir.Constant(I64, bits // 8 + start))
        value = builder.load(builder.inttoptr(source, word.as_pointer()), align=1)
        destination = builder.add(target, ir.Constant(I64, NONCE_OFFSET + start))
        builder.store(value, builder.inttoptr(destination, word.as_pointer()), align=1)
    # Read back from the target: fifteen round keys do not fit into the registers and would stay on the stack.
    keys = [emit.load(target, 16 * index, once=True) for index in range(len(keys))]
    hash_key = emit.times_x(emit.reverse_bytes(encrypt_block(emit, emit.words(0, 0), keys)))
    emit.store(emit.multiply(emit.words(8 * CHUNK_SIZE, 0), hash_key), target, LENGTH_OFFSET)
    _emit_powers(function, emit, hash_key)
    return function


def _emit_powers(function: ir.Function, emit: Emitter, first: ir.Value) -> None:
    builder, target = emit.builder, function.args[0]
    powers = [first]
    for exponent in range(2, _STRANDS + 1):
        powers.append(emit.multiply(powers[(exponent + 1) // 2 - 1], powers[exponent // 2 - 1]))
    for exponent, power in enumerate(powers, start=1):
        emit.store(power, target, POWERS_OFFSET + 16 * exponent)
    step = powers[-1]

    entry = builder.block
    loop, done = (function.append_basic_block() for _ in range(2))
    start = builder.add(target, ir.Constant(I64, POWERS_OFFSET + 16))
    size = 16 * _STRANDS
    builder.branch(loop)
    builder.position_at_end(loop)
    address = builder.phi(I64)
    after = builder.add(address, ir.Constant(I64, size))
    address.add_incoming(start, entry)
    address.add_incoming(after, loop)
    for offset in range(0, size, 16):
        emit.store(emit.multiply(emit.load(address, offset), step), after, offset)
    end = builder.add(start, ir.Constant(I64, 16 * (LAST_POWER - 1) - size))
    builder.cbranch(builder.icmp_unsigned("<", after, end), loop, done)

    builder.position_at_end(done)
    emit.store(emit.multiply(emit.load(after), step), after, size)
    builder.ret_void()
