"""Build the compression function of SHA-512 as an LLVM function, of one message or of several in the lanes of vectors.

It is built of additions, rotations and logic alone: no branch and no address depends on data (FIPS 180-4).
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import reduce
from itertools import count, islice

from llvmlite import ir

from fastrack._crypto.isa import InstructionSet
from fastrack_native.llvm import I32, I64, call, define, emit_loop, pointer

BLOCK_WORDS, STATE_WORDS = 16, 8  # of 64 bits

_ROUNDS = 80


def compress_function(module: ir.Module, isa: InstructionSet, lanes: int) -> ir.Function:
    """Return the function `(state, block, mask)` that absorbs a block of each lane; build it if needed.

    The arguments are addresses of words of 64 bits, at multiples of 64 bytes. Word `i` of lane `k` is at index
    `i * lanes + k`. `state` has 8 words a lane, `block` 16, and `mask` one: all bits set, or zero in a lane whose state
    is to stay as it is.
    """
    symbol = f"fastrack_sha512_{'_'.join(map(str, isa))}_{lanes}"
    return define(module, symbol, 3, lambda function: _Compression(function, lanes).run(), isa)


def initial_state() -> list[int]:
    """Return the words of the state before the first block: those of the square roots of primes (section 5.3.5)."""
    return _fractions_of_roots(STATE_WORDS, 2)


def _fractions_of_roots(number: int, degree: int) -> list[int]:
    """Return the first 64 bits of the fractional parts of the roots of the first primes, of so many."""
    primes = islice((n for n in count(2) if all(n % divisor for divisor in range(2, n))), number)
    with localcontext(prec=60):
        return [int(Decimal(prime) ** (1 / Decimal(degree)) % 1 * 2**64) for prime in primes]


class _Compression:
    """An emitter of the 80 rounds: 16 at a time, in a loop but for the first."""

    def __init__(self, function: ir.Function, lanes: int) -> None:
        self._state, self._block, self._mask = function.args
        self._lanes = lanes
        self._type = I64 if lanes == 1 else ir.VectorType(I64, lanes)
        self._builder = ir.IRBuilder(function.append_basic_block())
        self._constants = _constants(function.module)

    def run(self) -> None:
        builder = self._builder
        before = [self._load(self._state, index) for index in range(STATE_WORDS)]
        words = [self._load(self._block, index) for index in range(BLOCK_WORDS)]
        state = self._rounds(before, words, I64(0))

        def body(index: ir.Value, *values: ir.Value) -> list[ir.Value]:
            state, words = list(values[:STATE_WORDS]), list(values[STATE_WORDS:])
            first = builder.mul(builder.add(index, I64(1)), I64(BLOCK_WORDS))
            return [*self._rounds(state, words, first, extends=True), *words]

        state = emit_loop(builder, I64(_ROUNDS // BLOCK_WORDS - 1), [*state, *words], body)[:STATE_WORDS]
        mask = self._load(self._mask, 0)
        for index, value in enumerate(state):
            # Loaded again, as the registers do not suffice to hold it through the rounds.
            total = builder.add(self._load(self._state, index), builder.and_(value, mask))
            builder.store(total, self._pointer(self._state, index), align=8)
        builder.ret(I64(0))

    def _rounds(
        self, state: list[ir.Value], words: list[ir.Value], first: ir.Value, *, extends: bool = False
    ) -> list[ir.Value]:
        """Return the state after 16 rounds; `extends` replaces `words`, those of the 16 rounds before."""
        builder = self._builder
        a, b, c, d, e, f, g, h = state
        for index in range(BLOCK_WORDS):
            if extends:
                words[index] = self._sum(
                    words[index],
                    self._mix(words[(index + 1) % 16], 1, 8, shift=7),
                    words[(index + 9) % 16],
                    self._mix(words[(index + 14) % 16], 19, 61, shift=6),
                )
            constant = self._constant(builder.add(first, I64(index)))
            chosen = builder.xor(g, builder.and_(e, builder.xor(f, g)))
            majority = builder.or_(builder.and_(a, b), builder.and_(c, builder.or_(a, b)))
            step = self._sum(h, builder.add(words[index], constant), chosen, self._mix(e, 14, 18, 41))
            total = self._sum(step, majority, self._mix(a, 28, 34, 39))
            a, b, c, d, e, f, g, h = total, a, b, c, builder.add(d, step), e, f, g
        return [a, b, c, d, e, f, g, h]

    def _mix(self, value: ir.Value, *rotations: int, shift: int = 0) -> ir.Value:
        """Return the XOR of rotations to the right, and of a shift."""
        parts = [self._rotate(value, bits) for bits in rotations]
        if shift:
            parts.append(self._builder.lshr(value, self._repeat(shift)))
        return reduce(self._builder.xor, parts)

    def _rotate(self, value: ir.Value, bits: int) -> ir.Value:
        name = "i64" if self._lanes == 1 else f"v{self._lanes}i64"
        return call(self._builder, f"llvm.fshr.{name}", self._type, value, value, self._repeat(bits))

    def _sum(self, *values: ir.Value) -> ir.Value:
        return reduce(self._builder.add, values)

    def _repeat(self, value: int) -> ir.Constant:
        return I64(value) if self._lanes == 1 else self._type([value] * self._lanes)

    def _constant(self, index: ir.Value) -> ir.Value:
        word = self._builder.load(self._builder.gep(self._constants, [I64(0), index]))
        return broadcast(self._builder, word, self._lanes)

    def _load(self, address: ir.Value, index: int) -> ir.Value:
        return self._builder.load(self._pointer(address, index), align=8)

    def _pointer(self, address: ir.Value, index: int) -> ir.Value:
        return pointer(self._builder, address, 8 * index * self._lanes, self._type)


def broadcast(builder: ir.IRBuilder, word: ir.Value, lanes: int) -> ir.Value:
    """Return a word in all lanes."""
    if lanes == 1:
        return word
    alone = builder.insert_element(ir.VectorType(I64, lanes)(ir.Undefined), word, I64(0))
    return builder.shuffle_vector(alone, alone, ir.VectorType(I32, lanes)([0] * lanes))


def _constants(module: ir.Module) -> ir.GlobalVariable:
    """Return the table of the constants of the rounds."""
    name = "fastrack_sha512_constants"
    table = module.globals.get(name)
    if table is None:
        words = _fractions_of_roots(_ROUNDS, 3)  # of cube roots (section 4.2.3)
        table = ir.GlobalVariable(module, ir.ArrayType(I64, len(words)), name)
        table.initializer = table.type.pointee(words)
        table.global_constant = True
        table.linkage = "internal"
    return table
