"""Emit vector code for the kernels as LLVM IR, with llvmlite.

`Emitter` is a thin layer over `llvmlite.ir.IRBuilder`: 128-, 256- or 512-bit vectors of 64-bit words, rounds of AES,
carry-less multiplication, and the field operations of GHASH. It emits straight-line code only; `emit_loop` emits loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llvmlite import ir

from fastrack._crypto.isa import InstructionSet

I1, I8, I16, I32, I64, I128 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64, 128))
VOID = ir.VoidType()
_BYTES, _WORDS = ir.VectorType(I8, 16), ir.VectorType(I64, 2)

# The reduction constant of a carry-less multiplier, as (low, high) words: x^128 + x^7 + x^2 + x + 1 in the bit order of
# GHASH after a byte swap (NIST SP 800-38D section 6.3).
_POLYNOMIAL = (1, 0xC200000000000000)


class Emitter:
    """An emitter of code on vectors of 16, 32 or 64 bytes, in lanes of one 16-byte block each."""

    def __init__(self, builder: ir.IRBuilder, isa: InstructionSet) -> None:
        self.builder = builder
        self.width = isa.width
        self.native = isa.native
        self.blocks = isa.width // 16
        self.type = ir.VectorType(I64, isa.width // 8)
        self._instructions = _Arm(builder) if isa.architecture == "arm" else _X86(builder, isa.native)

    # Memory. Addresses are 64-bit integers.

    def load(self, address: ir.Value, offset: int = 0, align: int = 1, *, once: bool = False) -> ir.Value:
        """Load a vector. With `once`, memory is read exactly once, however often the value is used."""
        loaded = self.builder.load(pointer(self.builder, address, offset, self.type), align=align)
        if once:
            _make_volatile(loaded)
        return loaded

    def store(self, value: ir.Value, address: ir.Value, offset: int = 0, align: int = 1) -> None:
        self.builder.store(value, pointer(self.builder, address, offset, self.type), align=align)

    def prefetch(self, address: ir.Value, offset: int, *, write: bool = False, locality: int = 3) -> None:
        """Prefetch the cache line at an address that will be read or written soon. The address may be invalid.

        A locality of 3 prefetches into all caches, and one of 2 into all but the first.
        """
        line = pointer(self.builder, address, offset, I8)
        call(self.builder, "llvm.prefetch.p0", VOID, line, I32(int(write)), I32(locality), I32(1))

    # Constants and movement.

    def words(self, low: int, high: int) -> ir.Constant:
        """Return the block (low, high) in every lane."""
        return self.type([low, high] * self.blocks)

    def counters(self, values: Iterable[int]) -> ir.Constant:
        """Return one block per value: the value as 32 bits, big-endian, in the last four bytes, and zeros elsewhere."""
        words = [word for value in values for word in (0, int.from_bytes(value.to_bytes(8, "big"), "little"))]
        return self.type(words)

    def blend(self, left: ir.Value, right: ir.Value, mask: Sequence[bool]) -> ir.Value:
        """Return the blocks of `right` where `mask` is true, and those of `left` elsewhere."""
        if not any(mask):
            return left
        words = 2 * self.blocks
        order = [word + words * mask[word // 2] for word in range(words)]
        return self._shuffle(left, right, order)

    def broadcast(self, block: ir.Value) -> ir.Value:
        """Return a 16-byte block, repeated in every lane."""
        return self._shuffle(block, block, [0, 1] * self.blocks)

    def zero_extend(self, block: ir.Value) -> ir.Value:
        """Return a 16-byte block in the first lane, with zeros elsewhere."""
        return self._shuffle(block, block.type([0, 0]), [0, 1] + [2, 3] * (self.blocks - 1))

    def reduce_xor(self, value: ir.Value) -> ir.Value:
        """Return the XOR of all lanes, as a 16-byte block."""
        parts = [self._shuffle(value, value, [2 * lane, 2 * lane + 1]) for lane in range(self.blocks)]
        return self.xor(*parts)

    def reverse_bytes(self, value: ir.Value) -> ir.Value:
        return self.permute_blocks(value, I8, range(15, -1, -1))

    def swap_words(self, value: ir.Value) -> ir.Value:
        return self.permute_blocks(value, I64, (1, 0))

    def permute_blocks(self, value: ir.Value, element: ir.IntType, order: Sequence[int]) -> ir.Value:
        """Return each block with its elements in that order."""
        count = len(order)
        cast = self.builder.bitcast(value, ir.VectorType(element, count * self.blocks))
        shuffled = self._shuffle(cast, cast, [lane * count + index for lane in range(self.blocks) for index in order])
        return self.builder.bitcast(shuffled, self.type)

    def _shuffle(self, left: ir.Value, right: ir.Value, order: Sequence[int]) -> ir.Value:
        return self.builder.shuffle_vector(left, right, ir.VectorType(I32, len(order))(list(order)))

    # Arithmetic.

    def xor(self, first: ir.Value, *rest: ir.Value) -> ir.Value:
        for other in rest:
            first = self.builder.xor(first, other)
        return first

    def add32(self, left: ir.Value, right: ir.Value) -> ir.Value:
        words = ir.VectorType(I32, self.width // 4)
        total = self.builder.add(self.builder.bitcast(left, words), self.builder.bitcast(right, words))
        return self.builder.bitcast(total, self.type)

    # AES rounds and carry-less products.

    def aes_round(self, state: ir.Value, key: ir.Value) -> ir.Value:
        """Return MixColumns(ShiftRows(SubBytes(state))) XOR key, the round of FIPS 197 section 5.1."""
        return self._by_parts(self._instructions.aes_round, state, key)

    def aes_last(self, state: ir.Value, key: ir.Value) -> ir.Value:
        """Return ShiftRows(SubBytes(state)) XOR key, the last round."""
        return self._by_parts(self._instructions.aes_last, state, key)

    def clmul(self, left: ir.Value, right: ir.Value, select: int) -> ir.Value:
        """Multiply one word of each block: bit 0 of `select` selects the word of `left`, bit 4 that of `right`."""
        return self._by_parts(lambda left, right: self._instructions.clmul(left, right, select), left, right)

    def _by_parts(self, operation: Callable[[ir.Value, ir.Value], ir.Value], *vectors: ir.Value) -> ir.Value:
        """Apply an operation on vectors of the native width to the parts of two vectors."""
        words = self.native // 8
        if words == self.type.count:
            return operation(*vectors)
        parts = []
        for start in range(0, self.type.count, words):
            order = range(start, start + words)
            parts.append(operation(*(self._shuffle(vector, vector, order) for vector in vectors)))
        while len(parts) > 1:
            order = range(2 * parts[0].type.count)
            parts = [self._shuffle(low, high, order) for low, high in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    # The field of GHASH. Blocks are byte-reversed. One factor of each product is pre-shifted: multiplied by x, which
    # compensates for the reflected bit order. Method: Gueron and Kounavis, "Intel carry-less multiplication
    # instruction and its usage for computing the GCM mode" (2010).

    def product(self, left: ir.Value, right: ir.Value, halves: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return the unreduced Karatsuba product (low, crossed, high); `halves` is the precomputed `halves(right)`."""
        low = self.clmul(left, right, 0x00)
        high = self.clmul(left, right, 0x11)
        crossed = self.clmul(self.halves(left), halves, 0x00)
        return low, crossed, high

    def halves(self, value: ir.Value) -> ir.Value:
        """Return the XOR of the two words of a block, in both of its words."""
        return self.xor(value, self.swap_words(value))

    def reduce(self, low: ir.Value, crossed: ir.Value, high: ir.Value) -> ir.Value:
        """Reduce a Karatsuba product, or a sum of them, to one block a lane."""
        polynomial = self.words(*_POLYNOMIAL)
        middle = self.xor(crossed, low, high)
        middle = self.xor(middle, self.swap_words(low), self.clmul(polynomial, low, 0x01))
        return self.xor(high, self.swap_words(middle), self.clmul(polynomial, middle, 0x01))

    def multiply(self, left: ir.Value, right: ir.Value) -> ir.Value:
        return self.reduce(*self.product(left, right, self.halves(right)))

    def times_x(self, block: ir.Value) -> ir.Value:
        """Multiply a byte-reversed block by x, without a branch on its bits, to pre-shift a hash key."""
        builder = self.builder
        wide = builder.bitcast(block, I128)
        carry = builder.ashr(wide, wide.type(127))
        polynomial = builder.bitcast(self.words(*_POLYNOMIAL), wide.type)
        shifted = builder.xor(builder.shl(wide, wide.type(1)), builder.and_(carry, polynomial))
        return builder.bitcast(shifted, block.type)


class _X86:
    """AES-NI and PCLMULQDQ, or VAES and VPCLMULQDQ, on vectors of 16, 32 or 64 bytes."""

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


class _Arm:
    """AESE, AESMC and PMULL, on vectors of 16 bytes.

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


def define(
    module: ir.Module,
    name: str,
    arguments: int,
    build: Callable[[ir.Function], None],
    isa: InstructionSet | None = None,
    *,
    inlines: bool = False,
    clears: bool = False,
) -> ir.Function:
    """Return the internal function of that name, from 64-bit integers to one, and `build` it if needed.

    It is compiled for an instruction set of its own: otherwise LLVM aborts the process at an instruction that the
    target of the module lacks. Unless it `inlines` it has its own stack frame, for a wiper to overwrite. With `clears`
    it clears all registers when it returns, before a function that saves them puts them on the stack.
    """
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(I64, [I64] * arguments), name)
        function.linkage = "internal"
        if not inlines:
            function.attributes.add("noinline")
        texts = {}  # which llvmlite has no call for
        if isa is not None:
            texts["target-cpu"], texts["target-features"] = isa.target
        if clears:
            texts["zero-call-used-regs"] = "all"  # "used" would omit vector registers from the sixteenth on
        for key, value in texts.items():
            if value:  # a CPU on Arm would prevent inlining: LLVM inlines no function that is tuned in another way
                set.add(function.attributes, f'"{key}"="{value}"')
        build(function)
    return function


def pointer(builder: ir.IRBuilder, address: ir.Value, offset: int = 0, kind: ir.Type = I64) -> ir.Value:
    """Return the address of so many bytes after another as a pointer to a value of that type."""
    return builder.inttoptr(builder.add(address, I64(offset)) if offset else address, kind.as_pointer())


def emit_loop(
    builder: ir.IRBuilder, count: ir.Value, seeds: Sequence[ir.Value], body: Callable[..., Sequence[ir.Value] | None]
) -> list[ir.Value]:
    """Emit `for index in range(count): values = body(index, *values)`, and return the values after it.

    The values, which are `seeds` at first, stay in registers. A body returns None if there are none.
    """
    entry = builder.block
    head, inside, done = (builder.append_basic_block() for _ in range(3))
    builder.branch(head)

    builder.position_at_end(head)
    index, *values = phis = [builder.phi(seed.type) for seed in (count, *seeds)]
    builder.cbranch(builder.icmp_unsigned("<", index, count), inside, done)

    builder.position_at_end(inside)
    changed = [builder.add(index, I64(1)), *(body(index, *values) or ())]
    for phi, seed, value in zip(phis, (I64(0), *seeds), changed, strict=True):
        phi.add_incoming(seed, entry)
        phi.add_incoming(value, builder.block)
    builder.branch(head)

    builder.position_at_end(done)
    return values


def _make_volatile(load: Any) -> None:
    # llvmlite cannot mark a load as volatile, so this changes the text of the instruction as it is printed.
    describe = load.descr

    def descr(buffer: list[str]) -> None:
        start = len(buffer)
        describe(buffer)
        buffer[start] = buffer[start].replace("load ", "load volatile ", 1)

    load.descr = descr
    if " = load volatile <" not in str(load):  # a module prints it in the same way
        raise RuntimeError(
            f"marking a load volatile failed: expected llvmlite to print 'load volatile', got {str(load).strip()!r}. "
            "Ciphertext might be read twice, so this code is not made: install another version of llvmlite"
        )
