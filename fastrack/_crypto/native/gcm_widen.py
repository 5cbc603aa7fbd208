"""Build the function that opens chunks of quantised values and widens them to BF16 by their scales, as LLVM IR.

The values of a chunk stay in a buffer of its thread, and so in a cache: only the result is written to memory. No table
is indexed by a value, and no branch depends on one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir

from fastrack._crypto import base
from fastrack._crypto.isa import InstructionSet
from fastrack._crypto.native.gcm_ir import Variant, chunk_function, define_chunk, define_run, fill_zero
from fastrack._crypto.native.llvm import I8, I16, I32, I64, emit_loop, pointer
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE

_Ends = tuple[ir.Value, ir.Value]  # the addresses of values and of results

_EXPONENT, _NAN = 0x7F800000, 0x7FC00000  # of float32
_LARGE = (127 + 119) << 23  # the float32 2^119: scales below stay finite times 256, and by the largest F8_E4M3


def widen_function(module: ir.Module, variant: Variant, name: str) -> ir.Function:
    """Return the function that opens and widens a run of chunks; build it if needed.

    It takes `(schedule, source, target, first, count, size, buffer, scaling)`, and returns the index of the first chunk
    that failed authentication, or the count. The buffer is the thread's own, of a chunk. `scaling` is the address of a
    row of `base.scaling_row`.
    """
    chunk = define_chunk(module, variant, name, 7, _build_widen)
    return define_run(module, variant, name, chunk, SEALED_CHUNK_SIZE, 2 * CHUNK_SIZE)


def _build_widen(function: ir.Function, variant: Variant) -> None:
    schedule, source, target, chunk, size, buffer, scaling = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    open_chunk = chunk_function(function.module, variant, "open")
    good = builder.call(open_chunk, (schedule, source, buffer, chunk, size))
    with builder.if_else(builder.icmp_unsigned("!=", good, I64(0))) as (widen, clear):
        with widen:
            row = [builder.load(pointer(builder, scaling, 8 * word)) for word in range(base.SCALING_WORDS)]
            for kind in range(len(base.VALUES)):
                with builder.if_then(builder.icmp_unsigned("==", row[base.VALUES_KIND], I64(kind))):
                    _emit_runs(builder, kind, variant.isa, row, (buffer, target, chunk, size))
        with clear:  # zeros by an infinite scale would be no zeros
            fill_zero(builder, target, builder.mul(size, I64(2)))
    builder.ret(good)


def _emit_runs(
    builder: ir.IRBuilder, kind: int, isa: InstructionSet, row: Sequence[ir.Value], place: tuple[ir.Value, ...]
) -> None:
    """Emit the loop over the runs of values in a chunk that share a scale."""
    scales, is_wide, _, columns, tall, wide, across = row
    buffer, target, chunk, size = place
    add, sub, mul, select = builder.add, builder.sub, builder.mul, builder.select
    start = mul(chunk, I64(CHUNK_SIZE))
    stop = sub(add(start, size), I64(1))
    (height, column), (last, last_column) = (
        (builder.udiv(element, columns), builder.urem(element, columns)) for element in (start, stop)
    )
    block = builder.udiv(column, wide)
    runs = sub(add(mul(last, across), builder.udiv(last_column, wide)), add(mul(height, across), block))
    runs = select(builder.icmp_unsigned("==", size, I64(0)), I64(0), add(runs, I64(1)))
    above = mul(builder.udiv(height, tall), across)

    def least(left: ir.Value, right: ir.Value) -> ir.Value:
        return select(builder.icmp_unsigned("<", left, right), left, right)

    def body(_: ir.Value, offset: ir.Value, *at: ir.Value) -> list[ir.Value]:
        column, block, above, within = at
        edge = least(mul(add(block, I64(1)), wide), columns)
        length = least(sub(edge, column), sub(size, offset))
        scale = _load_scale(builder, scales, is_wide, add(above, block))
        _emit_run(builder, kind, isa, scale, length, (add(buffer, offset), add(target, mul(offset, I64(2)))))
        is_end = builder.icmp_unsigned("==", edge, columns)
        within = add(within, builder.zext(is_end, I64))
        is_next = builder.icmp_unsigned("==", within, tall)
        return [
            add(offset, length),
            select(is_end, I64(0), edge),
            select(is_end, I64(0), add(block, I64(1))),
            select(is_next, add(above, across), above),
            select(is_next, I64(0), within),
        ]

    emit_loop(builder, runs, [I64(0), column, block, above, builder.urem(height, tall)], body)


def _load_scale(builder: ir.IRBuilder, scales: ir.Value, is_wide: ir.Value, index: ir.Value) -> ir.Value:
    """Return a scale as float32. One of BF16 is its upper half."""
    address = builder.add(scales, builder.shl(index, builder.add(is_wide, I64(1))))
    upper = builder.add(address, builder.mul(is_wide, I64(2)))
    low, high = (builder.zext(builder.load(pointer(builder, half, 0, I16)), I32) for half in (address, upper))
    low = builder.mul(low, builder.trunc(is_wide, I32))
    return builder.bitcast(builder.or_(builder.shl(high, I32(16)), low), ir.FloatType())


def _emit_run(
    builder: ir.IRBuilder, kind: int, isa: InstructionSet, scale: ir.Value, length: ir.Value, ends: _Ends
) -> None:
    """Emit the widening of a run of values by one scale.

    The fast way is for scales by which no number becomes NaN. So time tells which scales are infinite, NaN, as good as
    infinite, or zero for values with infinities, but nothing else.
    """
    if isa == isa.one_block and isa.architecture == "x86":  # converts no float16
        _emit_loops(builder, (isa.width, 8, 1), scale, length, ends, partial(_widen, builder, kind))
        return
    size = builder.and_(builder.bitcast(scale, I32), I32(0x7FFFFFFF))
    is_plain = builder.icmp_unsigned("<", size, I32(_LARGE))
    if base.VALUES[kind] == "F8_E5M2":
        is_plain = builder.and_(is_plain, builder.icmp_unsigned("!=", size, I32(0)))
    with builder.if_else(is_plain) as (fast, slow):
        with fast:
            exact = builder.fmul(scale, ir.FloatType()(256.0 if base.VALUES[kind] == "F8_E4M3" else 1.0))
            _emit_loops(builder, (isa.width, 16, 1), exact, length, ends, partial(_widen_plain, builder, kind))
        with slow:
            _emit_loops(builder, (8, 1), scale, length, ends, partial(_widen, builder, kind))


def _emit_loops(
    builder: ir.IRBuilder,
    widths: tuple[int, ...],
    scale: ir.Value,
    length: ir.Value,
    ends: _Ends,
    widen: Callable[[ir.Value, ir.Value], ir.Value],
) -> None:
    """Emit loops over values: so many at a time, then the rest in smaller groups, and then each."""
    source, target = ends
    for lanes in widths:
        factor = _splat(builder, scale, lanes)

        def body(
            _: ir.Value, source: ir.Value, target: ir.Value, lanes: int = lanes, factor: ir.Value = factor
        ) -> list[ir.Value]:
            values = builder.load(pointer(builder, source, 0, ir.VectorType(I8, lanes)), align=1)
            result = widen(values, factor)
            builder.store(result, pointer(builder, target, 0, result.type), align=1)
            return [builder.add(source, I64(lanes)), builder.add(target, I64(2 * lanes))]

        source, target = emit_loop(builder, builder.udiv(length, I64(lanes)), [source, target], body)
        length = builder.urem(length, I64(lanes))


def _widen(builder: ir.IRBuilder, kind: int, values: ir.Value, factor: ir.Value) -> ir.Value:
    """Return values by any scale as BF16."""
    size = ir.VectorType(I32, values.type.count)
    product = builder.fmul(_float(builder, kind, values, size), factor)
    is_nan = builder.fcmp_unordered("uno", product, product)
    rounded = builder.select(is_nan, _constant(size, _NAN), _round(builder, product))
    return builder.trunc(builder.ashr(rounded, _constant(size, 16)), ir.VectorType(I16, size.count))


def _widen_plain(builder: ir.IRBuilder, kind: int, values: ir.Value, factor: ir.Value) -> ir.Value:
    """Return values by a plain scale as BF16; for F8_E4M3 by a scale times 256.

    An F8_E5M2 is the upper half of a float16. With an F8_E4M3 as its exponent and fraction a float16 is 256 times less,
    as its bias is 8 more. Every float16 becomes a normal float32.
    """
    name, count = base.VALUES[kind], values.type.count
    words, floats = ir.VectorType(I16, count), ir.VectorType(ir.FloatType(), count)
    if name == "I8":
        exact = builder.sitofp(values, floats)
    else:
        bits = builder.shl(builder.sext(values, words), _constant(words, 8 if name == "F8_E5M2" else 7))
        if name == "F8_E4M3":
            bits = builder.and_(bits, _constant(words, 0xBFFF))
        exact = builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), count)), floats)
    rounded = builder.bitcast(_round(builder, builder.fmul(exact, factor)), ir.VectorType(I16, 2 * count))
    odd = ir.VectorType(I32, count)(list(range(1, 2 * count, 2)))
    result = builder.shuffle_vector(rounded, rounded, odd)  # the upper halves
    if name == "I8":
        return result
    least = _constant(values.type, 0x7F if name == "F8_E4M3" else 0x7D)
    is_nan = builder.icmp_unsigned(">=", builder.and_(values, _constant(values.type, 0x7F)), least)
    return builder.select(is_nan, _constant(words, _NAN >> 16), result)


def _float(builder: ir.IRBuilder, kind: int, values: ir.Value, size: ir.VectorType) -> ir.Value:
    """Return values as float32, exactly. Subnormal ones are counted: an operand that is subnormal may take longer."""
    floats = ir.VectorType(ir.FloatType(), size.count)
    every = partial(_constant, size)
    if base.VALUES[kind] == "I8":
        return builder.sitofp(values, floats)
    mantissa, bias, largest = {"F8_E4M3": (3, 7, 0x7E), "F8_E5M2": (2, 15, 0x7B)}[base.VALUES[kind]]
    bits = builder.zext(values, size)
    sign = builder.shl(builder.and_(bits, every(0x80)), every(24))
    bits = builder.and_(bits, every(0x7F))
    normal = builder.add(builder.shl(bits, every(23 - mantissa)), every((127 - bias) << 23))
    special = builder.icmp_unsigned(">", bits, every(largest))  # NaN and infinities, whose exponent is all ones
    normal = builder.or_(normal, builder.select(special, every(_EXPONENT), every(0)))
    unit = _constant(floats, 2.0 ** (1 - bias - mantissa))
    small = builder.bitcast(builder.fmul(builder.uitofp(bits, floats), unit), size)
    is_small = builder.icmp_unsigned("<", bits, every(1 << mantissa))
    return builder.bitcast(builder.or_(builder.select(is_small, small, normal), sign), floats)


def _round(builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
    """Return values of float32 that are rounded to nearest even in their upper halves, which are BF16."""
    every = partial(_constant, ir.VectorType(I32, values.type.count))
    bits = builder.bitcast(values, every(0).type)
    odd = builder.and_(builder.lshr(bits, every(16)), every(1))
    return builder.add(builder.add(bits, every(0x7FFF)), odd)


def _constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return kind([value] * kind.count)


def _splat(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    kind = ir.VectorType(value.type, lanes)
    first = builder.insert_element(kind(ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, first, ir.VectorType(I32, lanes)([0] * lanes))
