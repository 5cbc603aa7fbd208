"""Expand a message key on the host into the state that the CUDA kernels read.

The layout is that of `State` in ``kernels/chunk.cuh``: the key schedule (FIPS 197, section 5.2), the base nonce, the
last GHASH block of a full chunk times H, and the powers of H from 1 to 513, divided by x (``kernels/ghash.cuh`` says
why).

There are two implementations. On x86 CPUs with AES-NI and PCLMULQDQ it is LLVM IR on these instructions; elsewhere, and
where numba's compiler is off, it is `portable_key_state`. Neither looks up a table nor branches on a secret.
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
    LENGTH_PLACE,
    NONCE_PLACE,
    POWERS_PLACE,
    STATE_SIZE,
    write_portably,
)

Writer = Callable[[Bytes, Bytes], None]

_STRANDS = 8  # powers that are made at a time, so that no product waits for the one before

# The function is given to CPUs that may have no more than these.
_TARGET = ("x86-64", "+aes,+pclmul,+ssse3")

_compiled = cached_njit(nogil=False)  # so short that to give the lock away would cost more, where others want it


def write_state(key: MessageKey, target: Bytes) -> None:
    """Expand a message key into the state that the kernels read.

    Parameters
    ----------
    key : MessageKey
        An AES key of 16 or 32 bytes, and a base nonce.
    target : numpy.ndarray
        `STATE_SIZE` bytes, writable and contiguous, at a multiple of 8; page-locked memory will do. Every
        byte is written.

    Raises
    ------
    ValueError
        If the target is another array. Native code relies on this check.
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
    # numba looks only at this file and at what a function closes over to see whether the copy on disk is still good.
    digest = (
        f"{source_digest()}/{(STATE_SIZE, NONCE_PLACE, LENGTH_PLACE, POWERS_PLACE, LAST_POWER, CHUNK_SIZE, NONCE_SIZE)}"
    )

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
    """Build the function `(target, material)` in a module, unless it is there."""
    name = f"fastrack_key_state_{bits}"
    known = module.globals.get(name)
    if known is not None:
        return known
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
        place = builder.add(target, ir.Constant(I64, NONCE_PLACE + start))
        builder.store(value, builder.inttoptr(place, word.as_pointer()), align=1)
    # Read back, rather than kept: fifteen round keys do not fit into the registers and would be left on the stack.
    keys = [emit.load(target, 16 * index, once=True) for index in range(len(keys))]
    hash_key = emit.times_x(emit.reverse_bytes(encrypt_block(emit, emit.words(0, 0), keys)))
    emit.store(emit.multiply(emit.words(8 * CHUNK_SIZE, 0), hash_key), target, LENGTH_PLACE)
    _emit_powers(function, emit, hash_key)
    return function


def _emit_powers(function: ir.Function, emit: Emitter, first: ir.Value) -> None:
    builder, target = emit.builder, function.args[0]
    powers = [first]
    for exponent in range(2, _STRANDS + 1):
        powers.append(emit.multiply(powers[(exponent + 1) // 2 - 1], powers[exponent // 2 - 1]))
    for exponent, power in enumerate(powers, start=1):
        emit.store(power, target, POWERS_PLACE + 16 * exponent)
    step = powers[-1]

    entry = builder.block
    loop, done = (function.append_basic_block() for _ in range(2))
    start = builder.add(target, ir.Constant(I64, POWERS_PLACE + 16))
    size = 16 * _STRANDS
    builder.branch(loop)
    builder.position_at_end(loop)
    place = builder.phi(I64)
    after = builder.add(place, ir.Constant(I64, size))
    place.add_incoming(start, entry)
    place.add_incoming(after, loop)
    for offset in range(0, size, 16):
        emit.store(emit.multiply(emit.load(place, offset), step), after, offset)
    end = builder.add(start, ir.Constant(I64, 16 * (LAST_POWER - 1) - size))
    builder.cbranch(builder.icmp_unsigned("<", after, end), loop, done)

    builder.position_at_end(done)
    emit.store(emit.multiply(emit.load(after), step), after, size)
    builder.ret_void()
