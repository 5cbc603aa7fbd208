"""Build HKDF-Expand-SHA-512 of message keys as LLVM functions: of one message, or of several in the lanes of vectors.

The keys are those of https://c2sp.org/chunked-encryption. The states of HMAC after the two padded keys (RFC 2104,
section 2) are computed once a call.

No branch and no address depends on a secret, except for the branch on the comparison of commitments. Secrets are on the
stack alone: in memory that is overwritten at the end, and in frames that the function of `gcm_ir.stack_wiper`, which
the caller calls, overwrites.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from fastrack._crypto.cobblestone import DERIVED_SIZE, PREFIX_SIZE
from fastrack._crypto.isa import InstructionSet
from fastrack.format import COMMITMENT_SIZE, HEADER_SIZE, NONCE_SIZE, SALT_SIZE
from fastrack_native.gcm_ir import copy, fill_zero
from fastrack_native.llvm import I8, I64, call, define, emit_loop, pointer
from fastrack_native.sha512_ir import BLOCK_WORDS, STATE_WORDS, broadcast, compress_function, initial_state

_DIGEST_SIZE = 8 * STATE_WORDS
_BLOCK_SIZE = 8 * BLOCK_WORDS
_PREFIX_WORDS, _SALT_WORDS, _HEADER_WORDS = PREFIX_SIZE // 8, SALT_SIZE // 8, HEADER_SIZE // 8
_FIXED_SIZE = PREFIX_SIZE + SALT_SIZE  # bytes before the context
_PADS = 0x3636363636363636, 0x5C5C5C5C5C5C5C5C  # of the inner and of the outer hash
_FIRST_BIT = 1 << 63  # of the padding of a message
_LENGTH_SIZE = 17  # bytes of padding at least: the first bit and the length
_MOST_SECRET_WORDS = 4
_SKIPPED = _HEADER_WORDS - _SALT_WORDS  # words of the commitment, between salt and context
_ALL = (1 << 64) - 1
_MOST_LANES = 8

# The layout of the memory on the stack, in bytes. States and blocks have the lanes of a word side by side.
_PADDED = 0  # the states after the padded keys
_NEXT = 2 * _DIGEST_SIZE  # the address of the next message
_STATE = 4 * _DIGEST_SIZE
_FIRST = _STATE + _MOST_LANES * _DIGEST_SIZE  # the first block of output
_BLOCK = _FIRST + _MOST_LANES * _DIGEST_SIZE
_MASK, _MESSAGE, _SIZE, _ROW = (_BLOCK + _MOST_LANES * (_BLOCK_SIZE + 8 * column) for column in range(4))
_MEMORY_SIZE = _ROW + 8 * _MOST_LANES


def derive_function(module: ir.Module, isa: InstructionSet) -> ir.Function:
    """Return the function `(secret, size, text, table, count, target)`; build it if needed.

    The secret has `size` bytes, 16 or 32. `text` is the prefix, and for each of `count` messages its header, its
    context, a byte of zero, 0x80, and zeros up to a multiple of 8 bytes. `table` has two words for each: the bytes of
    the context, and the row of `target` that AES key, base nonce and commitment are written to.

    It returns the first message whose commitment differs from that in its header, or the count.
    """
    return _define(module, isa, "derive", isa.width // 8, 6, _build_derive)


def _define(
    module: ir.Module, isa: InstructionSet, name: str, lanes: int, arguments: int, build: Callable[[_Function], None]
) -> ir.Function:
    symbol = f"fastrack_{name}_{'_'.join(map(str, (*isa, lanes)))}"
    clears = build is _build_derive  # the others are called by it
    return define(module, symbol, arguments, lambda made: build(_Function(made, isa, lanes)), isa, clears=clears)


class _Function:
    """An emitter of a function of so many lanes. Addresses, sizes and indexes are 64-bit integers."""

    def __init__(self, function: ir.Function, isa: InstructionSet, lanes: int) -> None:
        self.function = function
        self.isa = isa
        self.lanes = lanes
        self.builder = ir.IRBuilder(function.append_basic_block())

    def place(self, address: ir.Value, offset: int, *terms: tuple[ir.Value, int]) -> ir.Value:
        """Return the address after an offset, and after each of some values times a number."""
        for value, step in terms:
            address = self.builder.add(address, self.builder.mul(value, I64(step)))
        return self.builder.add(address, I64(offset))

    def load(self, address: ir.Value, align: int = 8) -> ir.Value:
        return self.builder.load(pointer(self.builder, address), align=align)

    def store(self, address: ir.Value, word: ir.Value, align: int = 8) -> None:
        self.builder.store(word, pointer(self.builder, address), align=align)

    def read(self, address: ir.Value) -> ir.Value:
        """Load a big-endian word from any address."""
        return call(self.builder, "llvm.bswap.i64", I64, self.load(address, align=1))

    def write(self, address: ir.Value, word: ir.Value) -> None:
        """Store a big-endian word to any address."""
        self.store(address, call(self.builder, "llvm.bswap.i64", I64, word), align=1)

    def lane(self, memory: ir.Value, offset: int, index: int, lane: int | ir.Value) -> ir.Value:
        """Return the address of a word of a lane."""
        number = I64(lane) if isinstance(lane, int) else lane
        return self.place(memory, offset + 8 * index * self.lanes, (number, 8))

    def store_all(self, memory: ir.Value, offset: int, index: int, word: ir.Value) -> None:
        """Store a word in all lanes."""
        value = broadcast(self.builder, word, self.lanes)
        address = self.lane(memory, offset, index, 0)
        self.builder.store(value, pointer(self.builder, address, kind=value.type), align=8)

    def spread(self, memory: ir.Value, pad: int) -> None:
        """Copy the state after a padded key to all lanes."""
        for index in range(STATE_WORDS):
            word = self.load(self.place(memory, _PADDED + 8 * (len(_PADS) * index + pad)))
            self.store_all(memory, _STATE, index, word)

    def copy_state(self, memory: ir.Value, target: int) -> None:
        """Copy the states of all lanes to words of the same arrangement."""
        copy(self.builder, self.place(memory, target), self.place(memory, _STATE), I64(_DIGEST_SIZE * self.lanes))

    def compress(self, memory: ir.Value) -> None:
        function = compress_function(self.function.module, self.isa, self.lanes)
        self.builder.call(function, [self.builder.add(memory, I64(place)) for place in (_STATE, _BLOCK, _MASK)])


def _build_derive(emit: _Function) -> None:
    secret, size, text, table, count, target = emit.function.args
    builder, module, isa = emit.builder, emit.function.module, emit.isa
    room = builder.alloca(I8, _MEMORY_SIZE)
    room.align = 64
    memory = builder.ptrtoint(room, I64)
    _absorb_secret(emit, memory, secret, size)
    emit.store(emit.place(memory, _NEXT), emit.place(text, PREFIX_SIZE))
    one, several = (_define(module, isa, "derive_group", lanes, 6, _build_group) for lanes in (1, emit.lanes))
    is_one = builder.icmp_unsigned("==", count, I64(1))
    function, step = builder.select(is_one, one, several), builder.select(is_one, I64(1), I64(emit.lanes))

    def body(index: ir.Value, bad: ir.Value) -> list[ir.Value]:
        first = builder.mul(index, step)
        left = builder.sub(count, first)
        used = builder.select(builder.icmp_unsigned("<", left, step), left, step)
        found = builder.call(function, [memory, size, text, emit.place(table, 0, (first, 16)), used, target])
        is_bad = builder.icmp_unsigned("<", found, used)
        is_first = builder.and_(is_bad, builder.icmp_unsigned("==", bad, count))
        return [builder.select(is_first, builder.add(first, found), bad)]

    groups = builder.udiv(builder.add(count, builder.sub(step, I64(1))), step)
    (bad,) = emit_loop(builder, groups, [count], body)
    fill_zero(builder, memory, I64(_MEMORY_SIZE))
    builder.ret(bad)


def _absorb_secret(emit: _Function, memory: ir.Value, secret: ir.Value, size: ir.Value) -> None:
    """Emit the states of HMAC after the two padded keys, in the first two lanes."""
    builder = emit.builder
    for index, initial in enumerate(initial_state()):
        emit.store_all(memory, _STATE, index, I64(initial))
    for index in range(BLOCK_WORDS):
        word = I64(0)
        if index < _MOST_SECRET_WORDS:
            is_there = builder.icmp_unsigned("<", I64(8 * index), size)
            address = builder.select(is_there, emit.place(secret, 8 * index), secret)
            word = builder.select(is_there, emit.read(address), word)
        inner, outer = (builder.xor(word, I64(pad)) for pad in _PADS)
        emit.store_all(memory, _BLOCK, index, inner)
        emit.store(emit.lane(memory, _BLOCK, index, 1), outer)
    emit.store_all(memory, _MASK, 0, I64(_ALL))
    emit.compress(memory)
    for index in range(STATE_WORDS):
        for pad in range(len(_PADS)):
            word = emit.load(emit.lane(memory, _STATE, index, pad))
            emit.store(emit.place(memory, _PADDED + 8 * (len(_PADS) * index + pad)), word)


def _build_group(emit: _Function) -> None:
    """Emit `(memory, size, text, table, used, target)`, which derives as many keys as are used of the lanes.

    The others take what the last of these does. It returns the first of these whose commitment differs, or their
    number.
    """
    memory, size, text, table, used, target = emit.function.args
    builder = emit.builder
    last = builder.sub(used, I64(1))

    def prepare(lane: ir.Value, message: ir.Value) -> list[ir.Value]:
        row = builder.select(builder.icmp_unsigned("<", lane, last), lane, last)
        length = emit.load(emit.place(table, 0, (row, 16)))
        number = emit.load(emit.place(table, 8, (row, 16)))
        after = builder.and_(builder.add(length, I64(9)), I64(-8 & _ALL))
        following = emit.place(message, HEADER_SIZE, (after, 1))
        for place, word in (_MESSAGE, message), (_SIZE, length), (_ROW, emit.place(target, 0, (number, DERIVED_SIZE))):
            emit.store(emit.place(memory, place, (lane, 8)), word)
        emit.store(emit.place(memory, _NEXT), following)
        return [builder.select(builder.icmp_unsigned("<", lane, last), following, message)]

    emit_loop(builder, I64(emit.lanes), [emit.load(emit.place(memory, _NEXT))], prepare)
    expand = _define(emit.function.module, emit.isa, "expand", emit.lanes, 3, _build_expand)
    builder.call(expand, [memory, text, I64(1)])
    _write_rows(emit, memory, used, 0, STATE_WORDS)
    needed = builder.add(size, I64(NONCE_SIZE + COMMITMENT_SIZE))
    with builder.if_then(builder.icmp_unsigned(">", needed, I64(_DIGEST_SIZE))):
        builder.call(expand, [memory, text, I64(2)])
        _write_rows(emit, memory, used, STATE_WORDS, DERIVED_SIZE // 8 - STATE_WORDS)

    def compare(lane: ir.Value, bad: ir.Value) -> list[ir.Value]:
        commitment = emit.place(emit.load(emit.place(memory, _ROW, (lane, 8))), NONCE_SIZE, (size, 1))
        claimed = emit.place(emit.load(emit.place(memory, _MESSAGE, (lane, 8))), SALT_SIZE)
        difference = I64(0)
        for offset in range(0, COMMITMENT_SIZE, 8):
            words = (emit.read(emit.place(address, offset)) for address in (commitment, claimed))
            difference = builder.or_(difference, builder.xor(*words))
        differs = builder.icmp_unsigned("!=", difference, I64(0))
        is_first = builder.and_(differs, builder.icmp_unsigned("==", bad, used))
        return [builder.select(is_first, lane, bad)]

    builder.ret(*emit_loop(builder, used, [used], compare))


def _write_rows(emit: _Function, memory: ir.Value, used: ir.Value, first: int, count: int) -> None:
    """Write so many words of a block of output to the rows, from word `first` of these on."""

    def write(lane: ir.Value) -> None:
        row = emit.load(emit.place(memory, _ROW, (lane, 8)))
        for index in range(count):
            emit.write(emit.place(row, 8 * (first + index)), emit.load(emit.lane(memory, _STATE, index, lane)))

    emit_loop(emit.builder, used, [], write)


def _build_expand(emit: _Function) -> None:
    """Emit `(memory, text, counter)`, which computes a block of the output of each lane.

    Output is HMAC of the block before, if there is one, of the information, and of the counter (RFC 5869, section 2.3).
    """
    memory, text, counter = emit.function.args
    builder, lanes = emit.builder, emit.lanes
    before = builder.mul(builder.sub(counter, I64(1)), I64(STATE_WORDS))  # words of the block before
    emit.copy_state(memory, _FIRST)
    emit.spread(memory, 0)

    def count_blocks(lane: ir.Value) -> ir.Value:
        length = emit.load(emit.place(memory, _SIZE, (lane, 8)))
        most = emit.place(length, _FIXED_SIZE + 1 + _LENGTH_SIZE + _BLOCK_SIZE - 1, (before, 8))
        return builder.udiv(most, I64(_BLOCK_SIZE))

    def find_most(lane: ir.Value, most: ir.Value) -> list[ir.Value]:
        blocks = count_blocks(lane)
        return [builder.select(builder.icmp_unsigned(">", blocks, most), blocks, most)]

    fill = _define(emit.function.module, emit.isa, "fill", lanes, 6, _build_fill)

    def absorb(block: ir.Value) -> None:
        def prepare(lane: ir.Value) -> None:
            blocks = count_blocks(lane)
            is_used = builder.sext(builder.icmp_unsigned("<", block, blocks), I64)
            emit.store(emit.place(memory, _MASK, (lane, 8)), is_used)
            start = builder.sub(builder.mul(block, I64(BLOCK_WORDS)), before)
            is_last = builder.zext(builder.icmp_unsigned("==", builder.add(block, I64(1)), blocks), I64)
            builder.call(fill, [emit.place(memory, 0, (lane, 8)), text, start, before, counter, is_last])

        emit_loop(builder, I64(lanes), [], prepare)
        emit.compress(memory)

    (most,) = emit_loop(builder, I64(lanes), [I64(0)], find_most)
    emit_loop(builder, most, [], absorb)
    # The outer hash: of the digest in the state, and of its padding.
    emit.copy_state(memory, _BLOCK)
    for index in range(STATE_WORDS, BLOCK_WORDS):
        word = {STATE_WORDS: _FIRST_BIT, BLOCK_WORDS - 1: 8 * (_BLOCK_SIZE + _DIGEST_SIZE)}.get(index, 0)
        emit.store_all(memory, _BLOCK, index, I64(word))
    emit.store_all(memory, _MASK, 0, I64(_ALL))
    emit.spread(memory, 1)
    emit.compress(memory)
    builder.ret(I64(0))


def _build_fill(emit: _Function) -> None:
    """Emit `(memory, text, start, before, counter, is_last)`, which writes a block of a lane; `memory` is at its words.

    `start` is the first word of the block, counted from the information on: prefix, salt, context, counter, padding.
    """
    memory, text, start, before, counter, is_last = emit.function.args
    builder = emit.builder
    message, length = emit.load(emit.place(memory, _MESSAGE)), emit.load(emit.place(memory, _SIZE))
    end = emit.place(length, _FIXED_SIZE)  # where the counter is, in bytes
    bits = builder.sub(I64(56), builder.shl(builder.and_(end, I64(7)), I64(3)))
    end_words = builder.lshr(end, I64(3)), builder.lshr(builder.add(end, I64(1)), I64(3))

    def write(index: ir.Value) -> None:
        word = builder.add(start, index)
        is_context = builder.icmp_signed(">=", word, I64(_PREFIX_WORDS + _SALT_WORDS))
        place = builder.add(word, builder.select(is_context, I64(_SKIPPED - _PREFIX_WORDS), I64(-_PREFIX_WORDS)))
        is_prefix = builder.icmp_signed("<", word, I64(_PREFIX_WORDS))
        address = builder.select(is_prefix, emit.place(text, 0, (word, 8)), emit.place(message, 0, (place, 8)))
        is_inside = builder.icmp_unsigned("<=", word, end_words[1])  # and not negative
        value = builder.select(is_inside, emit.read(builder.select(is_inside, address, text)), I64(0))
        has_counter = builder.icmp_unsigned("==", word, end_words[0])
        value = builder.or_(value, builder.select(has_counter, builder.shl(counter, bits), I64(0)))
        earlier = emit.load(emit.place(memory, _FIRST, (index, 8 * emit.lanes)))
        value = builder.select(builder.icmp_signed("<", word, I64(0)), earlier, value)
        emit.store(emit.place(memory, _BLOCK, (index, 8 * emit.lanes)), value)

    emit_loop(builder, I64(BLOCK_WORDS), [], write)
    with builder.if_then(builder.icmp_unsigned("!=", is_last, I64(0))):
        total = builder.shl(emit.place(end, _BLOCK_SIZE + 1, (before, 8)), I64(3))
        emit.store(emit.place(memory, _BLOCK + 8 * emit.lanes * (BLOCK_WORDS - 1)), total)
    builder.ret(I64(0))
