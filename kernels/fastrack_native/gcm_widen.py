"""Build the function that opens chunks of quantised values and widens them to BF16 by their scales, as LLVM IR.

The values of a chunk stay in a buffer of its thread, and so in a cache: only the result is written to memory. No memory
is indexed by a value or a scale, and no branch depends on one: tables of bytes are in registers.

Large results are streamed past the caches. Streamed stores are complete when their thread takes the next chunks of its
call, or finds that there are none: x86 has no locked instruction that passes them (Intel SDM, volume 3, section 13.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir

from fastrack._crypto import base
from fastrack._crypto.isa import InstructionSet
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE
from fastrack_native.gcm_ir import Variant, chunk_function, define_chunk, define_run, fill_zero
from fastrack_native.llvm import I8, I16, I32, I64, VOID, call, emit_loop, pointer

_Ends = tuple[ir.Value, ir.Value]  # the addresses of values and of results
_Widen = Callable[[ir.Value], ir.Value]  # returns a vector of values as BF16

_EXPONENT, _NAN = 0x7F800000, 0x7FC00000  # of float32
_MAGNITUDES = 128  # of a float of 8 bits; bytes of a table of them
_LARGE = 256  # values in a block that repay its table
_LINE = 64


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
                    _emit_blocks(builder, kind, variant.isa, row, (buffer, target, chunk, size))
        with clear:  # zeros by an infinite scale would be no zeros
            fill_zero(builder, target, builder.mul(size, I64(2)))
    builder.ret(good)


def _emit_blocks(
    builder: ir.IRBuilder, kind: int, isa: InstructionSet, row: Sequence[ir.Value], place: tuple[ir.Value, ...]
) -> None:
    """Emit the loops over the blocks of a chunk that share a scale, and over the rows of each that are in the chunk."""
    scales, is_wide, _, columns, tall, wide, across, streams = row
    buffer, target, chunk, size = place
    add, sub, mul = builder.add, builder.sub, builder.mul
    start = mul(chunk, I64(CHUNK_SIZE))
    stop = add(start, size)
    first, last = builder.udiv(start, columns), _divide_up(builder, stop, columns)
    top_band = builder.udiv(first, tall)

    def emit_band(index: ir.Value) -> None:
        band = add(top_band, index)
        top, bottom = mul(band, tall), mul(add(band, I64(1)), tall)
        top, bottom = _larger(builder, top, first), _smaller(builder, bottom, last)
        height = sub(bottom, top)
        # Of a single row only the part that is in the chunk; it may have many blocks.
        is_one = builder.icmp_unsigned("==", height, I64(1))
        begin, end = mul(top, columns), mul(bottom, columns)
        left = builder.udiv(sub(_larger(builder, start, begin), begin), wide)
        right = _divide_up(builder, sub(_smaller(builder, stop, end), begin), wide)
        left, right = builder.select(is_one, left, I64(0)), builder.select(is_one, right, across)

        def emit_block(index: ir.Value) -> None:
            block = add(left, index)
            scale = _load_scale(builder, scales, is_wide, add(mul(band, across), block))
            column = mul(block, wide)
            width = _smaller(builder, wide, sub(columns, column))

            def emit_rows(emit_run: Callable[..., None]) -> None:
                def emit_row(index: ir.Value) -> None:
                    at = add(add(begin, mul(index, columns)), column)
                    low, high = _larger(builder, at, start), _smaller(builder, add(at, width), stop)
                    length = sub(_larger(builder, low, high), low)
                    offset = sub(low, start)
                    emit_run(length, (add(buffer, offset), add(target, mul(offset, I64(2)))), streams)

                emit_loop(builder, height, [], emit_row)

            _emit_block(builder, kind, isa, scale, mul(height, width), emit_rows)

        emit_loop(builder, sub(right, left), [], emit_block)

    emit_loop(builder, sub(_divide_up(builder, last, tall), top_band), [], emit_band)


def _divide_up(builder: ir.IRBuilder, value: ir.Value, by: ir.Value) -> ir.Value:
    return builder.udiv(builder.add(value, builder.sub(by, I64(1))), by)


def _smaller(builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_unsigned("<", left, right), left, right)


def _larger(builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_unsigned(">", left, right), left, right)


def _load_scale(builder: ir.IRBuilder, scales: ir.Value, is_wide: ir.Value, index: ir.Value) -> ir.Value:
    """Return a scale as float32, with one NaN, which rounds to NaN. One of BF16 is its upper half."""
    address = builder.add(scales, builder.shl(index, builder.add(is_wide, I64(1))))
    upper = builder.add(address, builder.mul(is_wide, I64(2)))
    low, high = (builder.zext(builder.load(pointer(builder, half, 0, I16)), I32) for half in (address, upper))
    low = builder.mul(low, builder.trunc(is_wide, I32))
    bits = builder.or_(builder.shl(high, I32(16)), low)
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, I32(0x7FFFFFFF)), I32(_EXPONENT))
    return builder.bitcast(builder.select(is_nan, I32(_NAN), bits), ir.FloatType())


def _emit_block(
    builder: ir.IRBuilder,
    kind: int,
    isa: InstructionSet,
    scale: ir.Value,
    size: ir.Value,
    emit_rows: Callable[[Callable[..., None]], None],
) -> None:
    """Emit the widening of a block of so many values by one scale.

    A float of 8 bits is a sign and one of 128 magnitudes. All magnitudes by the scale are a table, which instructions
    look up in registers. It repays in a large block. In a small one the table is that of the magnitudes alone.
    """
    if not has_tables(isa) or base.VALUES[kind] == "I8":
        emit_rows(partial(_emit_run, builder, (isa.width, 8, 1), partial(_widen, builder, kind, scale)))
        return
    with builder.if_else(builder.icmp_unsigned("<", size, I64(_LARGE))) as (small, large):
        with small:
            emit_rows(partial(_emit_run, builder, (8, 1), partial(_widen, builder, kind, scale)))
        with large:
            words = _widen(builder, kind, scale, ir.VectorType(I8, _MAGNITUDES)(list(range(_MAGNITUDES))))
            find = partial(_look_up, builder, _tables(builder, words))
            emit_rows(partial(_emit_run, builder, (_LINE, 0), find))


def _emit_run(
    builder: ir.IRBuilder, widths: Sequence[int], widen: _Widen, length: ir.Value, ends: _Ends, streams: ir.Value
) -> None:
    """Emit loops over values: so many at a time, then the rest in smaller groups; with 0 the rest at once."""
    source, target = ends
    for lanes in widths:
        if not lanes:
            # Even a store of nothing brings a line into the cache, which slows a streamed store that follows.
            with builder.if_then(builder.icmp_unsigned("!=", length, I64(0))):
                _emit_rest(builder, widths[0], widen, length, (source, target))
            break

        def body(
            streaming: bool, _: ir.Value, source: ir.Value, target: ir.Value, lanes: int = lanes
        ) -> list[ir.Value]:
            result = widen(builder.load(pointer(builder, source, 0, ir.VectorType(I8, lanes)), align=1))
            place = pointer(builder, target, 0, result.type)
            stored = builder.store(result, place, align=_LINE if streaming else 1)
            if streaming:
                stored.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
            return [builder.add(source, I64(lanes)), builder.add(target, I64(2 * lanes))]

        count, rest = builder.udiv(length, I64(lanes)), builder.urem(length, I64(lanes))
        if lanes == _LINE:
            # A line that is streamed is not read first.
            is_line = builder.icmp_unsigned("==", builder.and_(target, I64(_LINE - 1)), I64(0))
            streamed = builder.select(is_line, builder.mul(count, streams), I64(0))
            source, target = emit_loop(builder, streamed, [source, target], partial(body, True))
            count = builder.sub(count, streamed)
        source, target = emit_loop(builder, count, [source, target], partial(body, False))
        length = rest


def _emit_rest(builder: ir.IRBuilder, lanes: int, widen: _Widen, length: ir.Value, ends: _Ends) -> None:
    """Emit the widening of fewer values than lanes."""
    kind = ir.VectorType(I8, lanes)
    mask = builder.icmp_unsigned("<", kind(list(range(lanes))), _splat(builder, builder.trunc(length, I8), lanes))
    source, target = (builder.inttoptr(end, I8.as_pointer()) for end in ends)
    values = call(builder, f"llvm.masked.load.v{lanes}i8.p0", kind, source, I32(1), mask, _constant(kind, 0))
    result = widen(values)
    call(builder, f"llvm.masked.store.v{lanes}i16.p0", VOID, result, target, I32(1), mask)


def _widen(builder: ir.IRBuilder, kind: int, scale: ir.Value, values: ir.Value) -> ir.Value:
    """Return values by a scale as BF16."""
    count = values.type.count
    product = builder.fmul(_float(builder, kind, values, ir.VectorType(I32, count)), _splat(builder, scale, count))
    halves = builder.bitcast(_round(builder, product), ir.VectorType(I16, 2 * count))
    words = _pick(builder, halves, halves, range(1, 2 * count, 2))
    every = partial(_constant, words.type)
    is_nan = builder.icmp_unsigned(">", builder.and_(words, every(0x7FFF)), every(_EXPONENT >> 16))
    return builder.select(is_nan, every(_NAN >> 16), words)


def _tables(builder: ir.IRBuilder, words: ir.Value) -> list[ir.Value]:
    """Return the lower bytes of words, and the upper ones, each as two vectors."""
    cast = builder.bitcast(words, ir.VectorType(I8, 2 * words.type.count))
    return [
        _pick(builder, cast, cast, range(half + start, half + start + 2 * _LINE, 2))
        for start in (0, 1)
        for half in (0, 2 * _LINE)
    ]


def _look_up(builder: ir.IRBuilder, tables: Sequence[ir.Value], values: ir.Value) -> ir.Value:
    """Return the words of the magnitudes of values, with the signs of the values unless they are NaN."""
    kind = values.type
    every = partial(_constant, kind)
    # The halves of a vector in turn, 8 bytes of each, as below they are put together in blocks of 16 bytes.
    words = builder.bitcast(values, ir.VectorType(I64, 8))
    values = builder.bitcast(_pick(builder, words, words, [0, 4, 1, 5, 2, 6, 3, 7]), kind)
    low, high = (permute(builder, values, *tables[start : start + 2]) for start in (0, 2))
    is_nan = builder.and_(
        builder.icmp_unsigned("==", low, every(_NAN >> 16 & 0xFF)), builder.icmp_unsigned("==", high, every(_NAN >> 24))
    )
    signed = builder.xor(high, builder.and_(values, every(0x80)))
    high = builder.select(is_nan, high, signed)
    halves = []
    for start in (0, 8):
        order = [16 * block + start + place + which for block in range(4) for place in range(8) for which in (0, _LINE)]
        halves.append(builder.bitcast(_pick(builder, low, high, order), ir.VectorType(I16, 32)))
    return _pick(builder, halves[0], halves[1], range(_LINE))


def has_tables(isa: InstructionSet) -> bool:
    """Return whether an instruction set has the instruction of `permute`."""
    return isa.native == _LINE


def permute(builder: ir.IRBuilder, values: ir.Value, first: ir.Value, second: ir.Value) -> ir.Value:
    """Return the bytes of a table at the lower seven bits of values."""
    return call(builder, "llvm.x86.avx512.vpermi2var.qi.512", values.type, first, values, second)


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


def _pick(builder: ir.IRBuilder, left: ir.Value, right: ir.Value, order: Sequence[int]) -> ir.Value:
    return builder.shuffle_vector(left, right, ir.VectorType(I32, len(order))(list(order)))
